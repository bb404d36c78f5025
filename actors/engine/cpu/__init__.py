"""Fast decoder layers on a CPU: C++ kernels, built at first use, and the executor over them.

Only `executor` depends on cache and decoder; products and layers depend on `layer_weights` alone.
"""
