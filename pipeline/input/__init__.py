"""Lists input files, finds one schema for all of them, and cuts and reads shards (ranges of rows).

Its modules may import storage, runtime, config and messages, but not ray.
"""
