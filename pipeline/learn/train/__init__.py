"""Train a checkpoint, or a speed adapter for it, on rows in memory."""
