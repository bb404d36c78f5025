"""Finds and fetches a model's files: a local folder, S3 or the hub. The driver pins them, each node fetches them once.

This package may import storage, config, messages and the engine's checks of a checkpoint. It loads no weights.
"""
