"""Adapt a checkpoint to the rows of a job: draw and answer a sample, train, evaluate, and choose a speed."""
