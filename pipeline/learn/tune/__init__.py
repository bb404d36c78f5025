"""Train a checkpoint along the inference path: plan, train, save."""
