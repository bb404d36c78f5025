"""Why nothing is lost: parts, records, the lease, the end of a job. Read sink.py, records.py, finalize.py."""
