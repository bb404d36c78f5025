"""The input of a job as a list of files: those of its paths, or the data files of its table."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError
from pipeline.config.input import InputConfig
from pipeline.config.job import StorageConfig
from pipeline.read.files import Files, InputFile, fixed_part, list_files, stat
from pipeline.runtime.announce import announced
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import filesystem
from pipeline.tables.table import input_table


def list_input(
    section: InputConfig, storage: StorageConfig, *, may_be_empty: bool = False, after: int | None = None
) -> Files:
    """The input files, as `list_files`; of a table the data files at `input.snapshot`, by default the newest.

    Args:
        may_be_empty: accept an input without files.
        after: a snapshot; only the data files that were appended after it.

    Raises UserError as `list_files`, and for a table whose rows are not those of its data files.
    """
    if not section.is_table:
        return list_files(section.path, storage, section.format, may_be_empty=may_be_empty)
    with announced("reading the table's list of data files"):
        files = _data_files(section, storage, after)
        present = _present(files, storage)
    if not files and not may_be_empty:
        raise UserError(f"{section.path[0]}: the table has no rows")
    for url, size in files.items():
        if url not in present:
            raise UserError(f"{url}: a data file of {section.path[0]} is gone")
        if present[url][0] != size:
            raise UserError(f"{url}: {present[url][0]} bytes, {section.path[0]} lists it with {size}")
    return present


def input_root(section: InputConfig, storage: StorageConfig, urls: Collection[str]) -> str:
    """The folder below which made-up ids name the files: it holds all paths, or a table's files.

    urls: of the input files.
    """
    if section.is_table:
        return input_table(section, storage).root
    folders = []
    for path in section.path:
        fs, inside = filesystem(path, storage)
        url = inside if isinstance(fs, LocalFileSystem) else f"s3://{inside}"
        folders.append((os.path.dirname(url) if url in urls else fixed_part(url)).split("/"))
    return "/".join(os.path.commonprefix(folders))  # noqa: RUF071 (of lists it compares their components)


def _data_files(section: InputConfig, storage: StorageConfig, after: int | None) -> dict[str, int]:
    table = input_table(section, storage)
    snapshot = section.snapshot
    if snapshot is None:
        pin = table.newest()
        if pin is None:
            return {}
        snapshot = pin.snapshot
    return table.data_files(snapshot) if after is None else table.appended(after, snapshot)


def list_pinned(
    section: InputConfig, storage: StorageConfig, pinned: Sequence[InputFile], *, may_be_empty: bool = False
) -> Files:
    """The input again, for a job whose files are pinned; of a table those of its data files that are still there."""
    if section.is_table:
        return _present((file.url for file in pinned), storage)
    return list_files(section.path, storage, section.format, may_be_empty=may_be_empty)


def _present(urls: Iterable[str], storage: StorageConfig) -> Files:
    wanted = list(urls)
    found = zip(wanted, in_parallel(lambda url: stat(url, storage), wanted), strict=True)
    return {url: entry for url, entry in found if entry is not None}
