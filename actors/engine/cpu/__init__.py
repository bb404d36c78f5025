"""Fast decoder layers for CPUs: C++ kernels, which are built at first use, and the executor that calls them.

Only module `executor` imports cache and decoder. Products and layers only import `layer_weights`.
"""
