"""Log records as JSON, one object a line (`--log-json`)."""

from __future__ import annotations

import logging

from pythonjsonlogger.json import JsonFormatter

from pipeline.runtime.announce import EVENT


class JsonLines(JsonFormatter):
    """Fields event, level, logger, message, time (UTC); exception, a traceback; those that a record adds."""

    def __init__(self) -> None:
        super().__init__(
            ("levelname", "name", "message"),
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            timestamp="time",
            defaults={EVENT: "log"},
        )


def json_handler() -> logging.Handler:
    """Writes records as JSON lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    return handler
