"""What an object store's failure is, for those who must tell it from a damaged file or a name that is taken."""

from __future__ import annotations


class StoreFailed(OSError):
    """The store has failed, or refuses the call; its one line names the URL and says all there is to say."""


class ConditionRefused(StoreFailed):
    """The store does not take conditional puts."""


class NoSuchBucket(StoreFailed):
    """The bucket does not exist."""
