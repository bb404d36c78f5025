"""Commits answers so that none is lost: parts, records, lease, final checks. Read sink.py, records.py, finalize.py."""
