"""Sampling of tokens from logits: the reference in torch, the CPU kernel, penalties, and stop strings."""
