"""Stop strings, log-probabilities, penalties and constraints on the paged engine: answers are those of the library
engine, row by row, in fp32; and what the host does for them, counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import STOP, any_schedule, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gpu_engine import SCHEDULE, bytes_of, engine_of, fused, largest, preemptions
from test_gpu_exact import FULL, exact
from tiny_checkpoint import tiny_checkpoint
from tiny_models import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.constraints.constraint import Bits, Constraint
from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import AfterReasoning, Reasoning
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.gpu import reference
from actors.engine.gpu.completions import CompletionPoll
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.state import DeviceRows
from actors.engine.sampling.stopping import StopStrings
from actors.engine.scheduler import CallScheduler, generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Completion, FinishReason, Request, SamplingParams

LABELS = [[7, 8, 9], [7, 8, 12], [20], [21, 22, 23, 24], [7, 9, 33, 5]]  # 9, 33 and 5 end other rows
KINDS = ["plain", "stop", "early stop", "logprobs", "penalties", "stop tokens", "choices", "form", "everything"]


def decode(tokens: list[int]) -> str:
    return "".join("abcdefgh"[token % 8] for token in tokens)


class Form:
    """Each token is 1 to 40 above the last one, around the vocabulary's end; `end` ends an answer of two or more.

    Where `strict`, a multiple of 11 behind the third token is an error.
    """

    name, most_tokens = "form", None

    def __init__(self, end: int, strict: bool = False) -> None:
        self.end, self.strict = end, strict

    def begin(self) -> FormProgress:
        return FormProgress(self)

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        return decode(list(tokens))


class FormProgress:
    scored, label = False, None

    def __init__(self, form: Form) -> None:
        self.form, self.tokens, self.done = form, list[int](), False

    @property
    def error(self) -> str | None:
        broken = self.form.strict and len(self.tokens) > 3 and self.tokens[-1] % 11 == 0
        return "broken" if broken else None

    def allows(self, token: int) -> bool:
        if token == self.form.end:
            return len(self.tokens) > 1
        return not self.tokens or 1 <= (token - self.tokens[-1]) % VOCAB <= 40

    matcher = None

    def prepare(self) -> None: ...

    def write(self, bits: Bits) -> None:
        bits[:] = 0
        for token in range(VOCAB):
            if self.allows(token):
                bits.view("uint32")[token // 32] |= 1 << token % 32

    def advance(self, token: int) -> bool:
        assert self.allows(token)
        self.tokens.append(token)
        self.done = token == self.form.end
        return self.done

    def is_complete(self) -> bool:
        return self.done


def rows_of(kinds: Sequence[str], seed: int, most_new: int = 14) -> list[Request]:
    """One row of each kind, some greedy and some sampled."""
    rng = random.Random(seed)
    rows = []
    for row, kind in zip(requests(len(kinds), seed, most_new=most_new), kinds, strict=True):
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0]), "top_p": rng.choice([1.0, 0.9])}
        ending = constraint = None
        if kind in ("logprobs", "everything"):
            params["logprobs"] = rng.choice([0, 1, 5, 20])
        if kind in ("penalties", "everything"):
            params |= {"repetition_penalty": rng.choice([1.0, 1.5]), "frequency_penalty": rng.choice([0.0, 0.7])}
            params["presence_penalty"] = 0.4
        if kind == "stop tokens":
            params |= {"stop_token_ids": tuple(range(30, 70)), "min_new_tokens": rng.choice([0, 1])}
        if kind in ("stop", "early stop", "everything"):
            least = row.sampling.max_new_tokens // 2 if kind == "early stop" else 0
            params |= {"min_new_tokens": least, "ignore_eos": True}
            ending = StopStrings(rng.choice([["a"], ["ab", "c"], ["de", "gh"]]), decode, (), least)
        if kind == "choices":
            constraint = ChoiceTrie(LABELS, 2)
            params["logprobs"] = rng.choice([None, 2])
            params["repetition_penalty"] = rng.choice([1.0, 1.4])
        if kind == "form":
            constraint = Form(rng.choice([2, 50]), rng.random() < 0.5)
        sampling = row.sampling.merged(params)
        rows.append(Request(row.prompt_ids, sampling, row.key, ending=ending, constraint=constraint))
    return rows


def wanted(rows: Sequence[Request], schedule: Schedule, logprobs: bool = True) -> list[Completion]:
    """Each row alone, by the library engine."""
    engine = Engine(Decoder(tiny_model("llama")), schedule, STOP, cumulative_logprob=logprobs)
    return generate(engine, rows, budget_bytes=2**40, max_rows=1)


def assert_same(got: Sequence[Completion], want: Sequence[Completion]) -> None:
    near = {"abs": 1e-4}
    for one, other in zip(got, want, strict=True):
        assert (one.token_ids, one.finish_reason, one.error) == (other.token_ids, other.finish_reason, other.error)
        assert (one.choice, one.cumulative_logprob is None) == (other.choice, other.cumulative_logprob is None)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, **near)
        assert one.choice_probability == pytest.approx(other.choice_probability, **near)
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token == theirs.token and mine.logprob == pytest.approx(theirs.logprob, **near)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert [score for _, score in mine.top] == pytest.approx([score for _, score in theirs.top], **near)
            assert all(score == mine.logprob for token, score in mine.top if token == mine.token)


def answered(engine: GpuEngine, rows: Sequence[Request], scheduler: str = "refill") -> list[Completion]:
    budget = bytes_of(engine.decoder, engine.pages)
    done = generate(engine, rows, budget_bytes=budget, max_rows=engine.max_rows, scheduler=scheduler)
    assert engine._run is not None and engine._run.cache.free == engine.pages  # every page has come back
    return done


@settings(max_examples=40, deadline=None)
@given(
    schedule=any_schedule(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    seed=st.integers(0, 999),
    max_rows=st.integers(1, 9),
    read_every=st.integers(1, 6),
    scheduler=st.sampled_from(["lock_step", "refill"]),
    logprobs=st.booleans(),
)
def test_answers_are_the_library_engines(
    schedule: Schedule,
    kinds: list[str],
    seed: int,
    max_rows: int,
    read_every: int,
    scheduler: str,
    logprobs: bool,
) -> None:
    """Rows of all kinds beside each other: tokens, reasons, counts and log-probabilities, cut where a row ends."""
    rows = rows_of(kinds, seed)
    how = {"max_rows": max_rows, "read_every": read_every, "cumulative_logprob": logprobs}
    engine = engine_of(fused("llama"), schedule, **how)
    got = answered(engine, rows, scheduler)
    assert_same(got, wanted(rows, schedule, logprobs))
    stats = engine.take_stats()
    assert stats.generated_tokens == sum(len(one.token_ids) for one in got)
    assert stats.decode_steps == sum(len(one.token_ids) - 1 for one in got)
    assert stats.layer_steps == sum(schedule.layer_steps(len(one.token_ids) - 1) for one in got)


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    seed=st.integers(0, 999),
    max_rows=st.sampled_from([2, 9, 48]),
    read_every=st.integers(1, 6),
    count=st.integers(1, 4),
    pages=st.sampled_from([4000, 150]),
)
def test_answers_of_exact_mode_are_the_library_engines(
    kinds: list[str], seed: int, max_rows: int, read_every: int, count: int, pages: int
) -> None:
    rows = rows_of(kinds, seed)
    engine = exact(fused("llama"), max_rows=max_rows, read_every=read_every, count=count, pages=pages)
    assert_same(answered(engine, rows), wanted(rows, FULL))


def test_preempted_rows_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted tokens, watched tokens and places in a constraint too."""
    preempted = preemptions(monkeypatch)
    for seed in range(4):
        rows = rows_of([*KINDS, *KINDS], seed, most_new=40)
        rows = [replace(row, sampling=row.sampling.merged({"ignore_eos": row.constraint is None})) for row in rows]
        engine = engine_of(fused("llama"), SCHEDULE, pages=largest(rows) + 3 * seed, max_rows=8)
        assert_same(answered(engine, rows), wanted(rows, SCHEDULE))
    assert preempted


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
def test_grammars_and_thinking_before_a_choice(tmp_path: Path, scheduler: str) -> None:
    """With masks that another thread computes, for sampled rows."""
    path = tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    library, paged = (Decoder(AutoModelForCausalLM.from_pretrained(path).float().eval()) for _ in range(2))
    assert paged.prepare_for_gpu(reference)
    compiler = GrammarCompiler(tokenizer, library.vocab_size, [2])
    forms: list[Constraint] = [compiler.compile(OutputFormat("regex", r"[a-z]{3,9}( [a-z]+){0,2}\.?"))]
    forms.append(
        compiler.compile(OutputFormat("grammar", 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: /[a-c]/'))
    )
    forms.append(AfterReasoning(ChoiceTrie(LABELS, 2), Reasoning("<t>", "e"), tokenizer.decode, [2]))
    rows = []
    for number in range(18):
        sampling = SamplingParams(max_new_tokens=16, temperature=number % 2, logprobs=2 if number % 5 == 0 else None)
        form = None if number % 4 == 3 else forms[number % 3]
        rows.append(Request([5 + number, 9], sampling, number, constraint=form))
    schedule = ScheduleSpec(speedup=2, horizon=6).build(library.num_layers)
    want = generate(Engine(library, schedule, STOP), rows, budget_bytes=2**40, max_rows=1)
    got = answered(engine_of(paged, schedule, max_rows=5), rows, scheduler)
    assert_same(got, want)
    assert {one.finish_reason for one in got} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(one.choice is not None for one in got)


def test_tokens_of_rows_in_flight_are_those_of_their_answers() -> None:
    """What is streamed: of watched rows never a token behind the end, and as many log-probabilities as tokens."""
    engine = engine_of(fused("llama"), SCHEDULE, max_rows=2 * len(KINDS))
    for kinds in (KINDS, [kind for kind in KINDS if kind not in ("choices", "form")]):
        rows = rows_of([*kinds, *kinds], 3)
        engine.open(len(rows), 20, 14)
        tickets = engine.admit(rows)
        seen: dict[int, list[tuple[int, ...]]] = {ticket: [] for ticket in tickets}
        done = dict(engine.retire())
        while engine.rows:
            for ticket, tokens in engine.generated().items():
                seen[ticket].append(tuple(tokens))
            wanted_logprobs = [row for row in engine.rows if row.request.sampling.logprobs is not None]
            assert all(len(row.logprobs) == len(row.tokens) for row in wanted_logprobs)
            done |= dict(engine.step())
        engine.close()
        for ticket, parts in seen.items():
            assert all(tokens == done[ticket].token_ids[: len(tokens)] for tokens in parts)
        assert any(len(part) > 1 for parts in seen.values() for part in parts)


def test_a_row_that_ended_by_a_string_leaves_at_the_next_poll() -> None:
    """A few tokens more are sampled and dropped; the slot is free for another row."""
    engine = engine_of(fused("llama"), SCHEDULE, max_rows=4)
    always = StopStrings(list("abcdefgh"), decode)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    rows = [Request([5, row], params, ending=always if row % 2 else None) for row in range(3, 11)]
    got = answered(engine, rows)
    assert [len(one.token_ids) for one in got] == [1, 40] * 4
    stats = engine.take_stats()
    assert 0 < stats.idle_row_steps <= 8 * 2 * engine.read_every


def test_counts_of_joined_calls_are_each_calls_own() -> None:
    """A row is counted once it has ended, though the host knows earlier tokens of watched rows."""
    engine = engine_of(fused("llama"), SCHEDULE, max_rows=4)
    calls = [rows_of([*KINDS, *KINDS], seed) for seed in range(3)]
    how = {"budget_bytes": bytes_of(engine.decoder, engine.pages), "max_rows": 4, "scheduler": "refill"}
    scheduler = CallScheduler(engine, **how, joins_calls=True)
    for call in [scheduler.submit(rows) for rows in calls]:
        done = scheduler.finish(call)
        assert call.stats.generated_tokens == sum(len(one.token_ids) for one in done)
        assert call.stats.decode_steps == sum(len(one.token_ids) - 1 for one in done)


class Watched:
    """What the host does for a run, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.polls = self.masks = self.sampled = 0
        start, write, sample = CompletionPoll.start, DeviceRows.set_masks, DeviceRows.sample

        def started(poll: CompletionPoll, *given: Any) -> None:
            self.polls += 1
            start(poll, *given)

        def written(state: DeviceRows, slots: Sequence[int], rows: Sequence[Any]) -> None:
            self.masks += sum(state.is_masked(row) and row.finish is None for row in rows)
            write(state, slots, rows)

        def sampled(state: DeviceRows, *given: Any) -> None:
            self.sampled += 1
            sample(state, *given)

        monkeypatch.setattr(CompletionPoll, "start", started)
        monkeypatch.setattr(DeviceRows, "set_masks", written)
        monkeypatch.setattr(DeviceRows, "sample", sampled)


@pytest.mark.parametrize("kinds", [["plain"], ["stop", "logprobs", "penalties"], ["plain", "choices"]])
def test_only_masked_rows_make_the_host_poll_more_often(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch samples all rows of a step; masks are written for masked rows alone, and for none without them."""
    count, steps = 8, 20
    rows = rows_of([kinds[row % len(kinds)] for row in range(count)], 1)
    rows = [
        replace(
            row,
            sampling=row.sampling.merged({"max_new_tokens": 30, "ignore_eos": True}),
            constraint=None if row.constraint is None else Endless(),
        )
        for row in rows
    ]
    engine = engine_of(fused("llama"), SCHEDULE, max_rows=count)
    watched = Watched(monkeypatch)
    engine.open(count, 20, 30)
    engine.admit(rows)
    for _ in range(steps):
        engine.step()
    masked = kinds == ["plain", "choices"]
    assert watched.sampled == steps + 1
    assert watched.polls == (steps + 1 if masked else steps // engine.read_every)
    assert watched.masks == (count // 2 * (steps + 1) if masked else 0)
    engine.close()


class Endless(Form):
    """Never ends."""

    def __init__(self) -> None:
        super().__init__(end=VOCAB + 1)
