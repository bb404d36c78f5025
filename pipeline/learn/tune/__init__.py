"""Train a checkpoint with the layers that inference runs: plan, train, save."""
