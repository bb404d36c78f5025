"""Locations as tables write them, and as this package does: an absolute path or an s3:// URL."""

from __future__ import annotations

import os
import re


def store_url(location: str) -> str:
    """A location in a table's metadata as this package writes it; s3a and s3n are s3, file: is a path."""
    if re.match(r"s3[an]://", location):
        return f"s3{location[3:]}"
    return re.sub(r"^file:(//)?(?=/)", "", location)


def real_url(location: str) -> str:
    """A folder that a job names, without a slash at its end; a local one absolute, with symlinks resolved."""
    url = store_url(location).rstrip("/")
    return url if "://" in url else os.path.realpath(url)
