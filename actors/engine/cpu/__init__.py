"""Fast decoder layers for CPUs: C++ kernels, which are built at first use, and the executor that calls them.

Of these modules, only `executor` imports the engine's modules `cache` and `decoder`.
"""
