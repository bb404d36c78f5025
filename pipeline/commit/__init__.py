"""Commits answers so that none is lost or written twice. Read sink.py first, then records.py and finalize.py."""
