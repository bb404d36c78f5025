"""Train checkpoints along the inference path, score speeds, and adapt a checkpoint to the rows of a job."""
