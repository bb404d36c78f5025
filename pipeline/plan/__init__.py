"""What is pinned before anything runs: identity, shards, batching, memory.

Imports prepare, read, checkpoints, storage, config and the output columns in generate.
"""
