"""Answers growing input: each run answers the files that no earlier run has answered. A ledger lists the runs."""
