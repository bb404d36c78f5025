"""Why nothing is lost: parts, commit records, the lease, and the check at the end of a job.

Imports plan, generate, read, runtime, storage. Read sink.py, records.py and finalize.py in this order.
"""
