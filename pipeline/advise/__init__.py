"""Helps before a job runs: writes its file, answers a few of its rows, and estimates its time and cost."""
