"""Layers of transformers: the passes over known tokens that training and the measures of agreement make."""
