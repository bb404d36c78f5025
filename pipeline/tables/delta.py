"""Delta tables: opening one, and its settings for a store."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.storage.folder import open_folder

MAPPING = "delta.columnMapping.mode"


def store_options(url: str, storage: StorageConfig) -> dict[str, str]:
    """The library's storage options of a table; credentials are those of the environment."""
    if not url.startswith("s3://"):
        return {}
    options = {"aws_conditional_put": "etag"}
    if storage.endpoint_url:
        options["aws_endpoint_url"] = storage.endpoint_url
        options["aws_allow_http"] = str(storage.endpoint_url.startswith("http://")).lower()
    if storage.region:
        options["aws_region"] = storage.region
    return options


def read_commit(url: str, storage: StorageConfig, version: int) -> bytes:
    """The log of one version: actions as lines of JSON. Raises FileNotFoundError if the log no longer reaches so far.

    The library's own history holds the interpreter's lock while it waits for the store, so that no lease is renewed.
    """
    return open_folder(f"{url}/_delta_log", storage).read(f"{version:020}.json")


def find_table(url: str, storage: StorageConfig, version: int | None = None) -> DeltaTable | None:
    """The table in a folder, by default as it is now; None if there is none.

    Raises UserError if it cannot be read, or not at this version.
    """
    try:
        table = DeltaTable(url, version=version, storage_options=store_options(url, storage))
    except TableNotFoundError:
        return None
    except DeltaError as error:
        at = "" if version is None else f" at version {version}"
        raise UserError(f"{url}: no Delta table that can be read{at}: {flat(error)}") from None
    mode = table.metadata().configuration.get(MAPPING, "none")
    if mode != "none":
        raise UserError(f"{url}: the table's columns have other names in its files ({MAPPING} = {mode}), not supported")
    return table
