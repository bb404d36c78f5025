"""Train a checkpoint to skip layers as generation does: plan, train, save."""
