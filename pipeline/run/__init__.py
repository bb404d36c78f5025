"""Runs the stages of a job on a backend: Ray Data, or one that a test passes."""
