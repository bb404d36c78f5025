"""The actor stage: whole prepared shards -> finished parts, as Parquet bytes, and their statistics."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util.metrics import Counter

from actors.generator import Answer, Generator, Prompt
from pipeline.checkpoints.resolve import fetch
from pipeline.generate.stats import ShardStats, duplicate_ids
from pipeline.prepare.prompts import CHOICES, ERROR, PROMPT_IDS, SAMPLING
from pipeline.read.ipc import from_ipc
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

ANSWER_FIELDS = [
    pa.field("sample_index", pa.int32()),
    pa.field("generated_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("generated_tokens", pa.int32()),
    pa.field("mean_depth", pa.float64()),
    pa.field("error", pa.string()),
]
_TOKEN_LOGPROB = [pa.field("token_id", pa.int32()), pa.field("logprob", pa.float64())]
OPTIONAL_FIELDS = {
    "token_ids": pa.field("token_ids", pa.list_(pa.int32())),
    "cumulative_logprob": pa.field("cumulative_logprob", pa.float64()),
    "logprobs": pa.field(
        "logprobs",
        pa.list_(pa.struct([*_TOKEN_LOGPROB, pa.field("top", pa.list_(pa.struct(_TOKEN_LOGPROB)))])),
    ),
    "choice_probability": pa.field("choice_probability", pa.float64()),
}


@dataclass(frozen=True)
class PartSpec:
    """What a part file holds: the id column (None: made from file and row number), columns kept, optional
    columns, and for its footer the job's fingerprint and the model's layers."""

    id_column: str | None
    keep: tuple[str, ...]
    optional: tuple[str, ...]
    fingerprint: str
    num_layers: int


def part_bytes(table: pa.Table, spec: PartSpec, shard: int) -> bytes:
    """The part as Parquet bytes; its footer names job and shard, nothing that differs between attempts."""
    metadata = {
        "skipdecode.fingerprint": spec.fingerprint,
        "skipdecode.shard": str(shard),
        "skipdecode.num_layers": str(spec.num_layers),
    }
    sink = pa.BufferOutputStream()
    whole = table.replace_schema_metadata(metadata).combine_chunks()  # pages do not depend on how it was read
    pq.write_table(whole, sink, compression="zstd", write_page_checksum=True)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def part_table(rows: pa.Table, answers: Sequence[Answer], spec: PartSpec, url: str, first_row: int) -> pa.Table:
    """Output rows of a shard: id, kept columns, answers; a row with several answers comes as often."""
    owners = [answer.row for answer in answers]
    if spec.id_column is None:
        ids = pa.array([f"{os.path.basename(url)}:{first_row + row}" for row in range(rows.num_rows)], pa.string())
    else:
        ids = rows[spec.id_column]
    carried = {"id": ids, **{name: rows[name] for name in spec.keep if name != "id"}}
    names, columns = list(carried), list(carried.values())
    if owners != list(range(rows.num_rows)):
        columns = [column.take(pa.array(owners, pa.int64())) for column in columns]
    for field in [*ANSWER_FIELDS, *(OPTIONAL_FIELDS[name] for name in spec.optional)]:
        values = [getattr(answer, field.name) for answer in answers]
        if field.name == "logprobs":
            values = [None if one is None else [token.to_dict() for token in one] for one in values]
        names.append(field.name)
        columns.append(pa.array(values, field.type))
    return pa.table(columns, names=names)


def prompts(rows: pa.Table, url: str, first_row: int) -> list[Prompt]:
    """A prepared shard's rows as the Generator takes them."""
    columns = [rows[name].to_pylist() for name in (PROMPT_IDS, ERROR, SAMPLING, CHOICES)]
    return [
        Prompt(ids, url, first_row + row, error, json.loads(sampling) if sampling else {}, choices)
        for row, (ids, error, sampling, choices) in enumerate(zip(*columns, strict=True))
    ]


class ShardGenerator:
    """Callable class for Ray Data: answers whole shards with one Generator.

    generator: its constructor's arguments, the checkpoint as `fetch` takes it. prefix: token ids with which the
    job's prompts begin. coordinator: the run's `Coordinator` actor, asked before each shard; without one all shards
    are answered. quarantine: the run's; without one a row that kills this process kills it for ever. Raises
    RuntimeError if this actor has died too often while it loaded.
    """

    def __init__(
        self,
        generator: Mapping[str, Any],
        part: PartSpec,
        prefix: Sequence[int] = (),
        coordinator: Any = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        if coordinator is not None and quarantine is not None:
            starts = ray.get(coordinator.loading.remote(_actor()))
            if starts > quarantine.attempts:
                raise RuntimeError(
                    f"an actor died while it loaded the model, attempt {starts - 1} of {quarantine.attempts}: look at "
                    "the node's memory and its kernel's log, or lower actors.count"
                )
        # Ray calls from another thread than it constructs in, and OpenMP keeps a pool of threads for each thread that
        # calls it: a model loaded in one and run in the other took twice the time with two torch threads
        self.thread = ThreadPoolExecutor(1, "generator")
        settings = {**generator, "checkpoint": str(fetch(generator["checkpoint"]))}
        self.generator = self.thread.submit(Generator, **settings).result()
        # what is loaded stays: a collection that walks over it each time takes a tenth of a small model's time
        gc.collect()
        gc.freeze()
        self.part = part
        self.prefix = prefix
        self.coordinator = coordinator
        self.quarantine = quarantine
        if coordinator is not None:
            coordinator.loaded.remote(_actor())
        tags = ("fingerprint",)
        self.counters = {
            name: Counter(f"skipdecode_{name}", description=text, tag_keys=tags)
            for name, text in {
                "rows": "rows answered, bad ones included",
                "errors": "rows with an error",
                "generated_tokens": "tokens generated",
                "layer_steps": "layers run over decode steps",
            }.items()
        }

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Shards with columns shard, url, first_row, rows, prepare_seconds -> shard, part, stats."""
        shards, parts, stats = [], [], []
        for place, shard in enumerate(batch["shard"].tolist()):
            if self.coordinator is not None and not ray.get(self.coordinator.begin.remote(shard)):
                continue
            part, one = self._shard(
                shard,
                str(batch["url"][place]),
                int(batch["first_row"][place]),
                from_ipc(batch["rows"][place]),
                float(batch["prepare_seconds"][place]),
            )
            shards.append(shard)
            parts.append(part)
            stats.append(json.dumps(asdict(one)))
        column = np.empty(len(parts), dtype=object)
        column[:] = parts
        return {"shard": np.array(shards, dtype=np.int64), "part": column, "stats": np.array(stats, dtype=object)}

    def _shard(
        self, shard: int, url: str, first_row: int, rows: pa.Table, prepare_seconds: float
    ) -> tuple[bytes, ShardStats]:
        started, began = time.time(), time.perf_counter()
        shard_attempt = (
            None if self.quarantine is None else self.quarantine.begin(shard, rows.num_rows)
        )  # before all that may kill
        answers = self._answers(shard_attempt, prompts(rows, url, first_row))
        table = part_table(rows, answers, self.part, url, first_row)
        data = part_bytes(table, self.part, shard)
        seconds = time.perf_counter() - began
        engine = self.generator.take_stats()
        errors = sum(answer.error is not None for answer in answers)
        for name, amount in (
            ("rows", rows.num_rows),
            ("errors", errors),
            ("generated_tokens", engine.generated_tokens),
            ("layer_steps", engine.layer_steps),
        ):
            if amount:
                self.counters[name].inc(amount, tags={"fingerprint": self.part.fingerprint[:12]})
        return data, ShardStats(
            shard=shard,
            rows=rows.num_rows,
            answers=len(answers),
            errors=errors,
            duplicate_ids=duplicate_ids(table),
            prompt_tokens=sum(one.prompt_tokens for one in answers if one.sample_index == 0 and one.error is None),
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
            node=_node(),
            attempt=_attempt(),
            adopted=False,
        )

    def _answers(self, shard_attempt: ShardAttempt | None, wanted: list[Prompt]) -> list[Answer]:
        """Answers to a shard's rows, in their order; after a death group by group, each batch written down before."""
        if shard_attempt is None or not shard_attempt.careful:
            return self._answer(wanted)
        errors = shard_attempt.errors
        answers: list[Answer] = []
        for group in filter(None, [tuple(errors), *shard_attempt.groups]):

            def enter(places: Sequence[int], group: tuple[int, ...] = group) -> None:
                shard_attempt.enter([group[place] for place in places])

            rows = [replace(wanted[row], error=errors.get(row, wanted[row].error)) for row in group]
            answers += [replace(one, row=group[one.row]) for one in self._answer(rows, enter)]
        return sorted(answers, key=lambda one: (one.row, one.sample_index))

    def _answer(self, wanted: list[Prompt], on_batch: Callable[[Sequence[int]], None] | None = None) -> list[Answer]:
        return self.thread.submit(self.generator.answer, wanted, self.prefix, on_batch).result()


def _actor() -> str | None:
    """Id of the actor that this process is, the same after a restart."""
    actor: str | None = ray.get_runtime_context().get_actor_id()
    return actor


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _node() -> str:
    """This host, and on a cluster the beginning of its Ray node's id: containers and local nodes share host names."""
    host = socket.gethostname()
    return f"{host} {ray.get_runtime_context().get_node_id()[:8]}" if ray.is_initialized() else host


def _attempt() -> int:
    """Times this actor has been started, this one included: Ray gives no count a task."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return 1
    return 1 + int(ray.get_runtime_context().was_current_actor_reconstructed)
