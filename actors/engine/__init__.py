"""Text generation on one device: schedules, models, KV cache, sampling, and the engine that batches requests.

Modules in this folder may import torch and transformers, but never ray, pyarrow or pipeline.
"""
