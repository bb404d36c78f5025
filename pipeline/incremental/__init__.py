"""Answers growing input: each run answers only files that no earlier run has answered. A ledger records the runs."""
