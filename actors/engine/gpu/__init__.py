"""The paged engine on a GPU: fused layers, Triton kernels, CUDA graphs, pages of cache.

`operations` is the interface between layers and kernels; `engine` is the engine that the scheduler runs.
"""
