"""A folder in memory, and threads that perform one operation on it at a time, in an order that the test decides."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import IO

from pipeline.storage.folder import FileInfo, Folder


@dataclass
class MemoryFolder:
    """A folder in memory that several users share; `gate` is called before every operation."""

    files: dict[str, bytes] = field(default_factory=dict)
    prefix: str = "root"
    gate: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return self.prefix

    def sub(self, name: str) -> MemoryFolder:
        return MemoryFolder(self.files, f"{self.prefix}/{name}", self.gate)

    def read(self, name: str) -> bytes:
        self.gate()
        try:
            return self.files[f"{self.prefix}/{name}"]
        except KeyError:
            raise FileNotFoundError(name) from None

    def open(self, name: str) -> IO[bytes]:
        return io.BytesIO(self.read(name))

    def create(self, name: str, data: bytes) -> bool:
        self.gate()
        if f"{self.prefix}/{name}" in self.files:  # one thread at a time passes the gate: this is atomic
            return False
        self.files[f"{self.prefix}/{name}"] = data
        return True

    def replace(self, name: str, data: bytes) -> None:
        self.gate()
        self.files[f"{self.prefix}/{name}"] = data

    def remove(self, name: str) -> None:
        self.gate()
        self.files.pop(f"{self.prefix}/{name}", None)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def exists(self, name: str) -> bool:
        self.gate()
        return f"{self.prefix}/{name}" in self.files

    def listed(self, stems: Collection[str], after: str) -> dict[str, FileInfo]:
        asked = [name for name in self.names() if name > after or name.startswith(tuple(stems))]
        return {name: FileInfo(len(self.files[f"{self.prefix}/{name}"])) for name in asked}

    def tag(self, name: str) -> str:
        return ""

    def folders(self) -> list[str]:
        self.gate()
        below = (path.removeprefix(f"{self.prefix}/") for path in self.files)
        return sorted({path.partition("/")[0] for path in below if "/" in path})

    def names(self, subfolder: str = "") -> list[str]:
        self.gate()
        paths = (path.rpartition("/") for path in self.files)
        return sorted(name for folder, _, name in paths if folder == f"{self.prefix}/{subfolder}".rstrip("/"))


def outcome(folder: Folder | MemoryFolder, step: str, name: str, data: bytes) -> object:
    """Return what an operation returns, or FileNotFoundError if it raises this."""
    given = {"create": (name, data), "replace": (name, data), "remove_all": (["a", name],), "names": ()}
    try:
        return getattr(folder, step)(*given.get(step, (name,)))
    except FileNotFoundError:
        return FileNotFoundError


class Killed(BaseException):
    """Raised in place of a SIGKILL; nothing may catch it."""


class Stepped:
    """Work in a thread of its own that waits before each operation until `step` is called."""

    def __init__(self, work: Callable[[Callable[[], None]], object]) -> None:
        self.error: BaseException | None = None
        self.result: object = None
        self.ended = self._killed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def step(self, times: int) -> None:
        """Perform so many operations, or fewer if the work ends."""
        for _ in range(times):
            if not self.ended:
                self._go.release()
                self._stopped.acquire()

    def kill(self) -> None:
        """End the work before its next operation."""
        self._killed = True
        self.step(1)
        assert self.ended
        self._thread.join()

    def _gate(self) -> None:
        if not self._killed:  # a killed process does not clean up
            self._stopped.release()
            self._go.acquire()
        if self._killed:
            raise Killed

    def _run(self, work: Callable[[Callable[[], None]], object]) -> None:
        try:
            self.result = work(self._gate)
        except BaseException as error:  # the test checks it
            self.error = error
        self.ended = True
        self._stopped.release()
