"""Real part files of answers that no model gave, and their statistics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from memory_folder import MemoryFolder

from actors.answers import Answer
from actors.settings import EngineSettings
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.output import PartSpec, part_bytes, part_table
from pipeline.answer.stage import ShardGenerator
from pipeline.answer.stats import STATS_SCHEMA, ShardStats, Totals
from pipeline.commit.finalize import finalize, write_success
from pipeline.commit.sink import commit
from pipeline.input.files import InputFile
from pipeline.input.rows import to_ipc
from pipeline.input.shards import Shard
from pipeline.plan.batching import Batching
from pipeline.plan.manifest import ANSWERS_VERSION, Manifest
from pipeline.runtime.quarantine import Quarantine
from pipeline.storage.folder import Folder

LAYERS = 4
FINGERPRINT = "f" * 64


def fake_answers(rows: int) -> list[Answer]:
    """Row r: r + 1 tokens at a mean depth of 3, but every third one an error."""
    return [
        Answer(
            row=row,
            sample_index=0,
            generated_text=None if bad else f"answer {row}",
            finish_reason="error" if bad else "length",
            prompt_tokens=0 if bad else 5,
            generated_tokens=0 if bad else row + 1,
            mean_depth=None if bad or not row else 3.0,
            error="prompt is null" if bad else None,
            token_ids=[] if bad else [7] * (row + 1),
            cumulative_logprob=None if bad else -0.5 * row,
            logprobs=None,
            choice_probability=None,
        )
        for row in range(rows)
        for bad in [row % 3 == 2]
    ]


class Commits:
    """Takes the place of an actor's `commit`, and holds its parts and statistics by shard."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.stats: dict[int, ShardStats] = {}

    def __call__(self, shard: Shard, data: bytes, stats: ShardStats) -> None:
        self.parts[shard.index], self.stats[shard.index] = data, stats


def shard_generator(settings: dict[str, Any], part: PartSpec, commits: Commits, **more: Any) -> ShardGenerator:
    """An actor of a run of its own."""
    quarantine = Quarantine(MemoryFolder(), "run", 2, "generate")
    return ShardGenerator(
        EngineSettings(**settings), part, commits, **{"quarantine": quarantine, "coordinator": Coordinator(), **more}
    )


def shard_batch(index: int, rows: pa.Table, url: str = "in/a.parquet", first_row: int = 0) -> dict[str, Any]:
    """A shard as it travels between the stages."""
    data = np.empty(1, dtype=object)
    data[0] = to_ipc(rows)
    place = {"shard": np.array([index]), "url": np.array([url], dtype=object), "first_row": np.array([first_row])}
    return {**place, "rows": data, "prepare_seconds": np.array([0.25])}


def part_spec(**changes: Any) -> PartSpec:
    values: dict[str, Any] = {"id_column": "id", "keep": (), "optional": (), "fingerprint": FINGERPRINT, "root": "in"}
    return PartSpec(**{**values, "num_layers": LAYERS, **changes})


def part(shard: Shard, **changes: Any) -> bytes:
    """The bytes of a shard's part; its second row has the first one's id."""
    ids = [f"row-{shard.first_row + max(row - 1, 0)}" for row in range(shard.rows)]
    rows = pa.table({"id": ids, "topic": list(range(shard.rows))})
    spec = part_spec(**changes)
    return part_bytes(part_table(rows, fake_answers(shard.rows), spec, shard), spec, shard)


def part_stats(shard: Shard, **changes: Any) -> ShardStats:
    """What the actor would count of `part`, counted here by hand."""
    good = [row for row in range(shard.rows) if row % 3 != 2]
    steps = sum(good)
    bad, error = shard.rows - len(good), "prompt is null"
    values: dict[str, Any] = {
        "shard": shard.index,
        "rows": shard.rows,
        "answers": shard.rows,
        "errors": bad,
        "prompt_tokens": 5 * len(good),
        "generated_tokens": sum(row + 1 for row in good),
        "prepare_seconds": 0.5,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
        "generate_seconds": 4.0,
        "device_seconds": 8.0,
        "money": 0.02,
        "batches": 2,
        "decode_steps": steps,
        "layer_steps": 3 * steps,
        "full_layer_steps": LAYERS * steps,
        "padded_prompt_tokens": 80,
        "padding_tokens": 20,
        "cache_bytes": 1000,
        "peak_memory_bytes": 5000,
        "started": 100.0,
        "finished": 104.0,
        "device": "cpu",
        "node": "host",
        "attempt": 1,
        "actor": "actor",
        "loaded": 90.0,
        "cut_off": len(good),
        "error_kinds": json.dumps([[error, bad, f"row-{shard.first_row + 1}", error]]) if bad else "",
    }
    return ShardStats(**{**values, **changes})


def commit_made_up_parts(shards: Iterable[Shard], folder: Folder, fingerprint: str = FINGERPRINT) -> None:
    for shard in shards:
        commit(folder, shard, part(shard, fingerprint=fingerprint), part_stats(shard), fingerprint)


def manifest_of(shards: list[Shard]) -> Manifest:
    """Of a job of these shards."""
    identity = {"schedule": {"speedup": 2.0, "num_layers": LAYERS}, "answers_version": ANSWERS_VERSION}
    rows: dict[str, int] = {}
    for shard in shards:
        rows[shard.url] = rows.get(shard.url, 0) + shard.rows
    files = [InputFile(url, 1, "1", (count,), (1,)) for url, count in rows.items()]
    return Manifest(FINGERPRINT, identity, Batching(5, 1, 1, 1, 1), files, shards, pa.schema([]))


SHARDS = [Shard(0, "in/a.parquet", 0, 4), Shard(1, "in/a.parquet", 4, 5), Shard(2, "in/b.parquet", 0, 1)]
MANIFEST = manifest_of(SHARDS)
COUNTED = [  # statistics that a part shows
    *("shard", "rows", "answers", "errors", "prompt_tokens", "generated_tokens"),
    *("decode_steps", "layer_steps", "full_layer_steps", "stopped", "cut_off", "error_kinds", "label_counts"),
]


def finish(folder: Folder, manifest: Manifest) -> Totals:
    """The end of a job whose shards are committed."""
    totals = finalize(folder, manifest)
    write_success(folder, manifest, totals)
    return totals


def to_table(shards: Iterable[ShardStats]) -> pa.Table:
    """Return the statistics of shards, as a job that has committed them holds them."""
    return pa.Table.from_pylist([vars(shard) for shard in shards], schema=STATS_SCHEMA)
