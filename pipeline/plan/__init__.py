"""Pins what determines a job before anything runs: identity, shards, batching, memory."""
