"""Rows that kill: whatever the batches and whatever else dies, only they are given up, after so many deaths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_folder import MemoryFolder

from pipeline.runtime.quarantine import (
    QUARANTINE,
    Marker,
    Quarantine,
    ShardAttempt,
    ShardLost,
    clear_quarantine,
    release_shard,
)


class CountingFolder(MemoryFolder):
    """A folder in memory that counts its writes."""

    writes = 0

    def create(self, name: str, data: bytes) -> bool:
        self.writes += 1
        return super().create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self.writes += 1
        super().replace(name, data)


class Death(Exception):
    """The process is no more."""


def attempt(
    shard_attempt: ShardAttempt, poison: set[int], chance: float, batch: int, rng: random.Random
) -> dict[int, str]:
    """Row -> answer; Death with the rows that were running. Batches are cut anew, in any order, each time."""
    answers = dict.fromkeys(shard_attempt.errors, "error")
    for group in shard_attempt.groups:
        rows = rng.sample(group, len(group))
        while rows:
            size = rng.randint(1, batch)
            running, rows = rows[:size], rows[size:]
            shard_attempt.enter(running)
            if poison & set(running) or rng.random() < chance:
                raise Death(running)
            answers |= dict.fromkeys(running, "answer")
    shard_attempt.enter(())
    return answers


@given(
    rows=st.integers(1, 60),
    poison=st.sets(st.integers(0, 59), max_size=5),
    attempts=st.integers(1, 4),
    batch=st.integers(1, 70),
    chance=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_only_rows_that_kill_are_quarantined(
    rows: int, poison: set[int], attempts: int, batch: int, chance: float, seed: int
) -> None:
    rng, poison = random.Random(seed), {row for row in poison if row < rows}
    quarantine = Quarantine(MemoryFolder(), "run", attempts, "generate")
    deaths = others = 0
    alone = dict.fromkeys(range(rows), 0)
    while True:
        shard_attempt = quarantine.begin(0, rows)
        try:
            answers = attempt(shard_attempt, poison, chance, batch, rng)
            break
        except Death as death:
            running = death.args[0]
            deaths += 1
            others += not poison & set(running)
            if shard_attempt.isolated and len(running) == 1:
                alone[running[0]] += 1
        most = 1 + others + len(poison) * (1 + attempts)
        assert deaths <= most, (deaths, most)
    assert set(answers) == set(range(rows))  # every row, once
    quarantined = {row for row, answer in answers.items() if answer == "error"}
    assert poison <= quarantined
    assert all(alone[row] >= attempts for row in quarantined)  # a healthy row only if it died as often, alone
    assert quarantined == poison or chance
    release_shard(quarantine.folder, 0)
    assert quarantine.folder.names(QUARANTINE) == []


@given(rows=st.integers(1, 300), seed=st.integers(0, 99))
def test_an_attempt_that_lives_writes_once(rows: int, seed: int) -> None:
    folder = CountingFolder()
    shard_attempt = Quarantine(folder, "run", 3, "generate").begin(7, rows)
    assert not shard_attempt.isolated and shard_attempt.groups == [tuple(range(rows))] and shard_attempt.errors == {}
    attempt(shard_attempt, set(), 0.0, 8, random.Random(seed))
    assert folder.writes == 1
    assert folder.names(QUARANTINE) == ["000007.generate.json"]


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_deaths_outside_of_batches_fail_the_shard(attempts: int) -> None:
    """Between batches, before the first, while the part is made: no row is to blame, so the job must end."""
    quarantine = Quarantine(MemoryFolder(), "run", attempts, "generate")
    assert not quarantine.begin(12, 5).isolated  # the first death, of which nothing is known
    for _ in range(attempts):
        assert quarantine.begin(12, 5).isolated
    with pytest.raises(ShardLost, match=rf"^shard 12: its process died {attempts} times? with no row in flight"):
        quarantine.begin(12, 5)


def test_a_marker_of_another_run_counts_no_death_but_keeps_what_was_found() -> None:
    folder = MemoryFolder()
    first = Quarantine(folder, "first", 2, "generate")
    first.begin(0, 8)
    first.begin(0, 8).enter([2, 3])
    for _ in range(2):
        first.begin(0, 8).enter([3])
    shard_attempt = first.begin(0, 8)
    assert shard_attempt.groups == [(2,), (0, 1, 4, 5, 6, 7)] and list(shard_attempt.errors) == [3]
    shard_attempt.enter([2])
    later = Quarantine(folder, "second", 2, "generate").begin(0, 8)
    assert later.isolated and (later.groups, later.errors) == (shard_attempt.groups, shard_attempt.errors)
    folder.remove("_job/quarantine/000000.generate.json")
    first.begin(0, 8)
    for run in ("second", "third", "fourth"):  # drivers that die, one after the other
        assert not Quarantine(folder, run, 1, "generate").begin(0, 8).isolated


def test_an_attempt_that_has_ended_is_no_death_but_keeps_what_was_found() -> None:
    folder = MemoryFolder()
    quarantine = Quarantine(folder, "run", 2, "prepare")
    for _ in range(3):  # a task begins anew with shards that it has prepared already
        shard_attempt = quarantine.begin(0, 4)
        assert not shard_attempt.isolated
        shard_attempt.end()
    assert folder.names(QUARANTINE) == []
    quarantine.begin(0, 4)
    for _ in range(2):
        quarantine.begin(0, 4).enter([1])
    for _ in range(5):
        shard_attempt = quarantine.begin(0, 4)
        assert shard_attempt.isolated and list(shard_attempt.errors) == [1]
        shard_attempt.end()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"null", b'{"run": "run", "alone": 3}'])
def test_a_damaged_marker_is_made_anew(data: bytes) -> None:
    folder = MemoryFolder()
    folder.replace(f"{QUARANTINE}/000003.generate.json", data)
    shard_attempt = Quarantine(folder, "run", 2, "generate").begin(3, 4)
    assert shard_attempt.isolated and shard_attempt.groups == [(0, 1, 2, 3)]
    assert Marker.decode(folder.read(f"{QUARANTINE}/000003.generate.json"), 4).run == "run"
    wrong = Marker("run", {9: 1}, running=())
    folder.replace(f"{QUARANTINE}/000003.generate.json", wrong.encode())  # of a shard of other rows
    assert Quarantine(folder, "run", 2, "generate").begin(3, 4).groups == [(0, 1, 2, 3)]


def test_markers_of_shards_that_are_done_go() -> None:
    folder = MemoryFolder()
    for shard in (0, 3, 1_000_000):
        Quarantine(folder, "run", 2, "generate").begin(shard, 4)
        Quarantine(folder, "run", 2, "prepare").begin(shard, 4)
    clear_quarantine(folder, but={3})
    assert folder.names(QUARANTINE) == ["000003.generate.json", "000003.prepare.json"]
    release_shard(folder, 3)
    assert folder.names(QUARANTINE) == []
