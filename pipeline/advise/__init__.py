"""Answers questions before a job runs: what it costs, what it answers, how its file begins."""
