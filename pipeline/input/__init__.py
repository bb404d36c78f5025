"""Lists input files and tables, finds one schema for all of them, and cuts and reads shards (ranges of rows).

This package also adds answers to Iceberg and Delta tables. It imports pyiceberg and deltalake, which are
optional, only for jobs that name a table. Its modules may import storage, runtime, config and messages, but not ray.
"""
