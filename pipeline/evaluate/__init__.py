"""What each speed costs in quality and gains in time: answer, score, tables and plot.

Imports generate's settings, runtime, checkpoints, storage, config and the engine; never `tune`, never ray.
"""
