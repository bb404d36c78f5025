"""Statistics of one shard, as in its commit record, and their totals over a job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def _unit(unit: str, total: str = "sum") -> Any:
    """A field with its unit and the total over shards: sum, max, or none."""
    return field(metadata={"unit": unit, "total": total})


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one shard. In a rebuilt record only the values that its part holds are set."""

    shard: int = _unit("index", "none")
    rows: int = _unit("input rows")
    answers: int = _unit("output rows: each sample of an input row is one")
    errors: int = _unit("rows")
    duplicate_ids: int = _unit("rows that share their id with another row of the shard")
    prompt_tokens: int = _unit("tokens of the prompts that were answered")
    shared_prompt_tokens: int = _unit("prompt tokens, over all samples, computed once for several rows")
    generated_tokens: int = _unit("tokens")
    prepare_seconds: float = _unit("s")
    prefill_seconds: float = _unit("s")
    decode_seconds: float = _unit("s")
    generate_seconds: float = _unit("s of the actor on the shard")
    commit_seconds: float = _unit("s")
    tokens_per_second: float = _unit("generated tokens ÷ generate_seconds", "none")
    batches: int = _unit("batches")
    padding_fraction: float = _unit("share of prefill tokens", "none")
    mean_depth: float = _unit("layers per decode step", "none")
    decode_steps: int = _unit("tokens that were an input to decode")
    layer_steps: int = _unit("layers run over decode steps")
    full_layer_steps: int = _unit("layers run at full depth")
    padded_prompt_tokens: int = _unit("tokens computed in prefill, padding included")
    cache_bytes: int = _unit("bytes of the largest batch's cache", "max")
    peak_memory_bytes: int = _unit("bytes", "max")
    out_of_memory: int = _unit("batches halved because memory ran out")
    started: float = _unit("s since 1970", "none")
    finished: float = _unit("s since 1970", "none")
    device: str = _unit("name", "none")
    node: str = _unit("host name and start of the Ray node's id", "none")
    attempt: int = _unit("1; 2 after a restart of the actor", "none")
    rebuilt: bool = _unit("the record was lost and rebuilt from the part", "none")

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> ShardStats:
        """Statistics of a commit record. Raises KeyError, TypeError or ValueError for a damaged one."""
        for item in fields(cls):
            kind, value = str(item.type), values[item.name]
            if type(value).__name__ not in (("int", "float") if kind == "float" else (kind,)):
                raise TypeError(f"{item.name} is no {kind}")
            if kind in ("int", "float") and not (0 <= value < 2**63 and math.isfinite(value)):
                raise ValueError(f"{item.name} is out of range")
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    @classmethod
    def of_part(cls, shard: int, part: pa.Table, num_layers: int) -> ShardStats:
        """Statistics of a rebuilt record: counts from the part; times, memory and device are unknown and zero."""
        steps = [max(count - 1, 0) for count in part["generated_tokens"].to_pylist()]
        depths = part["mean_depth"].to_pylist()
        layer_steps = round(sum(count * (depth or 0.0) for count, depth in zip(steps, depths, strict=True)))
        known = {
            "shard": shard,
            "rows": input_rows(part),
            "answers": part.num_rows,
            "errors": error_rows(part),
            "duplicate_ids": duplicate_ids(part),
            "prompt_tokens": answered_prompt_tokens(part),
            "generated_tokens": sum(part["generated_tokens"].to_pylist()),
            "mean_depth": layer_steps / sum(steps) if sum(steps) else 0.0,
            "decode_steps": sum(steps),
            "layer_steps": layer_steps,
            "full_layer_steps": num_layers * sum(steps),
            "rebuilt": True,
        }
        unknown = {"int": 0, "float": 0.0, "str": "", "bool": False}
        return cls(**{item.name: known.get(item.name, unknown[str(item.type)]) for item in fields(cls)})


def input_rows(part: pa.Table) -> int:
    """Number of input rows that a part answers."""
    return int(_first_samples(part).num_rows)


def error_rows(part: pa.Table) -> int:
    """Input rows with an error in any of their answers."""
    row = pc.cumulative_sum(pc.cast(pc.equal(part["sample_index"], 0), pa.int64()))
    return int(pc.count_distinct(row.filter(pc.is_valid(part["error"]))).as_py())


def answered_prompt_tokens(part: pa.Table) -> int:
    """Prompt tokens of the input rows whose first answer has no error."""
    return sum(_first_samples(part.filter(pc.is_null(part["error"])))["prompt_tokens"].to_pylist())


def duplicate_ids(part: pa.Table) -> int:
    """Input rows whose id an earlier row of the part has."""
    return int(input_rows(part) - pc.count_distinct(part["id"], mode="all").as_py())


def _first_samples(part: pa.Table) -> pa.Table:
    return part.filter(pc.equal(part["sample_index"], 0))


@dataclass(frozen=True)
class Totals:
    """Statistics of a job over all of its shards, of this run and earlier runs."""

    shards: int
    rows: int
    answers: int
    errors: int
    duplicate_ids: int
    prompt_tokens: int
    shared_prompt_tokens: int
    generated_tokens: int
    prepare_seconds: float
    prefill_seconds: float
    decode_seconds: float
    generate_seconds: float
    commit_seconds: float
    batches: int
    decode_steps: int
    layer_steps: int
    full_layer_steps: int
    padded_prompt_tokens: int
    cache_bytes: int
    peak_memory_bytes: int
    out_of_memory: int
    padding_tokens: int

    @property
    def mean_depth(self) -> float | None:
        """Mean d(t) over the decode steps."""
        return self.layer_steps / self.decode_steps if self.decode_steps else None

    @property
    def layer_ratio(self) -> float | None:
        """Layers of full depth ÷ layers run, over decode steps."""
        return self.full_layer_steps / self.layer_steps if self.layer_steps else None

    @property
    def padding_fraction(self) -> float:
        """Share of prefill that was padding."""
        return self.padding_tokens / self.padded_prompt_tokens if self.padded_prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the derived ones."""
        return {
            **asdict(self),
            "mean_depth": self.mean_depth,
            "layer_ratio": self.layer_ratio,
            "padding_fraction": self.padding_fraction,
        }


def add_up(shards: pa.Table) -> Totals:
    """Totals over shards, one per row of a table as in `STATS_SCHEMA`."""
    padding = pc.multiply(shards["padding_fraction"], pc.cast(shards["padded_prompt_tokens"], pa.float64()))
    values: dict[str, Any] = {"shards": shards.num_rows, "padding_tokens": round(pc.sum(padding).as_py() or 0.0)}
    for item in fields(ShardStats):
        if item.metadata["total"] != "none":
            total = pc.max(shards[item.name]) if item.metadata["total"] == "max" else pc.sum(shards[item.name])
            values[item.name] = total.as_py() or 0
    return Totals(**values)


_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
STATS_SCHEMA = pa.schema(
    [
        pa.field(item.name, _TYPES[str(item.type)], metadata={"unit": item.metadata["unit"]})
        for item in fields(ShardStats)
    ]
)


def to_table(shards: Iterable[ShardStats]) -> pa.Table:
    """One row per shard, in their order; the columns' metadata holds their units."""
    listed = list(shards)
    columns = {item.name: [getattr(shard, item.name) for shard in listed] for item in fields(ShardStats)}
    return pa.table(columns, schema=STATS_SCHEMA)
