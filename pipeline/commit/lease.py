"""Implements a lease: only one run at a time works on an output folder. Each holder creates a numbered file (epoch).

    _job/lease/000001.json  released                         ──> next run creates 000002.json: the highest number counts
    _job/lease/000002.json  dead, or no heartbeat for 60 s   ──> next run creates 000003.json
    _job/lease/000003.json  heartbeat every 10 s             ──> if this holder sees a higher number, it loses the lease

A holder writes only its own file, and the file with the highest number is never removed. So a holder that was suspended
does not disturb the run that took over. The lease only avoids duplicate work: even without a lease, each output file
(part) is created only once. The clocks of hosts may differ, because a waiting run measures time by its own clock.
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

import psutil

from pipeline.runtime.signals import Interrupted, interrupter, shielded
from pipeline.storage.folder import STORE_ERRORS, Folder

log = logging.getLogger(__name__)
EPOCHS = "_job/lease"
EPOCH = re.compile(r"(\d{6,})\.json")
BEAT_SECONDS = 10.0
WATCH_SECONDS = 60.0


class LeaseHeld(Exception):
    """Another run holds the lease. The message names the process of that run."""


class LeaseLost(Exception):
    """Another run took the lease over while this run was working."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, as written to its lease file."""

    host: str = "unknown"  # host name, used only in messages
    namespace: str = ""  # host name, boot id and pid namespace, which make `pid` unique; "" if unknown
    pid: int = 0
    started: float = 0.0  # when the process started, in seconds after boot
    nonce: str = ""  # random id of this holder
    since: float = 0.0  # when the process asked for the lease, in seconds since 1970; used only in messages
    counter: int = 0  # number of heartbeats so far
    released: bool = False

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


def this_process() -> Holder:
    namespace = ""
    with suppress(OSError):  # only Linux has these paths
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    started = _seconds_after_boot(psutil.Process())
    return Holder(socket.gethostname(), namespace, os.getpid(), started, uuid.uuid4().hex, time.time())


def _seconds_after_boot(process: psutil.Process) -> float:
    """Return when a process started, in seconds after boot, to 0.01 s. Setting the clock does not change this value."""
    return round(process.create_time() - psutil.boot_time(), 2)


def is_dead(holder: Holder, here: Holder) -> bool:
    """Return whether the holder has certainly ended; False if its namespace is not that of `here` (this process)."""
    if not holder.namespace or holder.namespace != here.namespace:
        return False
    try:
        os.kill(holder.pid, 0)
        process = psutil.Process(holder.pid)
        return process.status() == psutil.STATUS_ZOMBIE or _seconds_after_boot(process) != holder.started
    except (ProcessLookupError, psutil.ZombieProcess):
        return True
    except (PermissionError, psutil.Error):  # alive, but another user's process, which /proc may hide
        return False


class Lease:
    """The lease of an output folder, held from `acquire` to `release`.

    beat: seconds between heartbeats. watch: seconds without a heartbeat after which a holder counts as dead.
    """

    def __init__(self, folder: Folder, *, beat: float, watch: float) -> None:
        self.folder, self.beat, self.watch = folder, beat, watch
        self.holder = this_process()
        self.epoch = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, lost: Callable[[], None]) -> None:
        """Claim the lease, and renew it in a thread, which calls `lost` if another run takes over. Raises LeaseHeld."""
        self.claim()
        self._thread = threading.Thread(target=self._keep, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat, and mark the lease as released."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self.beat)
            if self._thread.is_alive():
                raise OSError("the store has not answered the last heartbeat")
        self.give_back()

    def claim(self) -> None:
        """Wait until the current holder has ended, then create the next lease file. Raises LeaseHeld if it is alive."""
        while True:
            last = max(self._epochs(), default=0)
            if last and not self._wait_for_end(_name(last)):
                continue  # the file was just removed, because a file with a higher number exists
            if self._create(last + 1):
                return

    def renew(self) -> bool:
        """Write one heartbeat. Return False if another run holds the lease."""
        return self._write(replace(self.holder, counter=self.holder.counter + 1))

    def give_back(self) -> None:
        """Mark the lease as released if this process still holds it."""
        if self.epoch:
            self._write(replace(self.holder, released=True))

    def _write(self, holder: Holder) -> bool:
        """Write `holder` to this run's lease file. If another run has taken over, write nothing and return False."""
        if max(self._epochs(), default=0) != self.epoch or not self._holds(self.epoch):
            return False
        self.holder = holder
        self.folder.replace(_name(self.epoch), _encode(holder))
        return True

    def _create(self, epoch: int) -> bool:
        """Create a lease file. Return whether it names this holder afterwards, and no file has a higher number."""
        self.folder.create(_name(epoch), _encode(self.holder))
        if not self._holds(epoch):
            return False
        epochs = self._epochs()
        if max(epochs, default=0) != epoch:  # while this process was suspended, another run took over
            self.folder.remove(_name(epoch))
            return False
        self.epoch = epoch
        for earlier in epochs:
            if earlier < epoch:
                self.folder.remove(_name(earlier))
        return True

    def _holds(self, epoch: int) -> bool:
        holder = self._read(_name(epoch))
        return holder is not None and holder.nonce == self.holder.nonce

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._stop.wait(self.beat):
            try:
                if not self.renew():
                    lost()
                    return
            except STORE_ERRORS as error:  # go on, as the store may recover before the next heartbeat
                log.warning("the lease could not be renewed; the next heartbeat tries again: %s", error)

    def _wait_for_end(self, name: str) -> bool:
        """Wait until the lease in file `name` is released, or its holder is dead. Return False if the file is gone.

        Raises LeaseHeld if the holder is alive.
        """
        holder = now = self._read(name)
        end = time.monotonic()
        if holder is not None and not holder.released and not is_dead(holder, self.holder):
            log.warning("the lease is held by %s: waiting %.0f s for its heartbeat", holder.describe(), self.watch)
            end += self.watch
        while now is not None and not now.released and time.monotonic() < end:
            time.sleep(min(self.beat / 5, 1.0))
            now = self._read(name)
            if now is not None and not now.released and now != holder:
                raise LeaseHeld(now.describe())
        if now is not None and not now.released:
            log.warning("taking over the lease of %s, which is dead", now.describe())
        return now is not None

    def _epochs(self) -> list[int]:
        return [int(match[1]) for name in self.folder.names(EPOCHS) if (match := EPOCH.fullmatch(name))]

    def _read(self, name: str) -> Holder | None:
        """Return the holder in a lease file; None if the file is gone, an unknown holder if the file is damaged."""
        try:
            values = json.loads(self.folder.read(name))  # may hold unknown keys of a later version
            holder = Holder(**{key: values[key] for key in Holder.__dataclass_fields__ if key in values})
            holder.describe()  # raises an error if `since` is no valid time
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OverflowError, RecursionError):
            return Holder()
        return holder


@contextmanager
def leased(folder: Folder) -> Iterator[None]:
    """Hold the folder's lease during the `with` block. Raises LeaseHeld, or LeaseLost if another run takes over."""
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
        with suppress(Interrupted), shielded():  # ignore an interrupt, because the block has ended
            try:
                lease.release()
            except STORE_ERRORS as error:  # e.g. a full disk; the job itself reports this
                taken = f"the next run takes over at once on this machine, or after {WATCH_SECONDS:g} s on another"
                log.warning("the lease could not be released: %s; %s", error, taken)


def _name(epoch: int) -> str:
    return f"{EPOCHS}/{epoch:06d}.json"


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()
