"""Reads, lists and writes files in folders on a local disk or in S3.

This package may import config and messages. It does not use jobs, checkpoints or Ray.
"""
