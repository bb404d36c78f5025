"""Runs the stages of a job: on Ray Data, or on a backend that a test passes."""
