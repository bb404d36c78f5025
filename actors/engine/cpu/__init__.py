"""Fast decoder layers for CPUs: C++ kernels, which are built at first use, and the executor that calls them.

Of the modules in this package, only `executor` imports the engine's modules `cache` and `decoder`.
"""
