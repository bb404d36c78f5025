"""Refusals in OpenAI's form, with their HTTP status."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.responses import JSONResponse

from actors.engine.errors import UserError
from actors.engine.online.submissions import QueueFull

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: For people, one line.
        code: For programs.
        headers: Further headers.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, dict(headers or {})

    def body(self) -> dict[str, object]:
        """As OpenAI's API writes it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def api_error(error: Exception) -> ApiError:
    """The refusal that an expected error means; raises any other error again."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        seconds = str(math.ceil(error.retry_after))
        return ApiError(429, f"{error}: try again in {seconds} s", "rate_limit_exceeded", {"Retry-After": seconds})
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    raise error
