"""Generates on one device: schedules, models, cache, sampling, and the engine that runs rows together.

Imports torch and transformers; never ray, pyarrow or pipeline.
"""
