"""Computes the statistics of a shard for its commit record, and the totals over all shards of a job."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from actors.engine.errors import flat
from pipeline.answer.answer_checks import MOST_COMMON, count_answers, warnings

log = logging.getLogger(__name__)
KINDS = 3  # maximum number of kinds of errors in a shard's record; answers with other kinds are only counted
MOST_LABELS = 256  # maximum number of distinct labels that are counted in a shard
KIND_CHARS, EXAMPLE_CHARS, ID_CHARS = 160, 300, 80
_PLACE = re.compile(r" \(row \d+ of [^\n]*, counted from 0\)$")  # see `text_files.py`
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{16,}\b|\d[\d,.]*\d|\d")


def _unit(unit: str, default: Any = 0, total: str = "sum") -> Any:
    """Declare a field with a unit. total: how to combine the values of all shards: "sum", "max" or "none"."""
    return field(default=default, metadata={"unit": unit, "total": total})


@dataclass(frozen=True)
class Counts:
    """Statistics of a shard that can be combined over all shards of a job."""

    rows: int = _unit("input rows")
    answers: int = _unit("output rows: one for each sample of an input row")
    errors: int = _unit("rows")
    prompt_tokens: int = _unit("tokens of the prompts that were answered")
    control_tokens: int = _unit("control tokens that were parsed in row values, see input.special_tokens")
    shared_prompt_tokens: int = _unit("prompt tokens whose keys and values were reused instead of computed again")
    generated_tokens: int = _unit("tokens")
    prepare_seconds: float = _unit("s", 0.0)
    prefill_seconds: float = _unit("s", 0.0)
    decode_seconds: float = _unit("s", 0.0)
    generate_seconds: float = _unit("s in which the actor worked on the shard", 0.0)
    commit_seconds: float = _unit("s", 0.0)
    device_seconds: float = _unit("generate_seconds × GPUs of the actor, or × 1 on CPUs", 0.0)
    money: float = _unit("device_seconds × price_per_hour ÷ 3600; 0 without a price", 0.0)
    batches: int = _unit("batches")
    decode_steps: int = _unit("tokens that were the input of a decode step")
    layer_steps: int = _unit("layers run, summed over decode steps")
    full_layer_steps: int = _unit("layers that full depth would have run, summed over decode steps")
    padded_prompt_tokens: int = _unit("tokens computed in prefill, padding included")
    padding_tokens: int = _unit("tokens computed in prefill that are padding")
    cache_bytes: int = _unit("bytes of the largest batch's cache", total="max")
    peak_memory_bytes: int = _unit("bytes", total="max")
    out_of_memory: int = _unit("batches halved because memory ran out")
    stopped: int = _unit("answers that ended at a stop token or stop string, or when only one choice was left")
    cut_off: int = _unit("answers that ended at a length limit")
    empty_answers: int = _unit("answers without an error that are empty")
    repeating_answers: int = _unit("answers that repeat the same words, see `answer_checks.repeats_itself`")


@dataclass(frozen=True)
class ShardStats(Counts):
    """Statistics of one shard. A lost record is rebuilt from the part (output file), with fewer values."""

    shard: int = _unit("index", total="none")
    overlaps: bool = _unit("whether its rows shared steps with another shard's", False, "none")
    started: float = _unit("s since 1970", 0.0, "none")
    finished: float = _unit("s since 1970", 0.0, "none")
    device: str = _unit("name", "", "none")
    node: str = _unit("host name, and first characters of the Ray node's id", "", "none")
    attempt: int = _unit("1, or 2 if the actor has been restarted", 0, "none")
    rebuilt: bool = _unit("whether the record was lost and rebuilt from the part", False, "none")
    actor: str = _unit("id of the actor, which stays the same after a restart", "", "none")
    loaded: float = _unit("time at which the actor had loaded its model, s since 1970", 0.0, "none")
    error_kinds: str = _unit("JSON of `error_kinds`", "", "none")
    label_counts: str = _unit("JSON of `label_counts`", "", "none")
    common_answers: str = _unit("JSON of {text: number of answers} for the most frequent texts", "", "none")
    prompt_ends: str = _unit("JSON list of the ends of the first prompts, as the model read them", "", "none")

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> ShardStats:
        """Read statistics from a commit record. Raises TypeError if a field is missing or unknown.

        The record's digest protects the values, which `of_run` has checked.
        """
        if missing := {item.name for item in fields(cls)} - values.keys():
            raise TypeError(f"no value of {', '.join(sorted(missing))}")
        return cls(**values)

    @classmethod
    def of_run(cls, shard: int, part: pa.Table, measured: Mapping[str, Any]) -> ShardStats:
        """Compute statistics from a shard's part, and add the values that the actor has measured.

        measured: field -> value, or a function that returns the value. If a value cannot be computed or recorded, its
        field keeps the default, and a warning is logged.
        """
        values = {**measured, **_counts(part)}
        known: dict[str, Any] = {"shard": shard}
        for item in fields(cls):
            value = values.get(item.name)
            try:
                value = value() if callable(value) else value
                if value is not None:
                    known[item.name] = _checked(item, value)
            except Exception as error:  # a statistic of any kind must not fail a finished shard
                log.warning("shard %d: statistic %s is not recorded: %s", shard, item.name, flat(error))
        return cls(**known)

    @classmethod
    def of_part(cls, shard: int, part: pa.Table, num_layers: int) -> ShardStats:
        """Rebuild a lost record from the shard's part. Times, memory and device keep their defaults."""
        tokens, depths = (part[name].to_pylist() for name in ("generated_tokens", "mean_depth"))
        steps = [max(count - 1, 0) for count in tokens]
        layer_steps = round(sum(count * (depth or 0.0) for count, depth in zip(steps, depths, strict=True)))
        known = {
            "generated_tokens": sum(tokens),
            "decode_steps": sum(steps),
            "layer_steps": layer_steps,
            "full_layer_steps": num_layers * sum(steps),
            "rebuilt": True,
        }
        return cls.of_run(shard, part, known)

    @property
    def warnings(self) -> list[str]:
        """Warnings that too many answers of the shard look bad, see `answer_checks.warnings`."""
        return warnings(asdict(self), json.loads(self.common_answers or "{}"), self.stopped + self.cut_off)


def _checked(item: Field[Any], value: Any) -> Any:
    """Return `value` if a record can store it in the field `item`. Raises TypeError or ValueError if not."""
    kind = str(item.type)
    if kind == "float" and isinstance(value, float):
        value = float(value)  # numpy's float64 is a subclass of float
    if type(value).__name__ not in (("int", "float") if kind == "float" else (kind,)):
        raise TypeError(f"{item.name} is not of type {kind}")
    if kind in ("int", "float") and not (0 <= value < 2**63 and math.isfinite(value)):
        raise ValueError(f"{item.name} is out of range")
    return value


def _counts(part: pa.Table) -> dict[str, Any]:
    """Return those fields of `ShardStats` that a part determines. If a value may fail to compute, return a function."""
    first = part.filter(pc.equal(part["sample_index"], 0))
    answered = part.filter(pc.not_equal(part["finish_reason"], "error"))
    reasons = part["finish_reason"].to_pylist()

    @cache
    def checks() -> dict[str, Any]:
        texts = [text or "" for text in answered["generated_text"].to_pylist()]
        return count_answers(texts)

    return {
        "rows": first.num_rows,
        "answers": part.num_rows,
        "errors": error_rows(part),
        "prompt_tokens": lambda: pc.sum(first.filter(pc.field("generated_tokens") > 0)["prompt_tokens"]).as_py() or 0,
        "stopped": reasons.count("stop"),
        "cut_off": reasons.count("length"),
        "error_kinds": lambda: error_kinds(part),
        "label_counts": lambda: label_counts(part),
        **{name: lambda name=name: checks()[name] for name in ("empty_answers", "repeating_answers", "common_answers")},
    }


def error_rows(part: pa.Table) -> int:
    """Return the number of input rows that have an error in at least one answer."""
    row = pc.cumulative_sum(pc.cast(pc.equal(part["sample_index"], 0), pa.int64()))
    return int(pc.count_distinct(row.filter(pc.is_valid(part["error"]))).as_py())


def label_counts(part: pa.Table) -> str:
    """Return JSON of {label: number of answers}, most frequent label first. Return "" if the job has no choices.

    Also return "" for more than `MOST_LABELS` labels, which are possible if each row lists its labels.
    """
    if "choice_probability" not in part.column_names:
        return ""
    counts = Counter(part["generated_text"].filter(part["choice_probability"].is_valid()).to_pylist())
    return json.dumps(dict(counts.most_common())) if 0 < len(counts) <= MOST_LABELS else ""


def kind_of(error: str) -> str:
    """Return an error message without the parts that differ between rows: quoted texts, numbers and digests."""
    return _VARIABLE.sub("…", _PLACE.sub("", error)[:EXAMPLE_CHARS])[:KIND_CHARS]


def id_value(row_id: pa.Scalar) -> Any:
    """Return an id as a Python value; "?" if there is no such value, as for a date after the year 9999."""
    try:
        return row_id.as_py()
    except (ValueError, OverflowError):
        return "?"


def error_kinds(part: pa.Table) -> str:
    """Return the most frequent kinds of errors as JSON: a list of [kind, number of answers, example's id, error text].

    At most `KINDS` kinds are listed. A last entry with empty texts counts the other kinds. Without errors, return "".
    """
    bad = part.select(["id", "error"]).filter(part["error"].is_valid())
    errors = bad["error"].to_pylist()
    kinds = [kind_of(error) for error in errors]
    listed: list[list[str | int]] = []
    for kind, count in Counter(kinds).most_common(KINDS):
        place = kinds.index(kind)
        row_id = id_value(bad["id"][place])
        shown = "" if row_id is None else str(row_id)[:ID_CHARS]
        listed.append([kind, count, shown, errors[place][:EXAMPLE_CHARS]])
    rest = len(kinds) - sum(int(count) for _, count, *_ in listed)
    return json.dumps([*listed, ["", rest, "", ""]] if rest else listed) if listed else ""


@dataclass(frozen=True)
class Totals(Counts):
    """Totals over all committed shards of a job, from this run and from earlier runs."""

    shards: int = 0
    common_answers: dict[str, int] = field(default_factory=dict)  # frequent text -> number of answers with this text
    labels: dict[str, int] = field(default_factory=dict)  # label -> number of answers, most frequent first

    @property
    def warnings(self) -> list[str]:
        """Warnings that too many answers look bad, see `answer_checks.warnings`."""
        return warnings(asdict(self), self.common_answers, self.stopped + self.cut_off)

    @property
    def unnamed_labels(self) -> int:
        """Number of answers that `labels` does not count, because their shards have too many labels."""
        return self.stopped + self.cut_off - sum(self.labels.values()) if self.labels else 0

    @property
    def mean_depth(self) -> float | None:
        """Mean number of layers per decode step; None without decode steps."""
        return ratio(self.layer_steps, self.decode_steps)

    @property
    def layer_ratio(self) -> float | None:
        """Ratio over all decode steps: layers that full depth would run ÷ layers that ran."""
        return ratio(self.full_layer_steps, self.layer_steps)

    @property
    def padding_fraction(self) -> float:
        """Share of padding among the tokens computed in prefill."""
        return ratio(self.padding_tokens, self.padded_prompt_tokens) or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return fields, most properties, and costs of a million generated tokens (None without tokens or price)."""
        return {
            **asdict(self),
            "warnings": self.warnings,
            "mean_depth": self.mean_depth,
            "layer_ratio": self.layer_ratio,
            "device_seconds_per_million_tokens": ratio(1e6 * self.device_seconds, self.generated_tokens),
            "money_per_million_tokens": ratio(1e6 * self.money, self.generated_tokens) or None,
            "padding_fraction": self.padding_fraction,
        }


def ratio(part: float, total: float) -> float | None:
    """Return part ÷ total; None if the total is 0."""
    return part / total if total else None


def add_up(shards: pa.Table) -> Totals:
    """Return the totals over all shards. shards: one row for each shard, with the columns of `STATS_SCHEMA`."""
    labels, common = Counter[str](), Counter[str]()
    for counter, column in ((labels, "label_counts"), (common, "common_answers")):
        for text in filter(None, shards[column].to_pylist()):
            counter.update(json.loads(text))
    values: dict[str, Any] = {
        "shards": shards.num_rows,
        "common_answers": dict(_most_frequent_first(common)[:MOST_COMMON]),
        "labels": dict(_most_frequent_first(labels)),
    }
    for item in fields(Counts):
        total = pc.max(shards[item.name]) if item.metadata["total"] == "max" else pc.sum(shards[item.name])
        values[item.name] = total.as_py() or 0
    return Totals(**values)


def _most_frequent_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


_TYPES = {"int": "int64", "float": "float64", "str": "string", "bool": "bool"}
STATS_SCHEMA = pa.schema(
    [
        pa.field(item.name, pa.type_for_alias(_TYPES[str(item.type)]), metadata={"unit": item.metadata["unit"]})
        for item in fields(ShardStats)
    ]
)


RATES = {  # column -> numerator, denominator, unit
    "tokens_per_second": ("generated_tokens", "generate_seconds", "generated tokens ÷ generate_seconds"),
    "rows_per_second": ("rows", "generate_seconds", "rows ÷ generate_seconds"),
    "padding_fraction": ("padding_tokens", "padded_prompt_tokens", "padding as a share of the tokens of prefill"),
    "mean_depth": ("layer_steps", "decode_steps", "layers per decode step"),
}


def with_rates(shards: pa.Table) -> pa.Table:
    """Return shards, which have the columns of `STATS_SCHEMA`, with the columns of `RATES`.

    A rate is null if its denominator is 0, or if it is one per second and the shard overlaps with another one.
    """
    for name, (part, total, unit) in RATES.items():
        value, divisor = (pc.cast(shards[column], pa.float64()) for column in (part, total))
        unknown = pc.equal(divisor, 0)
        if total == "generate_seconds":
            unknown = pc.or_(unknown, shards["overlaps"])
        rates = pc.divide(value, pc.if_else(unknown, None, divisor))
        shards = shards.append_column(pa.field(name, pa.float64(), metadata={"unit": unit}), rates)
    return shards


def slowest_shards(shards: pa.Table, count: int) -> pa.Table:
    """Return at most `count` shards: those that took longest, slowest first."""
    return shards.sort_by([("generate_seconds", "descending"), ("shard", "ascending")]).slice(0, count)
