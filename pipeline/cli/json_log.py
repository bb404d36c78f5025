"""Log records as JSON, one object a line, without secrets (`--log-json`)."""

from __future__ import annotations

import logging
import os
import re

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

from pipeline.messages import in_texts, without_secrets
from pipeline.runtime.announce import EVENT

SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)  # of an environment variable
SHORTEST_SECRET = 8  # characters; a shorter value may be a common word


class JsonLines(JsonFormatter):
    """Fields event, level, logger, message, time (UTC); exception, a traceback; those that a record adds."""

    def __init__(self) -> None:
        super().__init__(
            ("levelname", "name", "message"),
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            timestamp="time",
            defaults={EVENT: "log"},
        )
        values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
        self._secrets = sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True)

    def process_log_record(self, log_data: LogData) -> LogData:
        """The record's fields without secrets."""
        cleaned: LogData = in_texts(log_data, self._clean)
        return cleaned

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return without_secrets(text)


def json_handler() -> logging.Handler:
    """Writes records as JSON lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    return handler
