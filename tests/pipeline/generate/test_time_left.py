"""The time left of made-up runs: from a tenth of the rows on nearly all estimates lie within a tenth of the run.

A run's shards have sizes and seconds drawn at random. Its actors take them in turn, on a clock that the test moves, and
report to a real `Coordinator`, whose reading gives the estimate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.generate.coordinator import Coordinator, RunProgress
from pipeline.generate.time_left import (
    ENDING_SECONDS,
    Pace,
    Planned,
    ShardAtWork,
    Size,
    makespan,
    seconds_left,
)

ESTIMATES = 60  # of a run, evenly spread over its time
SEEDS = 8


@dataclass
class Run:
    """A made-up run, which is over at `end`.

    Args:
        sizes: of its shards.
        seconds: that an actor takes for each, and of these the prefill's.
        actors: s at which each of them begins its first shard.
        slow_first: factor of each actor's first shard.
        slow_actor: factor of the first actor's shards.
        ahead: shards that are prepared before an actor begins them.
        commit: s from the end of a shard to its commit, in which its actor has the next one.
        ending: s from the last commit to the end.
    """

    sizes: list[Size]
    seconds: list[tuple[float, float]]
    actors: list[float]
    slow_first: float = 1.0
    slow_actor: float = 1.0
    ahead: int = 10**6
    commit: float = 0.2
    ending: float = ENDING_SECONDS
    now: float = 0.0
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # begin, commit, actor of each shard

    def __post_init__(self) -> None:
        free = [(begin, actor) for actor, begin in enumerate(self.actors)]
        heapq.heapify(free)
        first = set(range(len(free)))
        for seconds, _ in self.seconds:
            begin, actor = heapq.heappop(free)
            taken = seconds * (self.slow_first if actor in first else 1.0) * (1.0 if actor else self.slow_actor)
            first.discard(actor)
            self.spans.append((begin, begin + taken + self.commit, actor))
            heapq.heappush(free, (begin + taken, actor))
        self.end = max(commit for _, commit, _ in self.spans) + self.ending

    def at(self, seen: float) -> RunProgress:
        """What the coordinator reads then."""
        coordinator = Coordinator(clock=lambda: self.now)
        begun = sum(begin <= seen for begin, *_ in self.spans)
        for shard in range(min(len(self.sizes), begun + self.ahead)):
            coordinator.prepared(shard, int(self.sizes[shard].rows), int(self.sizes[shard].tokens))
        events = [(begin, 1, shard) for shard, (begin, _, _) in enumerate(self.spans)]
        events += [(commit, 0, shard) for shard, (_, commit, _) in enumerate(self.spans)]
        for self.now, begins, shard in sorted(events):
            if self.now > seen:
                break
            if begins:
                coordinator.begin(shard, str(self.spans[shard][2]))
            else:
                coordinator.ended(shard, True, int(self.sizes[shard].rows), 0, 0, self.seconds[shard][1])
        self.now = seen
        return coordinator.read()

    def planned(self, error: float) -> Planned:
        """A plan that misses the actors' work by that share of it, and knows no slow shards or actors."""
        work = makespan([seconds for seconds, _ in self.seconds], [0.0] * len(self.actors))
        return Planned(self.actors[0], work * (1 + error))

    def error(self, seen: float, plan: Planned | None = None) -> float | None:
        """Of the end that is expected then, as a share of the whole run; None below a tenth of the rows."""
        run, rows = self.at(seen), sum(size.rows for size in self.sizes)
        if run.pace is None or run.rows < rows / 10:
            return None
        left = seconds_left(run.pace, run.at_work, run.waiting, len(self.sizes) - run.shards, rows - run.rows)
        if plan is not None:
            left = plan.blended(left, run.pace.shards, seen - self.actors[0])
        return (seen + left) / self.end - 1

    def errors(self, plan: Planned | None = None) -> list[float]:
        """At many times."""
        last = max(commit for _, commit, _ in self.spans)
        found = (self.error(last * place / ESTIMATES, plan) for place in range(ESTIMATES))
        return [error for error in found if error is not None]


def made(
    random: np.random.Generator,
    shards: int,
    seconds: float,
    *,
    rows: int = 250,
    actors: Sequence[float] = (18.0, 18.3),
    prefill: float = 0.5,
    spread: float = 0.07,
    prompts: float = 0.05,
    answers: float = 0.05,
    trend: float = 1.0,
    power: float = 1.0,
    **more: float,
) -> Run:
    """A run whose shards take about so many seconds.

    Args:
        prefill: share of the time that goes to prompts.
        spread: of a shard's seconds between two times, as a standard deviation and a share of it.
        prompts, answers: the same of a shard's prompt tokens, and of the tokens that it generates.
        trend: prompt tokens of the last shard over those of the first.
        power: of prompt tokens, to which prefill is proportional.
    """
    grows = trend ** np.linspace(-0.5, 0.5, shards)
    tokens = rows * 100 * grows * random.lognormal(0, prompts, shards)
    of_prompts = seconds * prefill * (tokens / (rows * 100)) ** power
    of_answers = seconds * (1 - prefill) * random.lognormal(0, answers, shards)
    noise = np.maximum(0.5, random.normal(1, spread, shards))
    times = list(zip((of_prompts + of_answers) * noise, of_prompts * noise, strict=True))
    ending = ENDING_SECONDS * random.uniform(0.7, 1.3)
    sizes = [Size(rows, round(one)) for one in tokens]
    return Run(sizes, times, list(actors), ending=ending, **more)  # type: ignore[arg-type]


def at_once(actors: int, begin: float = 25.0, between: float = 0.3) -> list[float]:
    return [begin + between * actor for actor in range(actors)]


KINDS: dict[str, Callable[[np.random.Generator], Run]] = {
    # the jobs of tests/benchmarks/plan_accuracy.py, in their numbers of shards and seconds
    "demo at 1x": lambda random: made(random, 8, 2.5),
    "demo at 3x": lambda random: made(random, 8, 1.7),
    "demo, one actor": lambda random: made(random, 4, 5, rows=500, actors=[18]),
    "demo, three samples": lambda random: made(random, 8, 5, prefill=0.2),
    "long-tailed answers": lambda random: made(random, 8, 5, rows=125, answers=0.15, prefill=0.2),
    "SmolLM2, facts to text": lambda random: made(random, 8, 40, rows=63, slow_first=1.12),
    "SmolLM2, labels of one token": lambda random: made(random, 8, 43, rows=38, prefill=0.97, prompts=0.1),
    "SmolLM2, topics": lambda random: made(random, 8, 65, rows=38, prefill=0.95, trend=1.3),
    "SmolLM2, QMSum": lambda random: made(
        random, 8, 60, rows=6, prefill=0.8, prompts=0.2, answers=0.15, power=1.3, actors=[25, 26]
    ),
    # other machines and inputs
    "one actor, four shards": lambda random: made(random, 4, 120, actors=[20]),
    "four actors": lambda random: made(random, 16, 120, actors=at_once(4)),
    "eight actors, few shards": lambda random: made(random, 32, 300, actors=at_once(8)),
    "eight actors, many shards": lambda random: made(random, 250, 300, actors=at_once(8), ahead=16),
    "three actors, ten shards": lambda random: made(random, 10, 120, actors=at_once(3)),
    "actors that come late": lambda random: made(random, 48, 100, actors=at_once(8, between=10)),
    "slow first shards": lambda random: made(random, 40, 60, actors=at_once(4), slow_first=1.4),
    "a slow actor": lambda random: made(random, 32, 100, actors=at_once(4), slow_actor=1.5),
    "much noise": lambda random: made(random, 40, 60, actors=at_once(4), spread=0.15, answers=0.15),
    "an input sorted by length": lambda random: made(random, 24, 60, actors=at_once(3), prefill=0.7, trend=4),
}


def test_from_a_tenth_of_the_rows_on_the_expected_end_is_within_a_tenth_of_the_run() -> None:
    """Of almost all estimates, with a plan of a few more. The plan's error is that of 20 measured ones."""
    within: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for has_plan, shares in within.items():
        for kind, make in KINDS.items():
            errors: list[float] = []
            for seed in range(SEEDS):
                run, wrong = make(np.random.default_rng(seed)), np.random.default_rng(1000 + seed).normal(0, 0.08)
                errors += run.errors(run.planned(wrong) if has_plan else None)
            shares[kind] = float((np.abs(errors) <= 0.1).mean())
    for has_plan, mean, least in ((False, 0.97, 0.85), (True, 0.985, 0.9)):
        shares = within[has_plan]
        assert np.mean(list(shares.values())) >= mean and min(shares.values()) >= least, shares


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5000)), min_size=1, max_size=40),
    st.floats(0.01, 1),
    st.floats(0.0, 0.1),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_without_noise_the_end_is_known_from_the_first_commits_on(
    actors: int, shards: list[tuple[int, int]], row_seconds: float, token_seconds: float, when: float
) -> None:
    """Shards whose sizes are known take exactly what the model says; both rates follow from any of them."""
    sizes = [Size(rows, tokens + rows) for rows, tokens in shards]
    seconds = [(row_seconds * one.rows + token_seconds * one.tokens, token_seconds * one.tokens) for one in sizes]
    run = Run(sizes, seconds, [0.0] * actors, commit=0.0)
    commits = sorted(commit for _, commit, _ in run.spans)
    seen = commits[0] + when * (commits[-1] - commits[0])
    state = run.at(seen)
    assert state.pace is not None
    rows = sum(size.rows for size in sizes) - state.rows
    left = seconds_left(state.pace, state.at_work, state.waiting, len(sizes) - state.shards, rows)
    assert seen + left == pytest.approx(run.end, abs=1e-3 * run.end)


@given(st.integers(1, 8), st.lists(st.floats(0.8, 1.25), min_size=2, max_size=60), st.floats(0.05, 0.95))
@settings(deadline=None)
def test_the_expected_end_hardly_moves_between_commits(actors: int, hard: list[float], when: float) -> None:
    """Shards of equal size take 10 s up to a quarter; a tenth of the rows are committed."""
    run = Run([Size(10, 0)] * len(hard), [(10 * factor, 0.0) for factor in hard], [0.0] * actors)
    commits = sorted(commit for _, commit, _ in run.spans)
    since = commits[math.ceil(len(hard) / 10) - 1]
    error = run.error(since + when * (commits[-1] - since))
    assert error is not None and abs(error) * run.end <= max(0.25 * run.end, 12.5)


@pytest.mark.parametrize(("actors", "first"), [([0.0, 6.0], 1.0), ([0.0, 0.0], 1.5), ([0.0, 4.0, 8.0, 12.0], 1.4)])
@given(st.lists(st.floats(9, 11), min_size=30, max_size=60))
@settings(max_examples=30, deadline=None)
def test_a_slow_start_is_forgotten(actors: list[float], first: float, later: list[float]) -> None:
    """Actors that come late, or whose first shard takes longer: from a third of the shards on, within a tenth."""
    run = Run([Size(10, 0)] * len(later), [(seconds, 0.0) for seconds in later], actors, slow_first=first)
    commits = sorted(commit for _, commit, _ in run.spans)
    since = commits[len(commits) // 3]
    for step in range(10):
        error = run.error(since + step / 10 * (commits[-1] - since))
        assert error is not None and abs(error) <= 0.1


def test_before_the_first_commit_nothing_is_known() -> None:
    run = made(np.random.default_rng(0), 8, 10, actors=[5.0])
    assert run.at(4).pace is None and run.at(14).pace is None and run.at(14).at_work[0].elapsed == 9
    assert run.at(17).pace is not None


def test_a_plan_counts_down_to_the_first_commit() -> None:
    planned = Planned(startup=20.0, work=30.0)
    assert planned.seconds_left(0, 0) == 50 + ENDING_SECONDS
    assert planned.seconds_left(15, 0) == 35 + ENDING_SECONDS
    assert planned.seconds_left(40, 0) == 30 + ENDING_SECONDS  # a late start takes nothing from the work
    assert planned.seconds_left(45, 5) == 25 + ENDING_SECONDS
    assert planned.seconds_left(99, 59) == ENDING_SECONDS
    assert planned.blended(10 + ENDING_SECONDS, shards=3, working_seconds=16) == 11 + ENDING_SECONDS


def test_a_shard_prepared_again_after_its_commit_does_not_wait() -> None:
    coordinator = Coordinator()
    for _ in range(2):
        coordinator.prepared(0, 10, 120, prefix_tokens=2)
        coordinator.prepared(1, 10, 320, prefix_tokens=2)
        assert coordinator.read().waiting[-1] == Size(10, 300)
        coordinator.begin(0, "a")
        assert coordinator.read().waiting == (Size(10, 300),)
        coordinator.ended(0, True, 10, 0, 0)
    assert coordinator.read().waiting == (Size(10, 300),)


def test_what_takes_longer_than_usual_slows_the_rest() -> None:
    pace = Pace(shards=3, row_seconds=1.0, token_seconds=0.0, row_tokens=0.0, actors=1, busy=1.0)
    elapsed = (0.0, 8.0, 10.0, 18.0)
    left = [seconds_left(pace, [ShardAtWork(one)], [], 3, 30.0) - ENDING_SECONDS for one in elapsed]
    assert left == pytest.approx([30, 22, 20, 24])  # a shard of 18 s counts as a fourth: 12 s each for two others


def test_an_actor_that_loads_its_model_takes_shards() -> None:
    pace = Pace(shards=1, row_seconds=1.0, token_seconds=0.0, row_tokens=0.0, actors=1, busy=1.0)
    alone, both = (seconds_left(pace, [], [], 4, 40.0, loading) - ENDING_SECONDS for loading in (0, 1))
    assert (alone, both) == (40, 20)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_a_makespan_lies_between_its_bounds(seconds: list[float], actors: int) -> None:
    found = makespan(seconds, [0.0] * actors)
    assert found >= max(max(seconds), sum(seconds) / actors) - 1e-6
    assert found <= sum(seconds) / actors + max(seconds) + 1e-6


def test_very_many_shards_count_by_their_mean() -> None:
    pace = Pace(shards=9, row_seconds=1.0, token_seconds=0.1, row_tokens=10.0, actors=7, busy=1.0)
    left = seconds_left(pace, [], [Size(10, 100)] * 5, 100_000, 1_000_000.0)
    assert left == pytest.approx(100_000 * 20 / 7, rel=1e-3)
    assert makespan([20.0] * 8, [0.0] * 7) == 40
