"""What text from rows and messages about it must be like: valid Unicode, one line, no secrets."""

from __future__ import annotations

import re

from actors.engine.errors import flat


def is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON and templates can hold, and neither tokenizers nor Arrow take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


LINE = 1000  # characters: an error may hold all of what it complains about


def one_line(error: BaseException) -> str:
    """Type and text of an error, without line breaks, and no longer than a reader takes."""
    text = f"{type(error).__name__}: {flat(error)}"
    return text if len(text) <= LINE else f"{text[:LINE]}…"


def printable(name: object) -> str:
    """A name that comes with the data, as a message may show it: on one line."""
    text = str(name)
    return text if text.isprintable() else repr(text)


# a password may hold "/"; "..." is what PyYAML puts where it cuts a line: it may cut off the scheme, or the host
_END = r"(?:@|(?= \.\.\.))"
_IN_URL = re.compile(rf"(\w://(?=[^/:\s'\"]*:)|\.\.\. )[^\s'\"]*{_END}|(\w://)[^/\s'\"]*{_END}")


def without_secrets(text: str) -> str:
    """A message whose URLs have stars in place of user and password."""
    return _IN_URL.sub(r"\1\2***@", text)
