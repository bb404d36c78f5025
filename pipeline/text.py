"""What text from rows and the errors about it must be like: valid Unicode, one line."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON and templates can hold, and neither tokenizers nor Arrow take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_line(error: BaseException) -> str:
    """Type and text of an error, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
