"""Defines errors of object stores. None of them means that a file is damaged or exists already."""

from __future__ import annotations


class StoreFailed(OSError):
    """The store failed or refused a call. The message is one line and names the URL."""


class ConditionRefused(StoreFailed):
    """The store does not support conditional puts."""


class NoSuchBucket(StoreFailed):
    """The bucket does not exist."""
