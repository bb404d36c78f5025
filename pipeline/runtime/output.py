"""Makes standard output and standard error of a command streams whose writes never fail."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

from pipeline.runtime.announce import announce


class _Output(io.FileIO):
    """A file descriptor that after the first failed write leads to /dev/null."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a full pipe that does not block
                select.select([], [self], [])
            return written
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # EPIPE: the reader wants no more, as in `| head`
                announce(f"standard output cannot be written, and is dropped from here on: {error.strerror}")
            return len(memoryview(data))


def guard_output() -> None:
    """Replace `sys.stdout` and `sys.stderr`, so that a finished job does not fail because its result is not printed.

    Characters that the encoding lacks are printed as escapes.
    """
    for name in ("stdout", "stderr"):
        stream: io.TextIOWrapper | None = getattr(sys, name)
        if stream is None:  # closed by the caller
            continue
        raw = _Output(stream.fileno(), "w", closefd=False)
        guarded = io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, guarded)
