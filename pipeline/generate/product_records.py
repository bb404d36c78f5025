"""A job's measured choices of products: the first actor on a type of machine records one, all others keep to it.

Products round differently (`actors.engine.cpu.choice`): neither actors nor runs of a resumed job may choose anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.storage.folder import Folder


@dataclass(frozen=True)
class ProductRecords:
    """See `Records` in actors.engine.cpu.choice. folder: the job's output."""

    folder: Folder

    def find(self, key: str) -> bytes | None:
        """The record of a key; None if there is none."""
        try:
            return self.folder.read(_name(key))
        except FileNotFoundError:
            return None

    def settle(self, key: str, value: bytes) -> bytes:
        """Record a value unless there is one; returns the record. A damaged record stays as it is."""
        return value if self.folder.create(_name(key), value) else self.folder.read(_name(key))


def _name(key: str) -> str:
    return f"_job/products-{key}.json"
