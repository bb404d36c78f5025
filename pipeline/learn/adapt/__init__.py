"""Adapt a checkpoint to the rows of a job: sample, answer, tune, evaluate, choose a speed."""
