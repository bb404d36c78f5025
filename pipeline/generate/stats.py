"""Statistics: of one shard, as its commit record holds them, and added up over a job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from actors.engine.errors import UserError


def _unit(unit: str, how: str = "sum") -> Any:
    """A field with its unit and how shards add up: sum, max, or none."""
    return field(metadata={"unit": unit, "how": how})


@dataclass(frozen=True)
class ShardStats:
    """One shard's numbers. Those of an adopted part, whose record was lost, hold what the part itself tells."""

    shard: int = _unit("index", "none")
    rows: int = _unit("input rows")
    answers: int = _unit("output rows: each sample of an input row is one")
    errors: int = _unit("rows")
    duplicate_ids: int = _unit("rows whose id another row of the shard has")
    prompt_tokens: int = _unit("tokens of the prompts that were answered")
    shared_prompt_tokens: int = _unit("prompt tokens, of every sample, that another row's pass served")
    generated_tokens: int = _unit("tokens")
    prepare_seconds: float = _unit("s")
    prefill_seconds: float = _unit("s")
    decode_seconds: float = _unit("s")
    generate_seconds: float = _unit("s, all of the actor's work on the shard")
    commit_seconds: float = _unit("s")
    tokens_per_second: float = _unit("generated tokens ÷ generate_seconds", "none")
    batches: int = _unit("batches")
    padding_fraction: float = _unit("share of the prefill's columns", "none")
    mean_depth: float = _unit("layers a decode step", "none")
    decode_steps: int = _unit("tokens that were an input to decode")
    layer_steps: int = _unit("layers run over decode steps")
    full_layer_steps: int = _unit("layers full depth would have run")
    padded_prompt_tokens: int = _unit("tokens computed in prefill, padding included")
    cache_bytes: int = _unit("bytes of the largest batch's cache", "max")
    peak_memory_bytes: int = _unit("bytes", "max")
    out_of_memory: int = _unit("times that memory ran out: the rest ran again in fewer rows")
    started: float = _unit("s since 1970", "none")
    finished: float = _unit("s since 1970", "none")
    device: str = _unit("name", "none")
    node: str = _unit("host name, and the beginning of the Ray node's id", "none")
    attempt: int = _unit("1; 2 if the actor had been restarted", "none")
    adopted: bool = _unit("the record was lost and has been made again", "none")

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> ShardStats:
        """From a commit record; KeyError, TypeError or ValueError if it is not one."""
        for one in fields(cls):
            kind, value = str(one.type), values[one.name]
            if type(value).__name__ not in (("int", "float") if kind == "float" else (kind,)):
                raise TypeError(f"{one.name} is no {kind}")
            if kind in ("int", "float") and not (0 <= value < 2**63 and math.isfinite(value)):
                raise UserError(f"{one.name} is out of range")
        return cls(**{one.name: values[one.name] for one in fields(cls)})

    @classmethod
    def of_part(cls, shard: int, part: pa.Table, num_layers: int) -> ShardStats:
        """What a part itself tells: counts; times, memory and device are unknown and left at zero."""
        steps = [max(count - 1, 0) for count in part["generated_tokens"].to_pylist()]
        depths = part["mean_depth"].to_pylist()
        layer_steps = round(sum(count * (depth or 0.0) for count, depth in zip(steps, depths, strict=True)))
        known = {
            "shard": shard,
            "rows": input_rows(part),
            "answers": part.num_rows,
            "errors": part.num_rows - part["error"].null_count,
            "duplicate_ids": duplicate_ids(part),
            "prompt_tokens": sum(_first_samples(part.filter(pc.is_null(part["error"])))["prompt_tokens"].to_pylist()),
            "generated_tokens": sum(part["generated_tokens"].to_pylist()),
            "mean_depth": layer_steps / sum(steps) if sum(steps) else 0.0,
            "decode_steps": sum(steps),
            "layer_steps": layer_steps,
            "full_layer_steps": num_layers * sum(steps),
            "adopted": True,
        }
        unknown = {"int": 0, "float": 0.0, "str": "", "bool": False}
        return cls(**{one.name: known.get(one.name, unknown[str(one.type)]) for one in fields(cls)})


def input_rows(part: pa.Table) -> int:
    """Input rows that a part answers."""
    return int(_first_samples(part).num_rows)


def duplicate_ids(part: pa.Table) -> int:
    """Input rows whose id another, earlier row of the part has."""
    return int(input_rows(part) - pc.count_distinct(part["id"], mode="all").as_py())


def _first_samples(part: pa.Table) -> pa.Table:
    return part.filter(pc.equal(part["sample_index"], 0))


@dataclass(frozen=True)
class Totals:
    """A job's numbers over all of its shards, this run's and earlier ones'."""

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
        """Mean d(t) over the decode steps that were run."""
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
        """Plain values, the derived ones too."""
        return {
            **asdict(self),
            "mean_depth": self.mean_depth,
            "layer_ratio": self.layer_ratio,
            "padding_fraction": self.padding_fraction,
        }


def add_up(shards: pa.Table) -> Totals:
    """Totals over shards, one a row as in `STATS_SCHEMA`."""
    padding = pc.multiply(shards["padding_fraction"], pc.cast(shards["padded_prompt_tokens"], pa.float64()))
    values: dict[str, Any] = {"shards": shards.num_rows, "padding_tokens": round(pc.sum(padding).as_py() or 0.0)}
    for one in fields(ShardStats):
        if one.metadata["how"] != "none":
            total = pc.max(shards[one.name]) if one.metadata["how"] == "max" else pc.sum(shards[one.name])
            values[one.name] = total.as_py() or 0
    return Totals(**values)


_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
STATS_SCHEMA = pa.schema(
    [pa.field(one.name, _TYPES[str(one.type)], metadata={"unit": one.metadata["unit"]}) for one in fields(ShardStats)]
)


def to_table(shards: Iterable[ShardStats]) -> pa.Table:
    """One row a shard, in their order; units are in the columns' metadata."""
    listed = list(shards)
    columns = {one.name: [getattr(shard, one.name) for shard in listed] for one in fields(ShardStats)}
    return pa.table(columns, schema=STATS_SCHEMA)
