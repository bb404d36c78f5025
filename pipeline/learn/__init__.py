"""Train checkpoints with the layers that inference runs, measure their speeds, adapt a checkpoint to a job's rows."""
