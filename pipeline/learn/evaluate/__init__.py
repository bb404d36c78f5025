"""Measure quality and time of each speed: answer, score, tables."""
