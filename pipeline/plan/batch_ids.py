"""Each request of an OpenAI batch file has a `custom_id` of its own: results are assigned by it."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.text_files import parsed
from pipeline.input.text_lines import json_lines, open_text, records

ID = "custom_id"
_ID = re.compile(rb'"custom_id"\s*+:\s*+("(?:[^"\\]++|\\.)*+")')


def check_unique_ids(files: Sequence[InputFile], storage: StorageConfig) -> None:
    """Raise UserError that names the first id which two rows share.

    Takes 8 bytes a row. Lines are parsed only if two may share an id, as two keys of that name in one line do too.
    """
    hashes = array("q", (hash(value) for file in files for value in _likely_ids(file, storage)))
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    suspects = set(values[counts > 1].tolist())
    seen: dict[str, tuple[str, int]] = {}
    for url, row, value in _ids(files, storage) if suspects else ():
        if hash(value) in suspects:
            if value in seen:
                first, at = seen[value]
                where = f"row {at}" if first == url else f"row {at} of {first}"
                raise UserError(f"{url}: custom_id {value!r} of row {row} is also that of {where}; make it unique")
            seen[value] = url, row


def _likely_ids(file: InputFile, storage: StorageConfig) -> Iterator[str]:
    """The texts after each key of the ids' name, also in damaged lines and nested objects."""
    with open_text(file.url, storage) as stream:
        for block, *_ in records(stream, "jsonl"):
            for text in _ID.findall(block):
                try:
                    yield json.loads(text) if b"\\" in text else text[1:-1].decode()
                except ValueError:
                    continue


def _ids(files: Sequence[InputFile], storage: StorageConfig) -> Iterator[tuple[str, int, str]]:
    """File, row number from 0, and id of the rows that have one."""
    for file in files:
        with open_text(file.url, storage) as stream:
            lines = (line for block, *_ in records(stream, "jsonl") for line in json_lines(block))
            for row, (values, _) in enumerate(map(parsed, lines)):
                if values is not None and isinstance(values.get(ID), str):
                    yield file.url, row, values[ID]
