"""Finds a model's files (local folder, S3 or hub), pins them on the driver, and fetches them once on each node.

This package may import storage, config and messages, and the engine's checks of a checkpoint. It loads no weights.
"""
