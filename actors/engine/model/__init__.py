"""Checkpoint folders: read, check and load their files, weights, model families and speed adapters."""
