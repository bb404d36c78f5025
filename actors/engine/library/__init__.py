"""Runs transformers' layers: the executor of the library engine, and passes for training and evaluation."""
