"""Uploaded files and batches on disk: a record of JSON each, replaced as a whole, so that a restart finds them all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from pipeline.storage.owned_folder import replacing

ID = re.compile(r"(file|batch)-[0-9a-f]{24}")
RECORD = "skipdecode-batches.json"  # marks a folder as ours


class Store:
    """Files `files/ID` with records `files/ID.json`, batches in folders `batches/ID` with `batch.json`.

    Raises:
        UserError: The folder cannot be written, or holds other files than ours.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not (self.root / RECORD).is_file():
                if any(self.root.iterdir()):
                    raise UserError(f"batches.folder: {folder} holds other files; give an empty or a new folder")
                (self.root / RECORD).write_text("{}\n")
            for name in ("files", "batches"):
                (self.root / name).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"batches.folder: {folder} cannot be written: {error.strerror}") from None

    def new_id(self, kind: str) -> str:
        """An identifier that nobody can guess. kind: file or batch."""
        return f"{kind}-{secrets.token_hex(12)}"

    def add_file(self, source: Path, filename: str, purpose: str) -> dict[str, Any]:
        """Take over a file of the same disk; returns its record."""
        key = self.new_id("file")
        source.replace(self.root / "files" / key)
        return self._record_file(key, filename, purpose)

    def link_result(self, source: Path) -> str:
        """A result as a file with an identifier of its own; the bytes exist once. Returns the identifier."""
        key = self.new_id("file")
        _link(source, self.root / "files" / key)
        self._record_file(key, source.name, "batch_output")
        return key

    def link_requests(self, file: str, batch: str) -> None:
        """Give a new batch its requests, so that their file may be deleted. FileNotFoundError if it is gone."""
        self.batch_folder(batch).mkdir()
        _link(self.content(file), self.requests(batch))

    def requests(self, key: str) -> Path:
        """The requests of a batch."""
        return self.batch_folder(key) / "requests.jsonl"

    def _record_file(self, key: str, filename: str, purpose: str) -> dict[str, Any]:
        record = {
            "id": key,
            "object": "file",
            "bytes": (self.root / "files" / key).stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        _write(self.root / "files" / f"{key}.json", record)
        return record

    def file(self, key: str) -> dict[str, Any] | None:
        """The record of a file; None if there is none."""
        return _read(self.root / "files" / f"{key}.json") if ID.fullmatch(key) else None

    def content(self, key: str) -> Path:
        """Where a file's bytes are."""
        assert ID.fullmatch(key)
        return self.root / "files" / key

    def files(self) -> list[dict[str, Any]]:
        """All records, newest first."""
        return _sorted(_read(path) for path in (self.root / "files").glob("file-*.json"))

    def remove_file(self, key: str) -> None:
        """Forget a file and its bytes."""
        (self.root / "files" / f"{key}.json").unlink(missing_ok=True)
        self.content(key).unlink(missing_ok=True)

    def batch_folder(self, key: str) -> Path:
        """The folder of a batch."""
        assert ID.fullmatch(key)
        return self.root / "batches" / key

    def batch(self, key: str) -> dict[str, Any] | None:
        """The record of a batch; None if there is none."""
        return _read(self.batch_folder(key) / "batch.json") if ID.fullmatch(key) else None

    def save_batch(self, record: dict[str, Any]) -> None:
        """Write a batch's record."""
        _write(self.batch_folder(record["id"]) / "batch.json", record)

    def batches(self) -> list[dict[str, Any]]:
        """All records, newest first."""
        return _sorted(_read(path) for path in (self.root / "batches").glob("batch-*/batch.json"))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links
        shutil.copyfile(source, target)


def _sorted(records: Iterator[dict[str, Any] | None]) -> list[dict[str, Any]]:
    found = [record for record in records if record is not None]
    return sorted(found, key=lambda record: (record["created_at"], record["id"]), reverse=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    assert isinstance(record, dict)
    return record


def _write(path: Path, record: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record) + "\n")
