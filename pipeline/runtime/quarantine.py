"""Rows that kill their process: a marker in the output folder says what was in flight when it died.

    begin ──> no marker: it is created, once; nothing more is written while all goes well
          └─> a marker of this run: an attempt has died. From here on each batch is written down before it runs

A batch that was in flight at `attempts` deaths is halved; a half that dies once is halved again; a row that dies
`attempts` times alone is given up, and ends with an error. A shard that dies `attempts` times outside of any batch
fails the job. So the deaths of a run over R rows are at most 1 + x + p (2 attempts + log2 R, rounded up), p being
the rows that always kill and x the deaths that no row has caused: nothing loops for ever, and no time is measured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace

from actors.engine.errors import UserError
from pipeline.storage.folder import Folder

QUARANTINE = "_job/quarantine"
STAGES = ("prepare", "generate")
Rows = tuple[int, ...]


def marker_name(shard: int, stage: str) -> str:
    return f"{QUARANTINE}/{shard:06d}.{stage}.json"


class ShardLost(Exception):
    """A shard whose processes die for no row's sake; the message names it."""


@dataclass(frozen=True)
class SuspectGroup:
    """Rows that were in flight at `deaths` deaths, all of them each time. halved: cut out of a larger group."""

    rows: Rows
    deaths: int = 0
    halved: bool = False


@dataclass(frozen=True)
class Record:
    """What a marker holds. suspects: groups that share no row. given_up: row -> deaths, alone.

    in_flight: rows of the batch at work, () between batches, None while nothing is written down. outside: deaths
    between batches.
    """

    run: str
    suspects: tuple[SuspectGroup, ...] = ()
    given_up: dict[int, int] = field(default_factory=dict)
    in_flight: Rows | None = None
    outside: int = 0

    def after_death(self, attempts: int) -> Record:
        """What follows from a death, with nothing in flight."""
        at_work, record = self.in_flight, replace(self, in_flight=())
        if at_work is None:
            return record
        if not at_work:
            return replace(record, outside=self.outside + 1)
        rows = set(at_work)
        kept: list[SuspectGroup] = []
        halved, deaths = False, 1
        for group in self.suspects:
            if rows & set(group.rows):  # a batch is all of a group, or a piece of it, which was in flight as often
                halved = group.halved
                deaths = 1 + (group.deaths if len(rows) > 1 or len(group.rows) == 1 else 0)
                rest = tuple(row for row in group.rows if row not in rows)
                if rest:  # one row that is left has not yet died alone
                    kept.append(replace(group, rows=rest, deaths=group.deaths if len(rest) > 1 else 0))
            else:
                kept.append(group)
        if len(at_work) == 1:
            if deaths >= attempts:
                return replace(record, suspects=tuple(kept), given_up={**self.given_up, at_work[0]: deaths})
            new = [SuspectGroup(at_work, deaths, halved)]
        elif halved or deaths >= attempts:
            middle = len(at_work) // 2
            new = [SuspectGroup(half, 0, True) for half in (at_work[:middle], at_work[middle:])]
        else:
            new = [SuspectGroup(at_work, deaths)]
        return replace(record, suspects=(*new, *kept))

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, rows: int) -> Record:
        """ValueError, TypeError, KeyError or AttributeError if it is no marker of a shard of `rows` rows."""
        values = json.loads(data)
        groups = [
            SuspectGroup(_rows(one["rows"]), int(one["deaths"]), bool(one["halved"])) for one in values["suspects"]
        ]
        given_up = {int(row): int(deaths) for row, deaths in values["given_up"].items()}
        in_flight = None if values["in_flight"] is None else _rows(values["in_flight"])
        if {*given_up, *(in_flight or ()), *(row for group in groups for row in group.rows)} - set(range(rows)):
            raise UserError("rows that the shard does not have")
        return cls(str(values["run"]), tuple(groups), given_up, in_flight, int(values["outside"]))


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def _rows(values: Sequence[int]) -> Rows:
    return tuple(int(row) for row in values)


@dataclass(frozen=True)
class Quarantine:
    """The markers of a run in its output folder.

    run: names the run; what another one has left counts no death, for its processes ended with it. attempts:
    deaths that a batch, a row alone, or a shard outside of batches is given. stage: one of `STAGES`.
    """

    folder: Folder
    run: str
    attempts: int
    stage: str

    def begin(self, shard: int, rows: int) -> ShardAttempt:
        """An attempt at a shard of `rows` rows begins. ShardLost if too many have died outside of any batch."""
        name, fresh = marker_name(shard, self.stage), Record(self.run)
        if self.folder.create(name, fresh.encode()):
            return ShardAttempt(self, shard, rows, fresh)
        try:
            found = Record.decode(self.folder.read(name), rows)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            found = fresh  # damaged, or gone meanwhile: nothing is known, but that care is called for
        if found.run == self.run:
            record = found.after_death(self.attempts)
        else:
            record = replace(found, run=self.run, in_flight=() if found.suspects or found.given_up else None, outside=0)
        self.folder.replace(name, record.encode())
        if record.outside >= self.attempts:
            raise ShardLost(
                f"shard {shard}: its process died, or its answers were lost with their node, {_times(record.outside)} "
                "with no row in flight: look at the nodes' memory and their kernels' logs"
            )
        return ShardAttempt(self, shard, rows, record)


class ShardAttempt:
    """One attempt at one shard."""

    def __init__(self, quarantine: Quarantine, shard: int, rows: int, record: Record) -> None:
        self.quarantine = quarantine
        self.shard = shard
        self.record = record
        suspected = {row for group in record.suspects for row in group.rows} | set(record.given_up)
        rest = tuple(row for row in range(rows) if row not in suspected)
        # suspects first: what they kill has then cost the least
        self.groups: list[Rows] = [group.rows for group in record.suspects] + ([rest] if rest else [])

    @property
    def isolated(self) -> bool:
        """An attempt has died before: batches are written down, suspects run apart, rows given up are left out."""
        return self.record.in_flight is not None

    @property
    def errors(self) -> dict[int, str]:
        """Rows that are given up, and what they are told."""
        return {
            row: f"the process died {_times(deaths)} while it worked on this row alone"
            for row, deaths in sorted(self.record.given_up.items())
        }

    def enter(self, rows: Collection[int]) -> None:
        """These rows are about to run; none: a batch is over."""
        if self.isolated:
            self.record = replace(self.record, in_flight=tuple(sorted(rows)))
            self.quarantine.folder.replace(marker_name(self.shard, self.quarantine.stage), self.record.encode())


def release_shard(folder: Folder, shard: int) -> None:
    """The shard is committed: its markers go."""
    folder.remove_all([marker_name(shard, stage) for stage in STAGES])


def clear_quarantine(folder: Folder, but: Collection[int] = ()) -> None:
    """Remove the markers of all shards but these."""
    for name in folder.names(QUARANTINE):
        if not name[: name.find(".")].isdigit() or int(name[: name.find(".")]) not in but:
            folder.remove(f"{QUARANTINE}/{name}")
