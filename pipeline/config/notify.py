"""Section `notify` of a job file."""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from actors.engine.errors import UserError
from pipeline.config.base import SECRET, Section


def _http(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_http = False
    if not is_http:
        raise PydanticCustomError(SECRET, "must be a URL that begins with http:// or https://")
    return value


def _address(value: SecretStr) -> SecretStr:
    _http(value.get_secret_value())
    return value


class NotifyConfig(Section):
    """Where `run` posts its outcome. The URL may be a secret, so that no message shows it."""

    url: Annotated[SecretStr, AfterValidator(_address)] | None = Field(
        None, description="http:// or https:// address for one POST of a JSON object when `run` ends"
    )
    url_variable: str | None = Field(
        None, min_length=1, description="environment variable that holds the address instead, where it is a secret"
    )

    @model_validator(mode="after")
    def _one_address(self) -> NotifyConfig:
        if (self.url is None) == (self.url_variable is None):
            raise UserError("give url or url_variable, one of them")
        return self

    def address(self) -> str:
        """The URL. UserError if the environment variable is not set or holds none."""
        if self.url is not None:
            return self.url.get_secret_value()
        assert self.url_variable is not None
        value = os.environ.get(self.url_variable)
        if value is None:
            raise UserError(f"notify.url_variable: the environment variable {self.url_variable} is not set")
        try:
            return _http(value)
        except PydanticCustomError as error:
            raise UserError(f"notify.url_variable: {self.url_variable} {error.message()}") from None
