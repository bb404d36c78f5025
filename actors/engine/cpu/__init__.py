"""Fast decoder layers for CPUs: C++ kernels, which are compiled at first use, and the executor that calls them.

In this package, only module `executor` imports the modules `cache` and `decoder` of the engine.
"""
