"""The file that keeps the traceback of an unexpected error."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from os import getpid
from pathlib import Path

from pipeline.messages import without_secrets


def write_log(error: BaseException) -> Path | None:
    """The file in the temporary folder that holds the error's traceback; None if none can be written."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = Path(tempfile.gettempdir()) / f"skipdecode-{now}-{getpid()}.log"
    text = f"{' '.join(sys.argv)}\n{''.join(traceback.format_exception(error))}"
    try:
        path.write_text(without_secrets(text), errors="backslashreplace")
    except OSError:
        return None
    return path
