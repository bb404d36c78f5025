"""Measure the quality and time of each speed: answer the rows, score the answers, write tables."""
