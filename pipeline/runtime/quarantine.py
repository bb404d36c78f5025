"""Finds rows that kill their process. In the output folder, each shard has a marker file that names its running rows.

    begin ──> no marker exists: create it. While no process dies, nothing more is written.
          └─> this run's marker exists: a process has died. From now on, rows run in recorded groups of at most 32.

If a process dies while a group runs, the group's rows run one by one. If processes die `attempts` times while one row
runs alone, this row is quarantined: it gets an error. If processes of a shard die `attempts` times while no group runs,
the job fails. So every run ends: if p rows always kill their process, and x deaths have other causes, the run has at
most 1 + x + p (1 + attempts) deaths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from pydantic import TypeAdapter

from pipeline.messages import counted
from pipeline.storage.folder import Folder

QUARANTINE = "_job/quarantine"
STAGE_NAMES = ("prepare", "generate")  # stages with markers
GROUP_ROWS = 32  # maximum number of rows that run together after a process has died
MARKER = re.compile(r"(\d{6,})\.[a-z]+\.json")


def marker_name(shard: int, stage: str) -> str:
    return f"{QUARANTINE}/{shard:06d}.{stage}.json"


class ShardLost(Exception):
    """The processes of a shard die repeatedly, but not because of a row. The message names the shard."""


@dataclass(frozen=True)
class Marker:
    """Content of a marker file: the state of one shard in one stage."""

    run: str  # id of the run that wrote the marker; "" if the attempt has ended
    alone: dict[int, int] = field(default_factory=dict)  # row that ran at a death -> deaths while it ran alone
    running: tuple[int, ...] | None = None  # rows of the running group; None while groups are not recorded
    outside: int = 0  # number of deaths while no group was running

    def after_death(self) -> Marker:
        """Return the marker after one more death: the death is counted, and no group is running."""
        if not self.running:
            return replace(self, running=(), outside=self.outside + (self.running is not None))
        died = int(len(self.running) == 1)
        alone = {row: self.alone.get(row, 0) + died for row in self.running}
        return replace(self, running=(), alone={**self.alone, **alone})

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, rows: int) -> Marker:
        """Read the marker of a shard that has `rows` rows. Raises ValueError if the marker is damaged."""
        marker = TypeAdapter(cls).validate_json(data)
        if {*marker.alone, *(marker.running or ())} - set(range(rows)):
            raise ValueError("rows that the shard does not have")
        return marker


@dataclass(frozen=True)
class Quarantine:
    """Reads and writes the markers of one run and stage in an output folder."""

    folder: Folder
    run: str  # id of this run; markers of earlier runs are no sign of a death, because those runs may have been stopped
    attempts: int  # deaths after which a row is quarantined (if it ran alone), or the job fails (if no group ran)
    stage: str  # one of `STAGE_NAMES`

    def knows(self, shard: int) -> bool:
        """Return whether an earlier attempt has left a marker of the shard."""
        with suppress(FileNotFoundError):
            self.folder.read(marker_name(shard, self.stage))
            return True
        return False

    def begin(self, shard: int, rows: int) -> ShardAttempt:
        """Begin an attempt at a shard that has `rows` rows, and write its marker.

        If this run's marker exists already, the previous attempt has died, because `ShardAttempt.end` and
        `release_shard` remove the markers of attempts that have ended. Raises ShardLost at the `attempts`-th death
        while no group was running.
        """
        name, marker = marker_name(shard, self.stage), Marker(self.run)
        if self.folder.create(name, marker.encode()):
            return ShardAttempt(self, shard, rows, marker)
        # an attempt has died; if its marker is damaged or was just removed, its rows are unknown: keep the new marker
        with suppress(FileNotFoundError, ValueError):
            marker = Marker.decode(self.folder.read(name), rows)
        if marker.run == self.run:
            marker = marker.after_death()
        else:
            marker = replace(marker, run=self.run, running=() if marker.alone else None, outside=0)
        self.folder.replace(name, marker.encode())
        if marker.outside >= self.attempts:
            raise ShardLost(
                f"shard {shard}: its process died {counted(marker.outside, 'time')} with no row in flight: "
                "check the memory and the kernel logs of the nodes"
            )
        return ShardAttempt(self, shard, rows, marker)


class ShardAttempt:
    """One attempt to run a shard.

    Attributes:
        isolated: whether an earlier attempt died. If so, running groups are recorded.
        errors: quarantined row -> its error message.
        groups: groups of the other rows. Rows of different groups must not run at the same time.
    """

    def __init__(self, quarantine: Quarantine, shard: int, rows: int, marker: Marker) -> None:
        self.quarantine, self.shard, self.marker = quarantine, shard, marker
        self.isolated = marker.running is not None
        self.errors = {
            row: f"the process died {counted(deaths, 'time')} while it worked on this row alone"
            for row, deaths in sorted(marker.alone.items())
            if deaths >= quarantine.attempts
        }
        rest = tuple(row for row in range(rows) if row not in marker.alone)
        size = GROUP_ROWS if self.isolated else max(rows, 1)
        # rows that may kill a process run first, so that a death loses the least work
        self.groups = [
            *((row,) for row in sorted(marker.alone) if row not in self.errors),
            *(rest[first : first + size] for first in range(0, len(rest), size)),
        ]

    def enter(self, rows: Collection[int]) -> None:
        """Record that the group `rows` begins to run. After the group has ended, call this with no rows."""
        if self.isolated:
            self.marker = replace(self.marker, running=tuple(sorted(rows)))
            self.quarantine.folder.replace(marker_name(self.shard, self.quarantine.stage), self.marker.encode())

    def end(self) -> None:
        """Record that the attempt has ended: another attempt is then no sign of a death. Keep what rows have done."""
        name = marker_name(self.shard, self.quarantine.stage)
        if self.marker.alone:
            self.quarantine.folder.replace(name, Marker("", self.marker.alone).encode())
        else:
            self.quarantine.folder.remove(name)


def release_shard(folder: Folder, shard: int) -> None:
    """Remove the markers of a committed shard."""
    folder.remove_all([marker_name(shard, stage) for stage in STAGE_NAMES])


def clear_quarantine(folder: Folder, but: Collection[int] = ()) -> None:
    """Remove the markers of all shards, except the shards in `but`."""
    for name in folder.names(QUARANTINE):
        if (match := MARKER.fullmatch(name)) and int(match[1]) not in but:
            folder.remove(f"{QUARANTINE}/{name}")
