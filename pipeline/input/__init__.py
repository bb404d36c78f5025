"""Turns input files and tables into shards: lists and pins files, finds one common schema, cuts and reads row ranges.

This package also adds answers to Iceberg and Delta tables. It imports the optional pyiceberg or deltalake only for jobs
that name a table. Its modules may import storage, runtime, config and messages, but not ray.
"""
