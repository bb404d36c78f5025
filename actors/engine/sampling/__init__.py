"""Samples tokens from logits: the definition in torch, the CPU kernel, penalties, and stop strings."""
