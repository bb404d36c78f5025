"""Logits -> tokens: the definition in torch, the CPU's kernel, penalties, and strings that end an answer."""
