"""Renders report pages from the templates beside this file. All text is escaped; pages hold no script."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from pipeline.messages import duration, one_line, without_secrets, write_log
from pipeline.storage.folder import Folder

log = logging.getLogger(__name__)
MOST_CHARS = 400  # maximum characters of a value of the configuration
HERE = files("pipeline.report")


def write_page(folder: Folder, name: str, make: Callable[[], bytes]) -> None:
    """Write a page. An error is a warning, with its traceback in a log: a report is not worth a failed job."""
    try:
        folder.replace(name, make())
    except Exception as error:
        traceback = write_log(error)
        shown, again = f" (traceback: {traceback})" if traceback else "", f"skipdecode report {folder.url} --html"
        log.warning("%s/%s was not written: %s%s; `%s` writes it", folder.url, name, one_line(error), shown, again)


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """Return the page of a template in this folder."""
    names = [path.name for path in HERE.iterdir() if path.name.endswith((".html", ".css"))]
    environment = Environment(
        loader=DictLoader({name: (HERE / name).read_text() for name in names}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, duration=duration, when=when)
    text = environment.get_template(template).render(values)
    return text.encode(errors="replace")  # a name may hold a lone surrogate


def count(value: float | None) -> str:
    """Return a number with separators; "" for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.3g}"


def when(value: float) -> str:
    """Return a time in UTC. value: s since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return dotted names of a configuration's values, and their texts, without secrets and cut to `MOST_CHARS`."""
    if isinstance(value, Mapping) and value:
        return [pair for key, item in value.items() for pair in flat(item, f"{name}.{key}" if name else str(key))]
    text = without_secrets(value if isinstance(value, str) else "" if value is None else str(value))
    return [(name, text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}… ({len(text):,} characters)")]
