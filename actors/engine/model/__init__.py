"""A checkpoint folder: its files, weights, model family and speed adapter, and how they are loaded."""
