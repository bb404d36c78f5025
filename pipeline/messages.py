"""Prepares text for messages: valid Unicode, on one line, without secrets and control characters."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from actors.engine.errors import UserError, flat

LEAST_TIMED = (
    10.0  # s; a ratio of two times is printed without "about" only if each was measured for at least this long
)


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates. JSON and templates allow these, but tokenizers and Arrow do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(value: Any, where: str = "") -> None:
    """Raise UserError if a text or key in nested objects and lists has a lone surrogate. where: name of the value."""
    if isinstance(value, str) and not is_unicode(value):
        found = next(char for char in value if not is_unicode(char))
        raise UserError(f"{where}: holds {found!r}, a lone surrogate, which UTF-8 cannot store; remove it")
    for name, one in value.items() if isinstance(value, dict) else ():
        check_unicode(name, f"a key of {where}" if where else "a key")
        check_unicode(one, f"{where}.{name}" if where else str(name))
    for index, one in enumerate(value) if isinstance(value, list) else ():
        check_unicode(one, f"{where}.{index}")


LINE = 1000  # maximum characters of an error's text, because an error may quote the whole input


def one_line(error: BaseException) -> str:
    """Return an error's type and text on one line, cut to about `LINE` characters."""
    return shortened(f"{type(error).__name__}: {flat(error)}", LINE)


def shortened(text: str, most: int) -> str:
    """Return the text if it has at most `most` characters, else its first `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


# C0 except the line feed, DEL, C1; marks, overrides and isolates of the writing direction; separators of lines
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")


def escaped(text: str) -> str:
    """Replace characters that control a terminal or reorder a line with escapes such as ``\\x1b``. Keep line feeds.

    JSON stays the same JSON: it holds such characters raw only from U+007F on, and their escapes are those of JSON.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1] if found[0] < " " else f"\\u{ord(found[0]):04x}", text)


def printable(name: object) -> str:
    """Return a name from the data as text. Quote it if it is empty, unprintable, or has spaces at an end."""
    text = str(name)
    return text if text.isprintable() and text == text.strip() != "" else repr(text)


def listed(names: Iterable[object]) -> str:
    """Return names from the data as text, separated by commas. Quote names that could be misread."""
    return ", ".join(repr(str(name)) if set(str(name)) & set(",;'\"") else printable(name) for name in names)


def where_sought(path: str | Path) -> str:
    """Return the end of a "no such file" message: the current folder, or the host of a submitted Ray job; or ""."""
    if "://" in str(path):
        return ""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return "" if os.path.isabs(path) else f" in the current folder, {os.getcwd()}"
    host = f" on host {socket.gethostname()} of the cluster"
    if os.path.isabs(path):
        return f"{host}; give a path that every node can reach, or one below the folder that --working-dir uploads"
    return f"{host} in {os.getcwd()}, which holds what `ray job submit --working-dir` uploaded"


def install_command(extras: str) -> str:
    """Return the pip command that adds extras to this installation, which is from a folder, wheel or release."""
    try:
        origin = json.loads(distribution("skipdecode").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # the program runs from a folder that is not installed
        origin = {}
    url, folder = origin.get("url", ""), origin.get("dir_info")
    if folder is not None:
        return f"pip install {'-e ' * folder.get('editable', False)}'{unquote(urlsplit(url).path)}[{extras}]'"
    return f"pip install 'skipdecode[{extras}]{f' @ {url}' if url else ''}'"


def counted(count: int, noun: str) -> str:
    """Return a number and a noun, with s for the plural: ``1 row``, ``2,000 rows``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Return a duration as text: ``5.2 h``, ``90.0 s``. The unit is the largest in which the number is at least 2."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{1000 * seconds:.2f} ms"


# A password may contain "/". In an error that quotes a part of a line, "..." marks where the line was cut.
_END = r"(?:@|(?= \.\.\.))"
_IN_URL = re.compile(rf"(\w://(?=[^/:\s'\"]*:)|\.\.\. )[^\s'\"]*{_END}|(\w://)[^/\s'\"]*{_END}")


def without_secrets(text: str) -> str:
    """Replace user and password in the URLs of a message with stars."""
    return _IN_URL.sub(r"\1\2***@", text)


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text in nested objects and lists, but not to keys; return the result."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: in_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [in_texts(one, change) for one in value]
    return value


def parsed_control_tokens(count: int) -> str:
    """Return the message that `count` control tokens were parsed, and how to keep them as text."""
    return f"parsed {counted(count, 'control token')} in prompts; set input.special_tokens: text to keep them as text"


def too_many_errors(errors: int, rows: int, allowed: float) -> str | None:
    """Return a warning if more sampled rows have an error than `max_error_rate` = `allowed` permits, else None."""
    if errors <= allowed * rows:
        return None
    return (
        f"{errors:,} of {counted(rows, 'sampled row')} ({errors / rows:.1%}) cannot be answered, more than "
        f"max_error_rate = {allowed:g}: the job would end with exit status 3. Leave such rows out of the input, or "
        "raise max_error_rate"
    )


def write_log(error: BaseException) -> Path | None:
    """Write an error's traceback to a new file in the temporary folder. Return the path, or None if writing fails."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = Path(tempfile.gettempdir()) / f"skipdecode-{now}-{os.getpid()}.log"
    text = f"{' '.join(sys.argv)}\n{''.join(traceback.format_exception(error))}"
    try:
        path.write_text(escaped(without_secrets(text)), errors="backslashreplace")
    except OSError:
        return None
    return path
