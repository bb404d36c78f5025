"""Fast decoder layers on a CPU: C++ kernels, built at first use, and the layers made of them.

Imports `layer_weights` and nothing else of the engine; the decoder imports it. Cache and kernels meet in the decoder.
"""
