"""Protects files in local output folders: tune, evaluate and adapt replace only files that a record lists.

The record is a JSON file in the folder. Its key `files` lists the files that the command has written or is about to
write. A folder that holds files but no record belongs to the user, and is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, flat
from pipeline.storage.working_dir import check_outlives_job

FILES = "files"


class OwnedFolder:
    """An output folder, which need not exist. record: name of the record file. key: config key that sets the folder."""

    def __init__(self, path: Path, record: str, key: str) -> None:
        self.path, self.record, self.key = path, path / record, key

    def values(self) -> dict[str, Any]:
        """Return the values in the record file; an empty dict if the file is missing or empty."""
        try:
            text = self.record.read_text()
            values: dict[str, Any] = json.loads(text) if text else {FILES: []}
            if not isinstance(values[FILES], list) or not all(Path(name).name == name for name in values[FILES]):
                raise ValueError("no list of file names in it")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.key}: {self.record} is not a record of this version ({flat(error)}); remove the folder, or "
                "choose another"
            ) from None
        return values if text else {}

    def files(self) -> set[str]:
        """Return the names of the files that the record lists."""
        return set(self.values().get(FILES, []))

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError if the folder holds files but no record, or one of `names` exists but is not listed."""
        if not self.record.exists():
            held = sorted(os.listdir(self.path)) if self.path.is_dir() else []
            if held:
                raise UserError(
                    f"{self.key}: {self.path} holds {held[0]!r} and no {self.record.name} of an earlier run; "
                    "choose an empty or a new folder"
                )
            return
        for name in set(names) - self.files():
            if os.path.lexists(self.path / name):
                raise UserError(
                    f"{self.key}: {self.path / name} exists and {self.record.name} does not list it; move it, or "
                    "choose another folder"
                )

    def make(self) -> None:
        """Create the folder unless it exists. Raises UserError if it cannot be created or is not writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.key}: {self.path}: cannot be created: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"{self.key}: {self.path}: not writable")

    def claim(self, names: Iterable[str]) -> None:
        """Check `names`, create the folder, and add `names` to the record. Call this before the files are written."""
        names = set(names)
        self.check(names)
        self.make()
        if not self.record.exists() or names - self.files():
            self._write(self.values(), names | self.files())

    def discard(self, names: Iterable[str]) -> None:
        """Remove each file in `names` that the record lists, and its name in the record."""
        listed = self.files()
        for name in listed & set(names):
            (self.path / name).unlink(missing_ok=True)
        if listed & set(names):
            self._write(self.values(), listed - set(names))

    def save(self, values: Mapping[str, Any]) -> None:
        """Write `values` to the record, and keep the record's list of files."""
        self._write(values, self.files())

    def _write(self, values: Mapping[str, Any], files: Iterable[str]) -> None:
        text = json.dumps({**values, FILES: sorted(files)}, indent=2, allow_nan=False)
        with replacing(self.record) as temporary:
            temporary.write_text(text + "\n")


def local_path(key: str, place: str) -> Path:
    """Return the path of a local output folder. key: config key that sets the folder.

    Raises UserError for a URL, and for a folder that Ray deletes after the job.
    """
    if "://" in place:
        raise UserError(f"{key}: {place} is not local; name a local folder, and copy the results afterwards")
    check_outlives_job(key, place)
    return Path(place)


def check_apart(key: str, folder: Path, others: Mapping[str, Iterable[Path | str]]) -> None:
    """Raise UserError if `folder` equals, contains or is inside a path in `others`. Symbolic links are resolved.

    Args:
        key: config key that sets the folder.
        others: config key of an input or model -> its local paths.
    """
    output = folder.resolve()
    for other, paths in others.items():
        for path in paths:
            theirs = Path(path).resolve()
            if output.is_relative_to(theirs) or theirs.is_relative_to(output):
                raise UserError(f"{key}: {folder} and {other} {path} overlap; choose another folder")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. After the block, that file replaces `path`; after an error, it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
