"""The generate stage: answers prepared shards and commits their parts (output files). Does not import Ray."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.answers import Answer, Prompt
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.types import EngineStats
from actors.generator import Generator
from actors.settings import EngineSettings
from pipeline import metrics
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.output import PartSpec, part_bytes, part_table
from pipeline.answer.settings import fetched
from pipeline.answer.stats import ShardStats
from pipeline.input.rows import from_ipc
from pipeline.input.shards import Shard
from pipeline.prepare.prompts import CHOICES, CONTROL_TOKENS, ERROR, FORM, PROMPT_IDS, SAMPLING
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

EXAMPLE_SECONDS = 20.0  # minimum seconds between two example answers of an actor
EXAMPLE_TOKENS, EXAMPLE_CHARS = 24, 160  # number of a prompt's last tokens to show; maximum characters of a text

# the first shards keep the ends of their first prompts; a report shows them beside the answers
SHOWN_SHARDS, SHOWN_ROWS, END_TOKENS, END_CHARS = 10, 20, 160, 400


class Worker:
    """Describes the process that runs the generate stage. This base class describes the job's own process.

    owns_process: whether the process runs nothing else. If so, its global settings may be changed.
    """

    owns_process = False

    def actor(self) -> str | None:
        """Return the actor's id, which stays the same after a restart; None outside an actor."""
        return None

    def node(self) -> str:
        """Return the host's name; on a cluster, also the node's id."""
        return socket.gethostname()

    def attempt(self) -> int:
        """Return 2 in an actor that was restarted, else 1."""
        return 1

    def export_metrics(self) -> None:
        """Export the metrics of this process. Do nothing in the job's own process."""


def prompts(rows: pa.Table, shard: Shard) -> list[Prompt]:
    """Convert the rows of a prepared shard to prompts for `Generator`."""
    columns = [rows[name].to_pylist() for name in (PROMPT_IDS, ERROR, SAMPLING, CHOICES, FORM)]
    return [
        Prompt(
            ids,
            shard.url,
            shard.first_row + row,
            error,
            json.loads(sampling) if sampling else {},
            choices,
            OutputFormat(**form) if form else None,
        )
        for row, (ids, error, sampling, choices, form) in enumerate(zip(*columns, strict=True))
    ]


class _Turn:
    """The turn of a shard in an actor. The next shard waits for two events of this one.

    drains: few rows wait, so that the next shard's rows may enter the engine. ended: this shard's rows have ended, so
    that the next shard may be committed. before_ended: the previous shard's `ended`.
    """

    def __init__(self, before_ended: threading.Event) -> None:
        self.before_ended = before_ended
        self.drains, self.ended = threading.Event(), threading.Event()

    def end(self) -> None:
        self.drains.set()
        self.ended.set()


class ShardGenerator:
    """Callable class that answers whole shards with one Generator, and commits them.

    The call that answers a shard also commits it, because a separate task might wait for CPUs that another dataset
    holds. Several threads may call an instance. The next shard then begins while the last one is committed; with vLLM,
    it begins before slots are free, so that its rows take the slots of rows that end. If a process died during a shard,
    that shard runs alone.

    Args:
        settings: settings of the engine; `checkpoint` and `speed_adapter` are sources that `fetch` downloads.
        check_output: called before the model is loaded. Raises UserError if this node cannot see the job's output.
        devices: GPUs of this actor, or 1 on CPUs. price_per_hour: money per hour of one device; 0 without a price.

    Raises RuntimeError if this actor has died too often while loading the model.
    """

    def __init__(
        self,
        settings: EngineSettings,
        part: PartSpec,
        commit: Callable[[Shard, bytes, ShardStats], None],
        quarantine: Quarantine,
        coordinator: Coordinator,
        check_output: Callable[[], None] = lambda: None,
        worker: Worker | None = None,
        devices: float = 1.0,
        price_per_hour: float = 0.0,
    ) -> None:
        self.part, self.commit, self.quarantine, self.coordinator = part, commit, quarantine, coordinator
        self.devices, self.price_per_hour = devices, price_per_hour
        self.worker = worker or Worker()
        self.worker.export_metrics()
        check_output()
        actor = self.worker.actor()
        loads = coordinator.loading(actor)
        if loads > quarantine.attempts:
            raise RuntimeError(
                f"an actor died while it loaded the model, attempt {loads - 1} of {quarantine.attempts}: check "
                "the node's memory and kernel log, or lower actors.count"
            )
        # One thread loads and runs the model, although Ray constructs and calls an actor in different threads: OpenMP
        # has a pool for each thread. With two torch threads, a model was half as fast outside its first thread.
        self.thread = ThreadPoolExecutor(1, "generator")
        if self.worker.owns_process:
            logging.basicConfig(format="%(message)s")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            logging.getLogger("pipeline.checkpoints.resolve").setLevel(logging.INFO)  # the line of a download
        self.generator = self.thread.submit(Generator, fetched(settings)).result()
        self.loaded = time.time()
        if self.worker.owns_process:
            # exclude loaded objects from garbage collection, which took 10% of a small model's time
            gc.collect()
            gc.freeze()
            # end the process before Ray's exit handlers, which may wait for a lock for ever
            atexit.register(os._exit, 0)
        self._turns, self._last_turn, self._last_ended = threading.Lock(), _Turn(threading.Event()), 0.0
        self._last_turn.end()
        self._shown = 0.0  # time of the last example answer
        coordinator.loaded(actor)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer and commit the shards in `batch` (from the prepare stage). Return the committed shards' indices."""
        columns = (batch[name] for name in ("shard", "url", "first_row", "rows", "prepare_seconds"))
        committed = []
        for index, url, first_row, data, seconds in zip(*columns, strict=True):
            rows = from_ipc(data)
            if self._answer_and_commit(
                Shard(int(index), str(url), int(first_row), rows.num_rows), rows, float(seconds)
            ):
                committed.append(index)
        return {"shard": np.array(committed, dtype=np.int64)}

    def _answer_and_commit(self, shard: Shard, rows: pa.Table, prepare_seconds: float) -> bool:
        """Answer and commit a shard. Return False if the coordinator does not let the shard begin."""
        asked = prompts(rows, shard)
        with self._turn(shard) as turn:
            if not self.coordinator.begin(shard.index):
                return False
            began = time.perf_counter()
            answers, engine, alone = self._answer_shard(shard, asked, turn)
            self._show(asked, answers)
            table = part_table(rows, answers, self.part, shard)
            data = part_bytes(table, self.part, shard)
            measured = {**self._measured(engine, began), "overlaps": not alone, "prepare_seconds": prepare_seconds}
            measured["control_tokens"] = lambda: pc.sum(rows[CONTROL_TOKENS]).as_py() or 0
            measured["prompt_ends"] = lambda: self._prompt_ends(shard, asked)
            self.commit(shard, data, ShardStats.of_run(shard.index, table, measured))
            return True

    @contextmanager
    def _turn(self, shard: Shard) -> Iterator[_Turn]:
        """Wait until the shard may begin, and end its turn after the `with` block."""
        with self._turns:
            before = self._last_turn
            turn = self._last_turn = _Turn(before.ended)
        try:
            before.drains.wait()
            if not before.ended.is_set() and self.quarantine.knows(shard.index):
                before.ended.wait()  # run this shard alone, so that only its rows can cause a death
            yield turn
        finally:
            before.ended.wait()
            turn.end()

    def _answer_shard(self, shard: Shard, asked: list[Prompt], turn: _Turn) -> tuple[list[Answer], EngineStats, bool]:
        """Return a shard's answers, statistics, and whether it shared no step with another shard.

        Return after the previous shard has ended. The next shard may then be committed.
        """
        alone = turn.before_ended.is_set()
        attempt = self.quarantine.begin(shard.index, shard.rows)  # must precede any step that may kill this process
        answers, engine = self._answer_in_groups(attempt, asked, turn)
        with self._turns:  # no rates are computed for a shard that overlaps with another one
            alone = alone and (self._last_turn is turn or not turn.drains.is_set())
        _check_rows(answers, shard)
        for name in ("generated_tokens", "prompt_tokens", "decode_steps", "layer_steps"):
            metrics.add(name, getattr(engine, name))
        metrics.add("seconds", engine.prefill_seconds, part="prefill")
        metrics.add("seconds", engine.decode_seconds, part="decode")
        turn.before_ended.wait()
        if not attempt.isolated:
            turn.end()  # not of an isolated shard: it would be blamed for deaths that the next shard causes
        return answers, engine, alone

    def _answer_in_groups(
        self, attempt: ShardAttempt, rows: list[Prompt], turn: _Turn
    ) -> tuple[list[Answer], EngineStats]:
        """Return answers, sorted by row, and statistics. An isolated attempt runs and records its rows in groups."""
        among = [row.ids for row in rows if row.error is None]  # so that groups share the same prefixes as the whole
        if not attempt.isolated:
            return self._answer_rows(rows, among, on_drain=turn.drains.set)
        answers, stats = list[Answer](), EngineStats()
        for group in filter(None, [tuple(attempt.errors), *attempt.groups]):

            def enter(positions: Sequence[int], group: tuple[int, ...] = group) -> None:
                attempt.enter([group[position] for position in positions])

            asked = [replace(rows[row], error=attempt.errors.get(row, rows[row].error)) for row in group]
            of_group, counted = self._answer_rows(asked, among, on_batch=enter)
            answers += [replace(answer, row=group[answer.row]) for answer in of_group]
            stats = stats.plus(counted)
        return sorted(answers, key=lambda answer: answer.row), stats  # stable sort: a row's samples stay in order

    def _answer_rows(
        self, rows: list[Prompt], among: Sequence[Sequence[int]], **told: Callable[..., None]
    ) -> tuple[list[Answer], EngineStats]:
        """Answer rows in the model's thread. among, told: see `Generator.begin`."""
        work = self.generator.begin(rows, **told, among=among)
        self.thread.submit(self.generator.run, work).result()
        return self.generator.finish(work), work.call.stats

    def _measured(self, engine: EngineStats, began: float) -> dict[str, Any]:
        """Return statistics of the shard that just ended. Its time begins at the previous shard's end or later."""
        with self._turns:
            now = time.perf_counter()
            seconds, self._last_ended = now - max(began, self._last_ended), now
        finished, device_seconds = time.time(), seconds * self.devices
        return {
            **asdict(engine),
            "generate_seconds": seconds,
            "device_seconds": device_seconds,
            "money": device_seconds * self.price_per_hour / 3600,
            "padding_tokens": engine.padded_prompt_tokens - engine.prompt_tokens,
            "peak_memory_bytes": self.generator.peak_memory_bytes,
            "started": finished - seconds,
            "finished": finished,
            "device": self.generator.device_name,
            "node": self.worker.node,
            "attempt": self.worker.attempt,
            "actor": self.worker.actor,
            "loaded": self.loaded,
        }

    def _prompt_ends(self, shard: Shard, asked: Sequence[Prompt]) -> str:
        """Return JSON of the ends of the shard's first prompts, for the report; "" if the report cannot show them."""
        if shard.index >= SHOWN_SHARDS:
            return ""
        decode = self.generator.tokenizer.decode
        return json.dumps([decode(list(one.ids[-END_TOKENS:]))[-END_CHARS:] for one in asked[:SHOWN_ROWS]])

    def _show(self, asked: Sequence[Prompt], answers: Sequence[Answer]) -> None:
        """Send an example answer to the coordinator, unless one was sent in the last `EXAMPLE_SECONDS`."""
        answer = next((one for one in answers if one.error is None), None)
        if answer is None or time.monotonic() - self._shown < EXAMPLE_SECONDS:
            return
        self._shown = time.monotonic()
        prompt = self.generator.tokenizer.decode(list(asked[answer.row].ids[-EXAMPLE_TOKENS:]))
        text = answer.generated_text or ""
        self.coordinator.show(f"…{prompt[-EXAMPLE_CHARS:]!r} -> {text[:EXAMPLE_CHARS]!r}")


def _check_rows(answers: Sequence[Answer], shard: Shard) -> None:
    """Raise RuntimeError unless each row of the shard has been answered exactly once, in order."""
    answered = [answer.row for answer in answers if answer.sample_index == 0]
    if answered != list(range(shard.rows)):
        wrong = min(set(range(shard.rows)).symmetric_difference(answered), default=None)
        which = "a row is answered twice" if wrong is None else f"row {wrong} of the shard has no answer"
        raise RuntimeError(
            f"part-{shard.index:06d}.parquet ({shard.url} from row {shard.first_row}) is not committed. Of its "
            f"{shard.rows} rows, {len(set(answered))} are answered; {which}. This is a bug in the engine"
        )
