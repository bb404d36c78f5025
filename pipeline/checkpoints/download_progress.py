"""Progress of a download of a checkpoint: log lines, or reports to a caller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.engine.model.weights import gib

log = logging.getLogger(__name__)
FIRST_SECONDS, SECONDS = 1.5, 10.0  # before the first line, and between lines


@contextmanager
def download_progress(
    path: str, total: int, folder: Path, report: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Report how much of a download has arrived, while the context lasts.

    Args:
        path: the checkpoint, as the job names it.
        total: bytes of the download.
        folder: where its files arrive, complete and incomplete ones.
        report: receives each line; default the log.
    """
    ended = threading.Event()
    before = _bytes_in(folder)

    def watch() -> None:
        seconds = FIRST_SECONDS
        while not ended.wait(seconds):
            arrived = min(max(_bytes_in(folder) - before, 0), total)
            line = f"downloading {path}: {gib(arrived)} of {gib(total)}"
            if report is None:
                log.info("%s", line)
            else:
                report(line)
            seconds = SECONDS

    thread = threading.Thread(target=watch, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Bytes on the disk below a folder; 0 if there is none. A file may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        total += status.st_blocks * 512
    return total
