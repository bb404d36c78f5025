"""Finds a model's files (local folder, S3 or hub), pins their versions on the driver, and fetches them on each node.

This package loads no weights. It may import storage, config, messages, and the engine's checks of a checkpoint.
"""
