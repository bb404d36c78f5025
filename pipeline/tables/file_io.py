"""pyiceberg's files through this package's stores: the same credentials, retries and errors as for every other file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.io.fsspec import FsspecInputFile, FsspecOutputFile
from pyiceberg.typedef import Properties

from pipeline.config.job import StorageConfig
from pipeline.storage.folder import filesystem
from pipeline.tables.urls import store_url

STORAGE = "skipdecode.storage"  # property with the job's storage section as JSON, without its catalog


def storage_property(storage: StorageConfig) -> Mapping[str, str]:
    """The property by which a `StoreFileIO` finds its store."""
    return {STORAGE: storage.model_dump_json(exclude={"catalog"})}


class StoreFileIO(FileIO):
    """Files of an Iceberg table. pyiceberg builds it with the catalog's properties."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self.storage = StorageConfig.model_validate_json(properties[STORAGE])

    def new_input(self, location: str) -> InputFile:
        return FsspecInputFile(*self._found(location))

    def new_output(self, location: str) -> OutputFile:
        return FsspecOutputFile(*self._found(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        url, fs = self._found(location if isinstance(location, str) else location.location)
        fs.rm(url)

    def _found(self, location: str) -> tuple[str, Any]:
        url = store_url(location)
        fs, _ = filesystem(url, self.storage)
        return url, LocalFileSystem(auto_mkdir=True) if isinstance(fs, LocalFileSystem) else fs
