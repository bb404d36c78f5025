"""Pins what determines a job before anything runs: identity, shards, batching, memory.

Imports prepare, read, checkpoints, storage, config and the output columns in generate.
"""
