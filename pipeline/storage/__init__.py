"""Folders on a local disk or in S3: reads, listings, and files that are written once.

May import config and messages; knows nothing of jobs, checkpoints or Ray.
"""
