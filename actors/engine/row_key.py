"""The key that a row's random numbers hang on; apart, so that whoever plans a job imports no torch."""

from __future__ import annotations

import hashlib


def row_key(seed: int, source: str, row: int, sample: int = 0) -> int:
    """64-bit key of one row's random numbers, from job seed, file, row number and sample index."""
    digest = hashlib.blake2b(f"{seed}\0{source}\0{row}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
