"""transformers' list of what its models define, in this machine's cache.

The library makes the list at each import, twice, from all its models' 2,500 files: half a second of processor time.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.engine.checkpoint.file_digests import cache_record, write_record

MODULE, FUNCTION = "transformers.utils.import_utils", "define_import_structure"
Structure = dict[frozenset[str], dict[str, set[str]]]  # by what it needs and by module: names


def keep_index() -> None:
    """To be called before anything imports transformers; does nothing afterwards."""
    if "transformers" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Replaces the function in the module, once that is imported; then it is gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if (define := getattr(module, FUNCTION, None)) is not None:
                    setattr(module, FUNCTION, kept(define))

            loader.exec_module = exec_module
        return spec


def kept(define: Callable[..., Structure]) -> Callable[..., Structure]:
    """The library's function, of which the result for all models is read from the cache."""

    @functools.wraps(define)
    def from_cache(module_path: str | Path, prefix: str | None = None) -> Structure:
        path = Path(module_path)
        folder = path.parent if path.suffix else path
        if folder.name != "models":
            return define(module_path, prefix)
        try:
            record = cache_record(None, "transformers", _files(folder))
        except (OSError, RuntimeError):  # a folder that cannot be read, no home for a cache
            return define(module_path, prefix)
        found = _read(record)
        if found is None:
            found = define(folder)
            write_record(record, {"models": [[sorted(needs), _listed(names)] for needs, names in found.items()]})
        before = "" if prefix is None else f"{prefix}."
        return {needs: {before + module: set(of) for module, of in names.items()} for needs, names in found.items()}

    return from_cache


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """All modules below a folder: path, bytes, time of the last change in ns."""
    found, folders = [], [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    status = entry.stat()
                    found.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def _listed(names: dict[str, set[str]]) -> dict[str, list[str]]:
    return {module: sorted(of) for module, of in names.items()}


def _read(record: Path) -> Structure | None:
    """None for a record that is missing or damaged."""
    try:
        stored = json.loads(record.read_bytes())["models"]
        return {frozenset(needs): {module: set(of) for module, of in names.items()} for needs, names in stored}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
