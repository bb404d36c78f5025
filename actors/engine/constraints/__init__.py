"""Restricts answers to a format: labels, JSON Schema, regular expression or grammar, also after thinking."""
