"""Log lines while a checkpoint is downloaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.engine.weights import gib

log = logging.getLogger(__name__)
FIRST_SECONDS, SECONDS = 1.5, 10.0  # before the first line, and between lines


@contextmanager
def download_progress(path: str, total: int, folder: Path) -> Iterator[None]:
    """Log how much of a download has arrived, while the context lasts.

    Args:
        path: the checkpoint, as the job names it.
        total: bytes of the download.
        folder: where its files arrive, complete and incomplete ones.
    """
    ended = threading.Event()
    before = _bytes_in(folder)

    def report() -> None:
        seconds = FIRST_SECONDS
        while not ended.wait(seconds):
            arrived = min(max(_bytes_in(folder) - before, 0), total)
            log.info("fetching %s: %s of %s", path, gib(arrived), gib(total))
            seconds = SECONDS

    thread = threading.Thread(target=report, name="download progress", daemon=True)
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
