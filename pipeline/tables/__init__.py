"""Iceberg and Delta tables as input and output: snapshots, data files, columns. Imports config, messages and storage.

pyiceberg and deltalake are optional; `table.py` imports them when a job names a table.
"""
