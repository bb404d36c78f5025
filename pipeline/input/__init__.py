"""Turns input files and tables into shards: lists and pins files, finds one schema, cuts and reads row ranges.

Imports storage, runtime, config and messages. Iceberg and Delta tables are also outputs; pyiceberg and deltalake are
optional, and imported when a job names a table. Nothing here imports ray.
"""
