"""What text from rows and the errors about it must be like: valid Unicode, one line."""

from __future__ import annotations


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
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= LINE else f"{text[:LINE]}…"
