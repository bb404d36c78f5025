"""Finds rows that kill their process. A marker in the output folder records what was running when it died.

    begin ──> no marker: create it; while all goes well nothing more is written
          └─> a marker of this run: an attempt has died. From here on each batch is recorded before it runs

A batch that was running at `attempts` deaths is halved; a half that dies once is halved again; a row that dies
`attempts` times alone is quarantined and ends with an error. A shard that dies `attempts` times outside of any batch
fails the job. The deaths of a run over R rows are therefore at most 1 + x + p (2 attempts + log2 R, rounded up), with p
rows that always kill and x deaths that no row has caused: nothing repeats for ever, and no time is measured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace

from actors.engine.errors import UserError
from pipeline.storage.folder import Folder

QUARANTINE = "_job/quarantine"
STAGE_NAMES = ("prepare", "generate")  # stages with markers
Rows = tuple[int, ...]


def marker_name(shard: int, stage: str) -> str:
    return f"{QUARANTINE}/{shard:06d}.{stage}.json"


class ShardLost(Exception):
    """The processes of a shard die, and no row is the cause; the message names the shard."""


@dataclass(frozen=True)
class SuspectGroup:
    """Rows that were running at each of `deaths` deaths. halved: the group is part of a larger one."""

    rows: Rows
    deaths: int = 0
    halved: bool = False


@dataclass(frozen=True)
class Marker:
    """The state of one shard in one stage.

    Args:
        run: the run that wrote it.
        suspects: disjoint groups of rows.
        quarantined: row -> deaths while it ran alone.
        running: rows of the present batch, () between batches, None while batches are not recorded.
        outside: deaths between batches.
    """

    run: str
    suspects: tuple[SuspectGroup, ...] = ()
    quarantined: dict[int, int] = field(default_factory=dict)
    running: Rows | None = None
    outside: int = 0

    def after_death(self, attempts: int) -> Marker:
        """The state after a death, with nothing running."""
        running, marker = self.running, replace(self, running=())
        if running is None:
            return marker
        if not running:
            return replace(marker, outside=self.outside + 1)
        rows = set(running)
        others: list[SuspectGroup] = []
        halved, deaths = False, 1
        for group in self.suspects:
            if not rows & set(group.rows):
                others.append(group)
                continue
            # a batch is a whole group, or a part of one: its rows were running as often as the group
            halved = group.halved
            deaths = 1 + (group.deaths if len(rows) > 1 or len(group.rows) == 1 else 0)
            rest = tuple(row for row in group.rows if row not in rows)
            if rest:  # a single row has not yet died alone
                others.append(replace(group, rows=rest, deaths=group.deaths if len(rest) > 1 else 0))
        if len(running) == 1:
            if deaths >= attempts:
                return replace(marker, suspects=tuple(others), quarantined={**self.quarantined, running[0]: deaths})
            new = [SuspectGroup(running, deaths, halved)]
        elif halved or deaths >= attempts:
            middle = len(running) // 2
            new = [SuspectGroup(half, 0, True) for half in (running[:middle], running[middle:])]
        else:
            new = [SuspectGroup(running, deaths)]
        return replace(marker, suspects=(*new, *others))

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, rows: int) -> Marker:
        """The inverse of `encode`, for a shard of `rows` rows.

        Raises ValueError, TypeError, KeyError or AttributeError for data that is no marker of such a shard.
        """
        values = json.loads(data)
        groups = [
            SuspectGroup(_rows(group["rows"]), int(group["deaths"]), bool(group["halved"]))
            for group in values["suspects"]
        ]
        quarantined = {int(row): int(deaths) for row, deaths in values["quarantined"].items()}
        running = None if values["running"] is None else _rows(values["running"])
        if {*quarantined, *(running or ()), *(row for group in groups for row in group.rows)} - set(range(rows)):
            raise UserError("rows that the shard does not have")
        return cls(str(values["run"]), tuple(groups), quarantined, running, int(values["outside"]))


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def _rows(values: Sequence[int]) -> Rows:
    return tuple(int(row) for row in values)


@dataclass(frozen=True)
class Quarantine:
    """The markers of one run and stage in an output folder.

    Args:
        run: names the run. Markers of another run count no death: its processes ended with it.
        attempts: deaths allowed to a batch, to a row alone, and to a shard outside of batches.
        stage: one of `STAGE_NAMES`.
    """

    folder: Folder
    run: str
    attempts: int
    stage: str

    def knows(self, shard: int) -> bool:
        """Whether an attempt at a shard has left its marker."""
        try:
            self.folder.read(marker_name(shard, self.stage))
        except FileNotFoundError:
            return False
        return True

    def begin(self, shard: int, rows: int) -> ShardAttempt:
        """Begin an attempt at a shard of `rows` rows, and write its marker.

        A marker of this run that is still there counts as a death of the last attempt; `release_shard` removes it.
        Raises ShardLost at the `attempts`-th death that happened while no batch was running.
        """
        name, fresh = marker_name(shard, self.stage), Marker(self.run)
        if self.folder.create(name, fresh.encode()):
            return ShardAttempt(self, shard, rows, fresh)
        try:
            stored = Marker.decode(self.folder.read(name), rows)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            stored = fresh  # damaged, or removed meanwhile: an attempt has died, nothing more is known
        if stored.run == self.run:
            marker = stored.after_death(self.attempts)
        else:
            is_known = bool(stored.suspects or stored.quarantined)
            marker = replace(stored, run=self.run, running=() if is_known else None, outside=0)
        self.folder.replace(name, marker.encode())
        if marker.outside >= self.attempts:
            raise ShardLost(
                f"shard {shard}: its process died {_times(marker.outside)} with no row in flight: "
                "see the memory of the nodes and the logs of their kernels"
            )
        return ShardAttempt(self, shard, rows, marker)


class ShardAttempt:
    """One attempt at one shard. groups: rows that must not share a batch with those of another group."""

    def __init__(self, quarantine: Quarantine, shard: int, rows: int, marker: Marker) -> None:
        self.quarantine = quarantine
        self.shard = shard
        self.marker = marker
        known = {row for group in marker.suspects for row in group.rows} | set(marker.quarantined)
        rest = tuple(row for row in range(rows) if row not in known)
        # suspects first: a death then costs the least work
        self.groups: list[Rows] = [group.rows for group in marker.suspects] + ([rest] if rest else [])

    @property
    def isolated(self) -> bool:
        """An attempt has died: batches are recorded, suspects run apart, quarantined rows are left out."""
        return self.marker.running is not None

    @property
    def errors(self) -> dict[int, str]:
        """Quarantined rows and their errors."""
        return {
            row: f"the process died {_times(deaths)} while it worked on this row alone"
            for row, deaths in sorted(self.marker.quarantined.items())
        }

    def enter(self, rows: Collection[int]) -> None:
        """Record the rows that are about to run; none: the batch is over."""
        if self.isolated:
            self.marker = replace(self.marker, running=tuple(sorted(rows)))
            self.quarantine.folder.replace(marker_name(self.shard, self.quarantine.stage), self.marker.encode())


def release_shard(folder: Folder, shard: int) -> None:
    """Remove the markers of a committed shard."""
    folder.remove_all([marker_name(shard, stage) for stage in STAGE_NAMES])


def clear_quarantine(folder: Folder, but: Collection[int] = ()) -> None:
    """Remove all markers but those of the shards in `but`."""
    for name in folder.names(QUARANTINE):
        if not name[: name.find(".")].isdigit() or int(name[: name.find(".")]) not in but:
            folder.remove(f"{QUARANTINE}/{name}")
