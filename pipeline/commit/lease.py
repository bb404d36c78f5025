"""One run at a time on one output: terms of a lease, numbered files in `_job/lease`, each kept alive by a counter.

    000001.json  released   ──> create 000002.json: the highest number holds the lease
    000002.json  stands still for 60 s, or its process is dead ──> create 000003.json
    000003.json  at work: its holder beats in it every 10 s; sees a higher number ──> it has lost the lease

All that the store must do is to refuse the creation of a file that is there. A file is written by its own holder
alone and the highest is never removed, so a holder that sleeps through its own replacement, and wakes up in the
middle of a beat, changes nothing for who came after it.

Of a holder on another machine we know only whether its counter moves, seen over our own monotonic clock: clocks
that differ or are set do not matter. One that wakes up just while it is being replaced works on until its next beat.
The lease saves work; it is the conditional creation of parts that keeps two runs from harming each other.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.runtime.signals import Interrupted, interrupter, shielded
from pipeline.storage.folder import STORE_ERRORS, Folder

log = logging.getLogger(__name__)
TERMS = "_job/lease"
FORMER = "_job/lease.json"  # where version 0.1.0 before terms kept its lease and beat in it
TERM = re.compile(r"(\d{6,})\.json")
BEAT_SECONDS = 10.0
WATCH_SECONDS = 60.0


class LeaseHeld(Exception):
    """Another run holds the lease; the message says who, since when."""


class LeaseLost(Exception):
    """Another run took the lease over while this one was at work."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. pids: the namespace of its process ids; started: of the process, clock ticks after boot, -1
    if unknown; since: seconds since 1970, for people; counter: beats so far.
    """

    host: str = "unknown"
    boot_id: str = ""
    pids: str = ""
    pid: int = 0
    started: int = -1
    nonce: str = ""
    since: float = 0.0
    counter: int = 0
    released: bool = False

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def is_dead_here(self, me: Holder) -> bool:
        """Dead for certain: a process of this boot and this namespace of process ids that is no more."""
        if "" in (self.boot_id, self.pids) or self.started < 0:
            return False
        here = (self.host, self.boot_id, self.pids) == (me.host, me.boot_id, me.pids)
        return here and process_started(self.pid) not in (self.started, None)


KINDS = {name: type(value) for name, value in asdict(Holder()).items()}


class Lease:
    """Held from `acquire` to `release`. `lost` is called, once, if another run has taken it over.

    beat, watch: seconds between beats, and for which a counter that stands still is watched.
    """

    def __init__(self, folder: Folder, *, beat: float, watch: float) -> None:
        self.folder = folder
        self.beat = beat
        self.watch = watch
        self.holder = Holder(
            socket.gethostname(),
            _boot_id(),
            _pid_namespace(),
            os.getpid(),
            process_started(os.getpid()) or -1,
            uuid.uuid4().hex,
            time.time(),
        )
        self.term = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, lost: Callable[[], None]) -> None:
        """Take the lease, waiting out a holder that may be dead. LeaseHeld if it is alive."""
        self.take()
        self._thread = threading.Thread(target=self._keep, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self.beat)
            if self._thread.is_alive():
                raise OSError("the store has not answered the last beat")
        self.give_back()

    def take(self) -> None:
        """`acquire` without the thread that beats."""
        while True:
            last = self._last()
            self._wait_for_end(FORMER)
            if last and not self._wait_for_end(_term(last)):
                continue  # removed a moment ago, because a later one is there
            if self._begin(last + 1):
                return

    def renew(self) -> bool:
        """Beat once; False if the lease is another's by now."""
        if not self._is_ours():
            return False
        self.holder = replace(self.holder, counter=self.holder.counter + 1)
        self.folder.replace(_term(self.term), _encode(self.holder))
        return True

    def give_back(self) -> None:
        """`release` without the thread that beats."""
        if self.term and self._is_ours():
            self.folder.replace(_term(self.term), _encode(replace(self.holder, released=True)))

    def _begin(self, number: int) -> bool:
        """Create a term; ours if it is the highest and says so, whatever the store has answered to the creation."""
        name = _term(number)
        self.folder.create(name, _encode(self.holder))
        found = self._read(name)
        if found is None or found.nonce != self.holder.nonce:
            return False
        if self._last() != number:  # the numbers below had been cleared away while we slept
            self.folder.remove(name)
            return False
        self.term = number
        self.folder.remove(FORMER)
        for earlier in self._numbers():
            if earlier < number:
                self.folder.remove(_term(earlier))
        return True

    def _is_ours(self) -> bool:
        if self._last() != self.term:
            return False
        found = self._read(_term(self.term))
        return found is not None and found.nonce == self.holder.nonce

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._stop.wait(self.beat):
            try:
                if not self.renew():
                    lost()
                    return
            except STORE_ERRORS as error:  # the store may come back; a beat missed is only a beat
                log.warning("the lease could not be renewed: %s", error)

    def _wait_for_end(self, name: str) -> bool:
        """Until a holder has released its term or must be dead; False if the file is gone. LeaseHeld if it moves."""
        found = self._read(name)
        if found is None or found.released:
            return found is not None
        if not found.is_dead_here(self.holder):
            log.warning("the lease is held by %s: watching for %.0f s whether it moves", found.describe(), self.watch)
            end = time.monotonic() + self.watch
            while time.monotonic() < end:
                time.sleep(min(self.beat / 5, 1.0))
                now = self._read(name)
                if now is None or now.released:
                    return now is not None
                if now != found:
                    raise LeaseHeld(found.describe())
        log.warning("taking over the lease of %s, which is dead", found.describe())
        return True

    def _numbers(self) -> list[int]:
        matches = (TERM.fullmatch(name) for name in self.folder.names(TERMS))
        return [int(match[1]) for match in matches if match]

    def _last(self) -> int:
        return max(self._numbers(), default=0)

    def _read(self, name: str) -> Holder | None:
        try:
            values = json.loads(self.folder.read(name))
            found = Holder(**{key: kind(values[key]) for key, kind in KINDS.items() if key in values})
            found.describe()
            return found
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OverflowError):
            return Holder()  # written by a foreign hand: watched like any other


@contextmanager
def leased(folder: Folder) -> Iterator[None]:
    """Hold the lease of a folder. LeaseHeld at the start; LeaseLost if another run takes over meanwhile."""
    lost, interrupt = False, interrupter()

    def on_lost() -> None:
        nonlocal lost
        lost = True
        interrupt()

    lease = Lease(folder, beat=BEAT_SECONDS, watch=WATCH_SECONDS)
    lease.acquire(on_lost)
    try:
        yield
        if lost:
            raise Interrupted("the lease is lost")
    except Interrupted:
        if lost:
            raise LeaseLost(f"{folder.url}: another run has taken over") from None
        raise
    finally:
        with suppress(Interrupted), shielded():  # too late to stop
            _release(lease)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except STORE_ERRORS as error:  # such as a full disk, of which the job tells more
        log.warning("the lease could not be given back: %s; the next run waits it out", error)


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks after boot, which no setting of the clock moves.

    -1 if there is no such process, None if we may not know.
    """
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if state in "ZX" else int(values[18])
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:
        os.kill(pid, 0)  # processes of other users may be hidden
    except (ProcessLookupError, OverflowError):
        return -1
    except PermissionError:
        pass
    return None


def _term(number: int) -> str:
    return f"{TERMS}/{number:06d}.json"


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: another process is never known to be dead, and so watched
        return ""
