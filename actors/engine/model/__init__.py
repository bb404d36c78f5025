"""Checkpoint folders: reading, checking and loading files, weights, model families and speed adapters."""
