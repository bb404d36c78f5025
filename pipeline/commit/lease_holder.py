"""The process that holds a lease, and whether it has certainly ended."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    Args:
        host: name of its machine, for people.
        namespace: within which `pid` names one process; "" if unknown.
        started: start of the process, seconds after boot.
        nonce: of this lease.
        since: seconds since 1970, for people.
        counter: heartbeats so far.
        released: given back.
    """

    host: str = "unknown"
    namespace: str = ""
    pid: int = 0
    started: float = 0.0
    nonce: str = ""
    since: float = 0.0
    counter: int = 0
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        started = seconds_after_boot(psutil.Process())
        return cls(socket.gethostname(), pid_namespace(), os.getpid(), started, uuid.uuid4().hex, time.time())

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def has_ended(self, here: Holder) -> bool:
        """Whether the process has certainly ended; only known in the namespace of the process `here`."""
        if not self.namespace or self.namespace != here.namespace:
            return False
        try:
            process = psutil.Process(self.pid)
            ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return ended or seconds_after_boot(process) != self.started
        except psutil.ZombieProcess:
            return True
        except psutil.NoSuchProcess:
            return not _is_hidden(self.pid)
        except (psutil.AccessDenied, ValueError, TypeError, OverflowError):
            return False


def seconds_after_boot(process: psutil.Process) -> float:
    """Start of a process, to a hundredth of a second. Setting the clock does not change it."""
    return round(process.create_time() - psutil.boot_time(), 2)


def pid_namespace() -> str:
    """Host, boot and process id namespace of this process; "" if unknown, as outside of Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_hidden(pid: int) -> bool:
    """Whether a process exists that /proc hides from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
