"""Restricts answers to a format: labels, JSON Schema, regular expression or grammar. Thinking may come first."""
