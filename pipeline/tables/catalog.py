"""The catalog of Iceberg tables: `storage.catalog` together with pyiceberg's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchPropertyException, NoSuchTableError, NotInstalledError, RESTError
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.table import Table
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from actors.engine.errors import UserError, flat
from pipeline.config.catalog import CatalogConfig
from pipeline.config.job import StorageConfig
from pipeline.storage.errors import StoreFailed
from pipeline.tables.file_io import StoreFileIO, storage_property


def open_catalog(storage: StorageConfig, *, create: bool) -> Catalog:
    """The job's catalog.

    Args:
        create: make the tables of a new SQL catalog.

    Raises:
        UserError: its settings are wrong.
        StoreFailed: it does not answer.
    """
    properties = {
        **storage.catalog.properties(),
        **_warehouse(storage.catalog),
        PY_IO_IMPL: f"{StoreFileIO.__module__}.{StoreFileIO.__qualname__}",
        **storage_property(storage),
        "init_catalog_tables": str(create).lower(),
    }
    with _one_line(storage):
        return load_catalog(storage.catalog.name, **properties)


def find_table(catalog: Catalog, name: str, storage: StorageConfig) -> Table | None:
    """A table of the catalog as it is now; None if it does not exist. Raises as `open_catalog`.

    name: namespace.table.
    """
    if not all(name.split(".")) or "." not in name:
        raise UserError(f"{name}: a table of a catalog is named namespace.table")
    with _one_line(storage):
        try:
            return catalog.load_table(name)
        except NoSuchTableError:
            return None


def _warehouse(catalog: CatalogConfig) -> dict[str, str]:
    """The folder of new tables, absolute: it stands in their metadata. Of a REST catalog it is a name."""
    place = catalog.warehouse
    if place is None or "://" in place or catalog.type == "rest" or str(catalog.uri).startswith("http"):
        return {}
    return {"warehouse": os.path.abspath(place)}


@contextmanager
def _one_line(storage: StorageConfig) -> Iterator[None]:
    name = f"storage.catalog {storage.catalog.name!r}"
    try:
        yield
    except SQLAlchemyError as error:
        reason = flat(getattr(error, "orig", None) or error)  # `orig` has no SQL and no link
        raise UserError(f"{name}: {reason}; check storage.catalog.uri, or the catalog's settings") from None
    except (ValueError, NoSuchPropertyException, NotInstalledError) as error:
        raise UserError(f"{name}: {flat(error)}") from None
    except (RESTError, RequestException) as error:
        raise StoreFailed(f"{name}: {flat(error)}") from None
