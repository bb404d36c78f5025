"""Fast decoder layers on a CPU: C++ kernels, built at first use, and the executor over them.

Only `executor` knows cache and decoder; products and layers know `layer_weights` alone.
"""
