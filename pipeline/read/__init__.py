"""Parquet files to shards: listing and pinning, one schema for all files, cutting and reading row ranges.

Imports storage, config and messages. Only `source` imports ray.
"""
