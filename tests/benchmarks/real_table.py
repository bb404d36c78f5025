"""One table and one chart of a job's evidence: quality against clock, of every line of its evaluations.

    .venv/bin/python tests/benchmarks/real_table.py {text,labels,groups,summaries} ADAPTER [adapted] [measured] [paper]

Reads work/real/<name>/evaluate-*/, writes table.md and table.json in work/real/<name>, and prints the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from ideal import Least, Shape, least, taken_off
from real_data import JOBS, WORK
from real_model import values_stated
from roofline import Ceilings, measure

from actors.engine.model.loading import Checkpoint, inspect, with_adapter
from pipeline.config.evaluate import EvalConfig
from pipeline.config.load import load_config
from pipeline.learn.evaluate.intervals import SAMPLES, SEED, interval, resampled_sums
from pipeline.learn.evaluate.metrics import Array
from pipeline.learn.evaluate.results import answers_file

METRICS = {"text": "bleu", "labels": "exact_match", "groups": "exact_match", "summaries": "rouge_l"}
TITLES = {"bleu": "BLEU", "exact_match": "accuracy %", "rouge_l": "ROUGE-L"}
LINES = {"adapted": "adapted", "measured": "unadapted, measured order", "paper": "unadapted, paper's order"}
OF_PROMPT_AND_FALL = ("horizon", "decay", "prompt")


@dataclass
class Row:
    """A line of the table.

    kind: paper, measured, adapted or dense. values: evaluate's. stated: [N, 2] of each row the slot values that its
    answer states word for word, and all of its prompt; None for other jobs. full: the line of 1x over the same rows;
    None for that line itself.
    """

    kind: str
    values: dict[str, Any]
    work: Least | None
    stated: Array | None
    full: Row | None

    @property
    def ideal(self) -> tuple[float, float] | None:
        """Ideal speed-ups of the whole run and of its decode steps; None for another model."""
        full = self.full or self
        if self.work is None or full.work is None:
            return None
        seconds, decode_seconds = full.values["seconds"], full.values["decode_seconds"]
        whole, decode = taken_off(seconds - decode_seconds, decode_seconds, full.work, self.work)
        return seconds / whole, decode_seconds / decode if decode else 1.0

    def values_stated(self) -> dict[str, float]:
        """Percent of the slot values that are stated; points lost against 1x, with their interval, as evaluate's."""
        if self.stated is None:
            return {}
        both = np.concatenate([self.stated, (self.full or self).stated], axis=1)
        sums = np.concatenate([both.sum(axis=0)[None], resampled_sums(both, SAMPLES, SEED)])
        own, full = 100 * sums[:, 0] / sums[:, 1], 100 * sums[:, 2] / sums[:, 3]
        low, high = interval((full - own)[1:])
        names = ("values_stated", "values_stated_loss", "values_stated_loss_low", "values_stated_loss_high")
        return dict(zip(names, (float(own[0]), float((full - own)[0]), low, high), strict=True))

    @property
    def title(self) -> str:
        """The line's name for a reader."""
        if self.kind == "dense":
            return str(self.values["name"])
        return "1x" if self.values["nominal"] == 1 else f"{self.values['nominal']:g}x {LINES[self.kind]}"


def write_table(name: str, adapter: Path, lines: Sequence[str]) -> None:
    """Write table and chart of the job `name` from its evaluations `lines`, and print the table."""
    config = load_config(EvalConfig, JOBS / f"evaluate-{name}.yaml", [])
    torch.set_num_threads(config.threads or torch.get_num_threads())
    print("measuring the machine's ceilings", flush=True)
    ceilings = measure(getattr(torch, config.model.dtype), torch.device("cpu"))
    rows: list[Row] = []
    for kind in lines:
        rows += _rows(name, kind, config, adapter, ceilings, bool(rows))
    text = _markdown(name, rows, _cost(WORK / name))
    folder = WORK / name
    (folder / "table.md").write_text(text)
    plain = [{"kind": row.kind, **row.values_stated(), **row.values} for row in rows]
    (folder / "table.json").write_text(json.dumps(plain, indent=2) + "\n")
    print(f"{text}\n{folder / 'table.md'}")


def _rows(name: str, kind: str, config: EvalConfig, adapter: Path, ceilings: Ceilings, again: bool) -> list[Row]:
    """The lines of one evaluation; again: 1x, the same in all, is left out."""
    folder = WORK / name / f"evaluate-{kind}"
    base = inspect(config.model.path)
    checkpoint = with_adapter(base, adapter) if kind == "adapted" else base
    shape, item = Shape.of(base.config), getattr(torch, config.model.dtype).itemsize
    rows = []
    for values in json.loads((folder / "table.json").read_text()):
        answers = pq.read_table(folder / answers_file(values["name"])).to_pylist()
        lengths = [(len(_ids(answer["prompt"])), answer["generated_tokens"]) for answer in answers]
        work = None
        if values["nominal"] is not None:
            schedule = _schedule(checkpoint, kind, adapter, values["nominal"])
            work = least(lengths, schedule, shape, ceilings, item, values["batch"])
        stated = _stated(name, [answer["answer"] or "" for answer in answers])
        full = rows[0] if rows else None  # evaluate's first line is 1x
        rows.append(Row(kind if values["nominal"] is not None else "dense", values, work, stated, full))
    return rows[1:] if again else rows


def _schedule(checkpoint: Checkpoint, kind: str, adapter: Path, nominal: float) -> Any:
    """The schedule of a line, built as `evaluate` built it."""
    return checkpoint.schedule({"speedup": nominal} | unadapted_schedule(kind, adapter))


def unadapted_schedule(kind: str, adapter: Path) -> dict[str, Any]:
    """The keys of the schedule of a line that the adapter was trained for; the order only if `kind` is measured."""
    keys = {"adapted": (), "paper": OF_PROMPT_AND_FALL, "measured": (*OF_PROMPT_AND_FALL, "keep_order", "warmup")}[kind]
    stored = json.loads((adapter / "skipdecode.json").read_text())
    return {key: stored[key] for key in keys if key in stored}


def _ids(prompt: Any) -> list[int]:
    ids: list[int] = json.loads(prompt) if isinstance(prompt, str) else list(prompt)
    return ids


def _stated(name: str, texts: list[str]) -> Array | None:
    """See `Row`."""
    if name != "text":
        return None
    prompts = pq.read_table(WORK / name / "test.parquet", columns=["text"])["text"].to_pylist()[: len(texts)]
    return np.array([values_stated([prompt], [text]) for prompt, text in zip(prompts, texts, strict=True)], dtype=float)


def _cost(folder: Path) -> dict[str, float]:
    """Seconds of the adapter's training with its full-depth answers, and of healing; of what was measured here."""
    cost: dict[str, float] = {}
    if (folder / "adapt" / "adapt.json").is_file():
        seconds = json.loads((folder / "adapt" / "adapt.json").read_text())["seconds"]
        cost["tune"] = float(seconds["tune"])
        cost["adapt"] = float(sum(seconds[stage] for stage in ("sample", "answers", "tune")))
    if (folder / "healing.json").is_file():
        cost["heal"] = float(json.loads((folder / "healing.json").read_text())["seconds"])
    return cost


def _markdown(name: str, rows: Sequence[Row], cost: dict[str, float]) -> str:
    metric = METRICS[name]
    stated = " values stated | loss |" if name == "text" else ""
    head = (
        f"| line | layer ratio | wall clock, whole | ideal | decode | ideal | {TITLES[metric]} | loss against 1x |"
        f"{stated} ROUGE-L to 1x | same answer % | token KL, nats | break-even rows |"
    )
    lines = [head, "|---" + "|---:" * (head.count("|") - 2) + "|"]
    full = rows[0]
    count = full.values["rows"]
    for row in rows:
        values = row.values
        ideals = ["-", "-"] if row.ideal is None else [f"{speedup:.2f}x" for speedup in row.ideal]
        loss = "-"
        facts = row.values_stated()
        of_facts = [f"{facts['values_stated']:.1f}%", "-"] if facts else []
        if row is not full:
            loss = _loss(values, metric)
            of_facts = [*of_facts[:1], _loss(facts, "values_stated")] if facts else []
        saved = (full.values["seconds"] - values["seconds"]) / count
        pays = row.kind == "adapted" and row is not full and "adapt" in cost
        even = "-" if not pays else f"{cost['adapt'] / saved:,.0f}" if saved > 0 else "never"
        cells = [
            row.title,
            "-" if values["layer_ratio"] is None else f"{values['layer_ratio']:.2f}x",
            f"{values['wall_clock']:.2f}x",
            ideals[0],
            f"{values['decode_wall_clock']:.2f}x",
            ideals[1],
            f"{values[metric]:.1f}",
            loss,
            *of_facts,
            *(f"{values[key]:.1f}" for key in ("agreement_rouge_l", "agreement_exact")),
            f"{values['token_kl']:.3f}",
            even,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"{count} rows, batches of up to {full.values['batch']}; brackets: 95% intervals, paired bootstrap."]
    fewer = {row.values["rows"] for row in rows} - {count}
    if fewer:
        notes.append(f"Unadapted: {min(fewer)} rows.")
    if name in ("labels", "groups"):
        notes.append(_nearest(name, count))
    if "tune" in cost:
        notes.append(
            f"Training of the adapter {cost['tune'] / 60:.1f} min, with its answers {cost['adapt'] / 60:.1f} min."
        )
    if "heal" in cost:
        notes.append(f"Healing of the pruned model {cost['heal'] / 60:.1f} min.")
    return "\n".join([*lines, "", " ".join(notes), ""])


def _loss(values: Mapping[str, float], metric: str) -> str:
    low, high = values[f"{metric}_loss_low"], values[f"{metric}_loss_high"]
    return f"{values[f'{metric}_loss']:+.1f} [{low:.1f}, {high:.1f}]"


def _nearest(name: str, count: int) -> str:
    """The accuracy of no model at all: the label of the most similar training question."""
    rows = pq.read_table(WORK / name / "test.parquet", columns=["references", "nearest"]).to_pylist()[:count]
    share = sum(row["nearest"] in row["references"] for row in rows) / len(rows)
    labels = {row["references"][0] for row in rows}
    return f"The most similar question's label alone is right in {100 * share:.1f}%, chance {100 / len(labels):.1f}%."


if __name__ == "__main__":
    write_table(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(LINES))
