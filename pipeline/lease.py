"""One run at a time on one output: a lease in `_job/lease.json`, kept alive by a counter.

A holder that died on this host is replaced at once. Of any other we know only whether its counter moves, seen
over our own monotonic clock, so that clocks that differ between hosts do not matter. The lease saves work; it
is the conditional creation of parts that keeps two runs from harming each other.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil

from pipeline.storage import STORE_ERRORS, Folder

log = logging.getLogger(__name__)
LEASE = "_job/lease.json"
BEAT_SECONDS = 10.0
WATCH_SECONDS = 60.0


class LeaseHeld(Exception):
    """Another run holds the lease; the message says who, since when."""


class LeaseLost(Exception):
    """Another run took the lease over while this one was at work."""


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT; the same command finishes the job."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. process_start, since: seconds since 1970; counter: beats so far."""

    host: str
    boot_id: str
    pid: int
    process_start: float
    nonce: str
    since: float
    counter: int = 0

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class Lease:
    """Held from `acquire` to `release`. `lost` is called, once, if another run has taken it over.

    beat, watch: seconds between beats, and for which a counter that stands still is watched.
    """

    def __init__(self, folder: Folder, *, beat: float = BEAT_SECONDS, watch: float = WATCH_SECONDS) -> None:
        self.folder = folder
        self.beat = beat
        self.watch = watch
        start = psutil.Process().create_time()
        self.holder = Holder(socket.gethostname(), _boot_id(), os.getpid(), start, uuid.uuid4().hex, time.time())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, lost: Callable[[], None]) -> None:
        """Take the lease, waiting out a holder that may be dead. LeaseHeld if it is alive."""
        while not self.folder.create(LEASE, self._encode(0)):
            found = self._read()
            if found is None:
                continue  # released a moment ago
            if not self._dead_here(found):
                log.warning(
                    "the lease is held by %s: watching for %.0f s whether it moves", found.describe(), self.watch
                )
                if self._moves(found):
                    raise LeaseHeld(found.describe())
            if self._read() == found:
                log.warning("taking over the lease of %s, which is dead", found.describe())
                self.folder.remove(LEASE)
        self._thread = threading.Thread(target=self._keep, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        found = self._read()
        if found is not None and found.nonce == self.holder.nonce:
            self.folder.remove(LEASE)

    def _keep(self, lost: Callable[[], None]) -> None:
        counter = 0
        while not self._stop.wait(self.beat):
            counter += 1
            try:
                found = self._read()
                if found is None or found.nonce != self.holder.nonce:
                    lost()
                    return
                self.folder.replace(LEASE, self._encode(counter))
            except STORE_ERRORS as error:  # the store may come back; a beat missed is only a beat
                log.warning("the lease could not be renewed: %s", error)

    def _moves(self, found: Holder) -> bool:
        end = time.monotonic() + self.watch
        while time.monotonic() < end:
            time.sleep(min(self.beat / 5, 1.0))
            now = self._read()
            if now is None:
                return False
            if now != found:
                return True
        return False

    def _dead_here(self, found: Holder) -> bool:
        """Dead for certain: of this host, and either of an earlier boot or a process that is no more."""
        if found.host != self.holder.host:
            return False
        if found.boot_id != self.holder.boot_id:
            return True
        try:
            return abs(psutil.Process(found.pid).create_time() - found.process_start) > 1
        except psutil.NoSuchProcess:
            return True

    def _encode(self, counter: int) -> bytes:
        return json.dumps({**asdict(self.holder), "counter": counter}).encode()

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(self.folder.read(LEASE)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return Holder("unknown", "", 0, 0.0, "", 0.0)  # half-written by a foreign hand: watched like any other


@contextmanager
def leased(folder: Folder) -> Iterator[None]:
    """Hold the lease of a folder. LeaseHeld at the start; LeaseLost if another run takes over meanwhile."""
    lost = False

    def on_lost() -> None:
        nonlocal lost
        lost = True
        os.kill(os.getpid(), signal.SIGTERM)

    lease = Lease(folder)
    lease.acquire(on_lost)
    try:
        yield
    except Interrupted:
        if lost:
            raise LeaseLost(f"{folder.url}: another run has taken over") from None
        raise
    finally:
        lease.release()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT become `Interrupted` in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever called us handles signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(psutil.boot_time())
