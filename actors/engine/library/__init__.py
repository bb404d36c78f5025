"""Code that runs transformers' layers: the library engine, and passes over known tokens for training and evaluation."""
