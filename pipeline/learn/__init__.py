"""Train checkpoints along the inference path, measure their speeds, and adapt a job's checkpoint to its own rows."""
