"""Turns rows into prompts of token ids, and reads the rows' own settings. A bad row gets an error and is not answered.

This package imports input, checkpoints, config and messages; its module `stage` also imports runtime. None imports ray.
"""
