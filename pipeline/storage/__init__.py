"""Reads, lists and writes files in folders on a local disk or in S3. Knows no jobs, checkpoints or Ray."""
