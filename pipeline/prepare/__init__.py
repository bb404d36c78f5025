"""Turns rows into prompts of token ids, and reads a row's own settings. A bad row gets an error.

Imports input, checkpoints, config and messages; `stage` also imports runtime. Nothing here imports ray.
"""
