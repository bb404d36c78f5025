"""Iceberg and Delta tables as input and output: snapshots, data files, columns. Imports config, messages and storage.

pyiceberg and deltalake are optional; `open.py` imports them when a job names a table.
"""
