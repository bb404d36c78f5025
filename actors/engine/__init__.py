"""Generation on one device: schedules, models, cache, sampling, and the engines that run rows together.

Imports torch and transformers; never ray, pyarrow or pipeline.
"""
