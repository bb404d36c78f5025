"""Runs transformers' layers: the executor of the builtin engine, and passes for training and evaluation."""
