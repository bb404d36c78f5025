"""Errors for failures of an object store, as distinct from a damaged file or an existing name."""

from __future__ import annotations


class StoreFailed(OSError):
    """The store failed or refuses the call. The message is one line that names the URL."""


class ConditionRefused(StoreFailed):
    """The store does not support conditional puts."""


class NoSuchBucket(StoreFailed):
    """The bucket does not exist."""
