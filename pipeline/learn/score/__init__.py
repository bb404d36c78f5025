"""Measure time and quality of answers at several speeds."""
