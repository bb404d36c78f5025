"""Answers of a given form: labels, JSON Schemas, regular expressions, grammars, and thinking before them."""
