"""Turns input files and tables into shards: lists and pins files, finds one common schema, cuts and reads row ranges.

This package also adds answers to Iceberg and Delta tables. It imports the optional pyiceberg and deltalake only if a
job names a table. Otherwise it imports only storage, runtime, config and messages, and never ray.
"""
