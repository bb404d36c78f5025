"""Runs the stages of a job on a backend: Ray Data, or a backend that a test passes."""
