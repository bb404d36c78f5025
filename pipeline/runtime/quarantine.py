"""Finds rows that kill their process. A marker in the output folder records which rows were running when it died.

    begin ──> no marker: create it; while all goes well nothing more is written
          └─> a marker of this run: an attempt has died. From here on rows run in recorded groups of at most 32

The rows of a group that died run one by one; a row that dies `attempts` times alone is quarantined and ends with an
error. A shard that dies `attempts` times outside of any group fails the job. So a run cannot repeat for ever: with p
rows that always kill and x deaths that no row has caused, it has at most 1 + x + p (1 + attempts) deaths.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from pipeline.messages import counted
from pipeline.storage.folder import Folder

QUARANTINE = "_job/quarantine"
STAGE_NAMES = ("prepare", "generate")  # stages with markers
GROUP_ROWS = 32  # rows that run together after a death


def marker_name(shard: int, stage: str) -> str:
    """Return the name of a marker in the output folder."""
    return f"{QUARANTINE}/{shard:06d}.{stage}.json"


class ShardLost(Exception):
    """The processes of a shard die, and no row is the cause. The message names the shard."""


@dataclass(frozen=True)
class Marker:
    """The state of one shard in one stage."""

    run: str  # run that wrote the marker
    alone: dict[int, int] = field(default_factory=dict)  # row that ran when its process died -> deaths while alone
    running: tuple[int, ...] | None = None  # rows of the present group; None while groups are not recorded
    outside: int = 0  # deaths of workers while no group ran

    def after_death(self) -> Marker:
        """Return the state after a death, with nothing running."""
        if not self.running:
            return replace(self, running=(), outside=self.outside + (self.running is not None))
        died = int(len(self.running) == 1)
        alone = {row: self.alone.get(row, 0) + died for row in self.running}
        return replace(self, running=(), alone={**self.alone, **alone})

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, rows: int) -> Marker:
        """Read a marker of a shard of `rows` rows. Raises ValueError, TypeError, KeyError or AttributeError."""
        values = json.loads(data)
        alone = {int(row): int(deaths) for row, deaths in values["alone"].items()}
        running = None if values["running"] is None else tuple(int(row) for row in values["running"])
        if {*alone, *(running or ())} - set(range(rows)):
            raise ValueError("rows that the shard does not have")
        return cls(str(values["run"]), alone, running, int(values["outside"]))


@dataclass(frozen=True)
class Quarantine:
    """The markers of one run and stage in an output folder."""

    folder: Folder
    run: str  # markers of another run count no death: its processes ended with it
    attempts: int  # number of deaths that quarantine a row that ran alone, or lose a shard that ran without groups
    stage: str  # stage, one of `STAGE_NAMES`

    def knows(self, shard: int) -> bool:
        """Tell whether an attempt at a shard has left its marker."""
        with suppress(FileNotFoundError):
            self.folder.read(marker_name(shard, self.stage))
            return True
        return False

    def begin(self, shard: int, rows: int) -> ShardAttempt:
        """Begin an attempt at a shard of `rows` rows, and write its marker.

        If a marker of this run exists, the last attempt has died; `release_shard` removes the marker.
        Raises ShardLost at the `attempts`-th death that happened while no group was running.
        """
        name, marker = marker_name(shard, self.stage), Marker(self.run)
        if self.folder.create(name, marker.encode()):
            return ShardAttempt(self, shard, rows, marker)
        # damaged, or removed meanwhile: an attempt has died, nothing more is known
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            marker = Marker.decode(self.folder.read(name), rows)
        if marker.run == self.run:
            marker = marker.after_death()
        else:
            marker = replace(marker, run=self.run, running=() if marker.alone else None, outside=0)
        self.folder.replace(name, marker.encode())
        if marker.outside >= self.attempts:
            raise ShardLost(
                f"shard {shard}: its process died {counted(marker.outside, 'time')} with no row in flight: "
                "see the memory of the nodes and the logs of their kernels"
            )
        return ShardAttempt(self, shard, rows, marker)


class ShardAttempt:
    """One attempt at one shard.

    Attributes:
        isolated: whether an earlier attempt died. Groups are then recorded, and quarantined rows are left out.
        errors: quarantined rows and their errors.
        groups: rows that must not run together with those of another group.
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
        # rows that may kill first: a death then costs the least work
        self.groups = [
            *((row,) for row in sorted(marker.alone) if row not in self.errors),
            *(rest[first : first + size] for first in range(0, len(rest), size)),
        ]

    def enter(self, rows: Collection[int]) -> None:
        """Record `rows`, which are about to run; call it without rows when the group has ended."""
        if self.isolated:
            self.marker = replace(self.marker, running=tuple(sorted(rows)))
            self.quarantine.folder.replace(marker_name(self.shard, self.quarantine.stage), self.marker.encode())


def release_shard(folder: Folder, shard: int) -> None:
    """Remove the markers of a committed shard."""
    folder.remove_all([marker_name(shard, stage) for stage in STAGE_NAMES])


def clear_quarantine(folder: Folder, but: Collection[int] = ()) -> None:
    """Remove all markers except those of the shards in `but`."""
    for name in folder.names(QUARANTINE):
        if not name[: name.find(".")].isdigit() or int(name[: name.find(".")]) not in but:
            folder.remove(f"{QUARANTINE}/{name}")
