"""Input files and tables to shards: listing and pinning, one schema for all files, cutting and reading row ranges.

Imports storage, runtime, config and messages. Iceberg and Delta tables are also outputs; pyiceberg and deltalake are
optional, and imported when a job names a table. Nothing here imports ray.
"""
