"""The generate stage: prepared shards -> parts as Parquet bytes, and their statistics. Imports no ray."""

from __future__ import annotations

import gc
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from actors.answers import Answer, Prompt
from actors.engine.output_format import OutputFormat
from actors.generator import Generator
from pipeline.generate.coordinator import RunCoordinator
from pipeline.generate.output import PartSpec, part_bytes, part_table
from pipeline.generate.settings import fetched
from pipeline.generate.stats import ShardStats, answered_prompt_tokens, duplicate_ids, error_rows
from pipeline.prepare.prompts import CHOICES, ERROR, FORM, PROMPT_IDS, SAMPLING
from pipeline.read.ipc import from_ipc
from pipeline.read.shards import Shard
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

METRICS = {
    "rows": "rows answered, row errors included",
    "errors": "rows with an error",
    "generated_tokens": "tokens generated",
    "layer_steps": "layers run over decode steps",
}


class Worker(Protocol):
    """The process that a stage runs in."""

    owns_process: bool  # whether process-wide settings may be changed

    def actor(self) -> str | None:
        """Id of the actor, the same after a restart; None outside an actor."""
        ...

    def node(self) -> str:
        """Host, and on a cluster the node."""
        ...

    def attempt(self) -> int:
        """2 in an actor that was restarted, else 1."""
        ...

    def count(self, amounts: Mapping[str, float], fingerprint: str) -> None:
        """Add amounts to the job's running counters; does nothing in a process that exports no metrics.

        amounts: by key of `METRICS`, since the last call. fingerprint: the job's.
        """
        ...


class ThisProcess:
    """A worker that shares its process with the caller of the job."""

    owns_process = False

    def actor(self) -> str | None:
        return None

    def node(self) -> str:
        return socket.gethostname()

    def attempt(self) -> int:
        return 1

    def count(self, amounts: Mapping[str, float], fingerprint: str) -> None:
        pass


def prompts(rows: pa.Table, url: str, first_row: int) -> list[Prompt]:
    """A prepared shard's rows as the Generator takes them."""
    columns = [rows[name].to_pylist() for name in (PROMPT_IDS, ERROR, SAMPLING, CHOICES, FORM)]
    return [
        Prompt(
            ids,
            url,
            first_row + row,
            error,
            json.loads(sampling) if sampling else {},
            choices,
            OutputFormat(**form) if form else None,
        )
        for row, (ids, error, sampling, choices, form) in enumerate(zip(*columns, strict=True))
    ]


class ShardGenerator:
    """Callable class: answers whole shards with one Generator.

    Args:
        generator: arguments of `Generator`; checkpoint and speed adapter as `fetch` takes them.
        part: what the parts hold.
        prefix: token ids with which the job's prompts begin.
        coordinator: of the run, asked before each shard; None answers every shard.
        quarantine: of the run; None retries a row that kills this process for ever.
        worker: the process that this runs in.

    Raises:
        RuntimeError: this actor has died too often while it loaded the model.
    """

    def __init__(
        self,
        generator: Mapping[str, Any],
        part: PartSpec,
        prefix: Sequence[int] = (),
        coordinator: RunCoordinator | None = None,
        quarantine: Quarantine | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.worker = worker or ThisProcess()
        if self.worker.owns_process:
            logging.getLogger("transformers").setLevel(logging.ERROR)
        if coordinator is not None and quarantine is not None:
            loads = coordinator.loading(self.worker.actor())
            if loads > quarantine.attempts:
                raise RuntimeError(
                    f"an actor died while it loaded the model, attempt {loads - 1} of {quarantine.attempts}: look at "
                    "the node's memory and its kernel's log, or lower actors.count"
                )
        # Ray constructs in one thread and calls in another, and OpenMP keeps a thread pool for each calling thread:
        # a model loaded in one thread and run in another took twice the time with two torch threads
        self.thread = ThreadPoolExecutor(1, "generator")
        settings = fetched(generator, self._downloading(coordinator))
        self.generator = self.thread.submit(Generator, **settings).result()
        if self.worker.owns_process:
            # loaded objects stay: a collection that scans them each time takes a tenth of a small model's time
            gc.collect()
            gc.freeze()
        self.part = part
        self.prefix = prefix
        self.coordinator = coordinator
        self.quarantine = quarantine
        if coordinator is not None:
            coordinator.loaded(self.worker.actor())

    def _downloading(self, coordinator: RunCoordinator | None) -> Callable[[str], None] | None:
        return None if coordinator is None else partial(coordinator.downloading, self.worker.actor())

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Shards with columns shard, url, first_row, rows, prepare_seconds -> shard, part, stats."""
        shards, parts, stats = [], [], []
        for position, shard in enumerate(batch["shard"].tolist()):
            if self.coordinator is not None and not self.coordinator.begin(shard):
                continue
            part, shard_stats = self._shard(
                shard,
                str(batch["url"][position]),
                int(batch["first_row"][position]),
                from_ipc(batch["rows"][position]),
                float(batch["prepare_seconds"][position]),
            )
            shards.append(shard)
            parts.append(part)
            stats.append(json.dumps(asdict(shard_stats)))
        column = np.empty(len(parts), dtype=object)
        column[:] = parts
        return {"shard": np.array(shards, dtype=np.int64), "part": column, "stats": np.array(stats, dtype=object)}

    def _shard(
        self, shard: int, url: str, first_row: int, rows: pa.Table, prepare_seconds: float
    ) -> tuple[bytes, ShardStats]:
        started, began = time.time(), time.perf_counter()
        # before anything that may kill this process
        shard_attempt = None if self.quarantine is None else self.quarantine.begin(shard, rows.num_rows)
        answers = self._answers(shard_attempt, prompts(rows, url, first_row))
        table = part_table(rows, answers, self.part, url, first_row)
        data = part_bytes(table, self.part, Shard(shard, url, first_row, rows.num_rows))
        seconds = time.perf_counter() - began
        engine = self.generator.take_stats()
        errors = error_rows(table)
        amounts = (rows.num_rows, errors, engine.generated_tokens, engine.layer_steps)
        self.worker.count(dict(zip(METRICS, amounts, strict=True)), self.part.fingerprint)
        return data, ShardStats(
            shard=shard,
            rows=rows.num_rows,
            answers=len(answers),
            errors=errors,
            duplicate_ids=duplicate_ids(table),
            prompt_tokens=answered_prompt_tokens(table),
            shared_prompt_tokens=engine.shared_prompt_tokens,
            generated_tokens=engine.generated_tokens,
            prepare_seconds=prepare_seconds,
            prefill_seconds=engine.prefill_seconds,
            decode_seconds=engine.decode_seconds,
            generate_seconds=seconds,
            commit_seconds=0.0,
            tokens_per_second=engine.generated_tokens / seconds,
            batches=engine.batches,
            padding_fraction=_share(engine.padded_prompt_tokens - engine.prompt_tokens, engine.padded_prompt_tokens),
            mean_depth=_share(engine.layer_steps, engine.decode_steps),
            decode_steps=engine.decode_steps,
            layer_steps=engine.layer_steps,
            full_layer_steps=engine.full_layer_steps,
            padded_prompt_tokens=engine.padded_prompt_tokens,
            cache_bytes=engine.cache_bytes,
            out_of_memory=engine.out_of_memory,
            peak_memory_bytes=self.generator.peak_memory_bytes(),
            started=started,
            finished=time.time(),
            device=self.generator.device_name(),
            node=self.worker.node(),
            attempt=self.worker.attempt(),
            rebuilt=False,
        )

    def _answers(self, shard_attempt: ShardAttempt | None, rows: list[Prompt]) -> list[Answer]:
        """Answers to a shard's rows, in row order; after a death group by group, each batch recorded before it runs."""
        if shard_attempt is None or not shard_attempt.isolated:
            return self._answer(rows)
        errors = shard_attempt.errors
        answers: list[Answer] = []
        for group in filter(None, [tuple(errors), *shard_attempt.groups]):

            def enter(positions: Sequence[int], group: tuple[int, ...] = group) -> None:
                shard_attempt.enter([group[position] for position in positions])

            prompts = [replace(rows[row], error=errors.get(row, rows[row].error)) for row in group]
            answers += [replace(answer, row=group[answer.row]) for answer in self._answer(prompts, enter)]
        return sorted(answers, key=lambda answer: (answer.row, answer.sample_index))

    def _answer(self, rows: list[Prompt], on_batch: Callable[[Sequence[int]], None] | None = None) -> list[Answer]:
        return self.thread.submit(self.generator.answer, rows, self.prefix, on_batch).result()


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0
