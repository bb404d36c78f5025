"""The lease under every order of operations: runs that pause for any time, die anywhere, come and go."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from memory_folder import MemoryFolder, Stepped

from pipeline.commit import lease as leases
from pipeline.commit.lease import EPOCHS, Lease, LeaseHeld

BEAT, WATCH = 1.0, 6.0
LATE = WATCH - 1e-6  # sums of steps of the clock are rounded


@dataclass
class World:
    """A store, and a clock that advances when all runs sleep: runs that are neither paused nor dead beat in time."""

    clock: float = 0.0
    store: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)  # nonce -> when its holder wrote last
    gaps: dict[str, float] = field(default_factory=dict)  # nonce -> longest time between two of its writes
    began: dict[str, int] = field(default_factory=dict)  # nonce -> the step in which its epoch was created
    steps: int = 0
    now: Run | None = None  # the one whose step it is
    time, strftime, gmtime = time.time, time.strftime, time.gmtime

    def sleep(self, seconds: float) -> None:
        run = self.now
        assert run is not None
        run.sleeps_until = self.clock + seconds
        while self.clock < run.sleeps_until:
            run.gate()

    def monotonic(self) -> float:
        return self.clock

    def wrote(self, nonce: str) -> None:
        self.gaps[nonce] = max(self.gaps.get(nonce, 0.0), self.silence(nonce))
        self.written[nonce] = self.clock

    def silence(self, nonce: str) -> float:
        return self.clock - self.written.get(nonce, self.clock)


class Noted(MemoryFolder):
    """Records the time of each write."""

    world: World

    def create(self, name: str, data: bytes) -> bool:
        done = super().create(name, data)
        if done:
            nonce = json.loads(data)["nonce"]
            self.world.wrote(nonce)
            self.world.began[nonce] = self.world.steps
        return done

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        self.world.wrote(json.loads(data)["nonce"])


class Run:
    """A run that claims the lease, beats `beats` times and gives it back."""

    def __init__(self, world: World, beats: int) -> None:
        self.world = world
        self.beats = beats
        self.sleeps_until = self.paused_until = 0.0
        self.nonce = ""
        self.epoch = self.looked = 0  # looked: the step in which the last beat that it has ended began
        self.believes = self.got = self.refused = self.lost = False
        world.now = self
        self.stepped = Stepped(self._work)

    def _work(self, gate: Callable[[], None]) -> None:
        self.gate = gate
        folder = Noted(self.world.store, gate=gate)
        folder.world = self.world
        lease = Lease(folder, beat=BEAT, watch=WATCH)
        self.nonce = lease.holder.nonce
        try:
            lease.claim()
        except LeaseHeld:
            self.refused = True
            return
        self.believes = self.got = True
        self.epoch = lease.epoch
        for _ in range(self.beats):
            self.world.sleep(BEAT)
            looking = self.world.steps
            if not lease.renew():
                self.believes, self.lost = False, True
                return
            self.looked = looking
        self.believes = False
        lease.give_back()

    @property
    def was_late(self) -> bool:
        return max(self.world.gaps[self.nonce], self.world.silence(self.nonce)) >= LATE


def simulate(world: World, seed: int, runs: int) -> list[Run]:
    """Runs begin, pause and die at random; invariants are checked after every operation."""
    chance = random.Random(seed)
    everyone: list[Run] = []
    pauses, deaths = chance.choice([0.0, 0.02, 0.2]), chance.choice([0.0, 0.01])
    for _ in range(600):
        alive = [run for run in everyone if not run.stepped.ended]
        if len(everyone) < runs and (not alive or chance.random() < 0.05):
            everyone.append(Run(world, chance.choice([0, 1, 3, 30])))
            continue
        if not alive:
            break
        ready = [run for run in alive if max(run.sleeps_until, run.paused_until) <= world.clock]
        if not ready:
            world.clock = min(max(run.sleeps_until, run.paused_until) for run in alive)
            continue
        run = chance.choice(ready)
        if chance.random() < pauses:
            run.paused_until = world.clock + chance.choice([0.5, WATCH - 1, WATCH + 1, 5 * WATCH])
        elif chance.random() < deaths:
            run.stepped.kill()
            run.believes = False
        else:
            world.now = run
            world.steps += 1
            run.stepped.step(1)
        assert run.stepped.error is None or run.stepped.ended
        for first, later in itertools.permutations([one for one in everyone if one.believes], 2):
            # two may believe that they hold it if the first was taken for dead; its next beat tells it
            if first.epoch <= later.epoch:
                assert first.was_late and first.looked < world.began[later.nonce]
        # who beats in time never loses it, whatever those do who slept
        assert all(one.was_late for one in everyone if one.lost)
    for run in everyone:
        if not run.stepped.ended:
            run.stepped.kill()
    assert not [run.stepped.error for run in everyone if isinstance(run.stepped.error, Exception)]
    # whatever state they left it in, the next one gets it, within one watch
    began = world.clock
    last = Run(world, beats=0)
    for _ in itertools.takewhile(lambda _: not last.stepped.ended, range(1000)):
        world.clock = max(world.clock, last.sleeps_until)
        world.now = last
        last.stepped.step(1)
    assert last.got and world.clock - began <= WATCH + 2
    assert len([name for name in world.store if name.startswith(f"root/{EPOCHS}/")]) == 1
    return everyone


def test_at_most_one_run_holds_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases.log, "disabled", True)
    seen = Counter[str]()
    for number in range(300):
        world = World()
        monkeypatch.setattr(leases, "time", world)  # the lease uses the clock of the world
        for run in simulate(world, seed=random.randrange(2**32), runs=1 + number % 5):
            seen.update(refused=run.refused, lost=run.lost, got=run.got)
    assert min(seen.values()) >= 5, seen  # otherwise the property would hold trivially
