"""Turns rows into prompts of token ids, and reads the rows' own settings. A bad row gets an error and is not answered.

Read `prompts.py` first. This package imports input, checkpoints, config and messages, and in its module `stage` also
runtime, but never ray.
"""
