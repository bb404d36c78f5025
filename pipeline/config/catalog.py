"""The section of an Iceberg catalog. Its credentials never stand in a job file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.config.base import Endpoint, Place, Section, holds_secret

_SECRET = re.compile(r"(password|passwd|pwd|secret|token|credential|api_?key)[^=&;]*=", re.I)


def _without_query_secrets(value: str) -> str:
    if _SECRET.search(value):
        raise holds_secret()
    return value


class CatalogConfig(Section):
    """An Iceberg catalog.

    pyiceberg's own settings for `name` are read too (PYICEBERG_CATALOG__NAME__URI and so on, .pyiceberg.yaml): the
    place for credentials and for properties that are no key here. A key that is set here overrides them.
    """

    name: str = Field("default", min_length=1, description="the catalog's name in pyiceberg's settings")
    type: Literal["sql", "rest", "glue", "hive"] | None = Field(
        None, description="kind of catalog; default: pyiceberg's setting, else by the scheme of uri"
    )
    uri: Annotated[Endpoint, AfterValidator(_without_query_secrets)] | None = Field(
        None, description="of the catalog, such as sqlite:////data/catalog.db; one with a password: in the environment"
    )
    warehouse: Place | None = Field(None, description="where new tables are kept: local or s3:// folder, or its name")

    def properties(self) -> dict[str, str]:
        """The keys that the file sets, under pyiceberg's names."""
        return self.model_dump(exclude={"name"}, exclude_none=True)
