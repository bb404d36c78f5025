"""The evidence on a published model for one job: quality against clock, unadapted, adapted, and of a pruned model.

    .venv/bin/python tests/benchmarks/real_evidence.py NAME [--rows N] [--steps N] [--sample N]

NAME: text, labels, groups, emotion, summaries, gemma-text or gemma-labels. Steps: model, prompts, speed adapter, a
model of half the layers healed on the same answers (not of Gemma), scores, table and chart in work/real/<name>. Each
is skipped if its result is there, so that the same command goes on where it was stopped. A speed adapter in
configs/real/<name>-adapter takes the place of the trained one. With --rows, --steps and --sample: a few rows to
score, training steps and answers to learn from, to try the commands.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from ideal import Ceilings, Least, Shape, least, measure, taken_off
from real_data import JOBS, MODEL, WORK, choose_best, write_rows
from real_model import ADAPTER, make_model, values_stated
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.answers import Prompt
from actors.engine.model.families import family_of
from actors.engine.model.loading import inspect, with_adapter
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config
from pipeline.learn.adapt.pairs import read_pairs, training_pairs
from pipeline.learn.score.lines import Evaluation, clock_ratio
from pipeline.learn.score.metrics import SAMPLES, SEED, Array, interval, resampled_sums
from pipeline.learn.score.run import score
from pipeline.learn.speeds import variants
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.run import train

DENSE_LAYERS = 15
UNADAPTED_ROWS = 100  # their losses are large
COMMITTED = {"text": ADAPTER}  # that of `make real`
# trainings after that of configs/real/<name>.yaml, each from the adapter of the one before: job file, folder, changes
BOTH = 'input.path=["work/real/text/own.parquet", "work/real/text/recombined.parquet"]'
FURTHER: dict[str, list[tuple[str, str, list[str]]]] = {
    "text": [
        ("text-own.yaml", "adapt-own", []),
        ("text-own.yaml", "adapt-recombined", [BOTH, "adapt.rows=2351", "adapt.training.epochs=1"]),
    ],
    "labels": [("labels-further.yaml", "adapt-further", [])],
    "summaries": [("summaries.yaml", "adapt-again", ["adapt.training.max_steps=170", "adapt.training.seed=1"])],
}
# jobs whose last training learns from the best of several drawn answers: file, changes
DRAWN = {
    "text": ("text-own.yaml", [BOTH, "sampling.n=8", "output.keep=[prompt]"]),
    "summaries": ("summaries.yaml", ["sampling.n=4", "output.keep=[prompt, reference]"]),
}


@dataclass(frozen=True)
class Best:
    """The training on the chosen answers, from the adapter of the training before."""

    schedule: dict[str, Any]
    speedups: tuple[float, ...]
    training: dict[str, Any]
    dev_rows: int


BEST = {
    "text": Best(
        {"horizon": 33},
        (1.5, 2, 3),
        {"epochs": 2, "learning_rate": 0.0005, "warmup_steps": 10, "eval_steps": 70, "save_steps": 50},
        60,
    ),
    "summaries": Best(
        {"decay": "constant"},
        (1.5, 2),
        {"epochs": 1, "learning_rate": 0.0007, "warmup_steps": 5, "eval_steps": 50, "save_steps": 30},
        48,
    ),
}
ONE_SPEED = {"batch_size": 16, "speeds_per_step": 1}
HEALING = {**ONE_SPEED, "epochs": 1, "learning_rate": 0.0002, "warmup_steps": 20, "eval_steps": 100, "save_steps": 50}
MOST = 2048  # tokens of a pair that is trained on
SPEEDS = {  # speeds and rows to score
    "text": ((1, 1.5, 2, 3), 300),
    "labels": ((1, 1.5, 2, 3), 1500),
    "groups": ((1, 1.5, 2, 3), 500),
    "summaries": ((1, 1.5, 2), 100),
    "gemma-text": ((1, 2, 3), 300),
    "gemma-labels": ((1, 2, 3), 500),
    "emotion": ((1, 2, 3), 374),
}
GEMMA = ("gemma-text", "gemma-labels")  # jobs of the second model, whose weights and adapters are never committed
TEXTS = ("text", "gemma-text")
METRICS = {
    **dict.fromkeys(TEXTS, "bleu"),
    **dict.fromkeys(("labels", "groups", "emotion", "gemma-labels"), "exact_match"),
    "summaries": "rouge_l",
}
TITLES = {"bleu": "BLEU", "exact_match": "accuracy %", "rouge_l": "ROUGE-L"}
LINES = {"adapted": "adapted", "measured": "unadapted, measured order", "paper": "unadapted, paper's order"}
OF_PROMPT_AND_FALL = ("horizon", "decay", "prompt")


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=METRICS)
    parser.add_argument("--rows", type=int, help="rows to score")
    parser.add_argument("--steps", type=int, help="training steps, of the adapter and of the pruned model")
    parser.add_argument("--sample", type=int, help="answers to learn from")
    arguments = parser.parse_args()
    name, folder = arguments.name, WORK / arguments.name
    make_model("gemma3-270m" if name in GEMMA else "smollm2")
    if not (folder / "test.parquet").is_file() and not write_rows(name):
        return  # skipped, with the reason printed
    steps = [] if arguments.steps is None else [f"adapt.training.max_steps={arguments.steps}"]
    adapter = speed_adapter(name, steps, arguments.sample)
    dense = None if name in GEMMA else dense_model(name, adapter, arguments.steps)
    rows = arguments.rows or SPEEDS[name][1]
    few, others = min(rows, UNADAPTED_ROWS), {} if dense is None else {f"{DENSE_LAYERS} layers, healed": dense}
    lines = {"adapted": (rows, others), "measured": (few, {}), "paper": (few, {})}
    for kind, (count, models) in lines.items():
        if not (folder / f"evaluate-{kind}" / "table.json").is_file():
            write_lines(name, kind, adapter, count, models)
    write_table(name, adapter, list(lines))


def scoring_job(name: str, kind: str, adapter: Path) -> JobConfig:
    """The job `name` with the adapter, or without it and with a part of its schedule."""
    own = {"keep_order": "paper", **unadapted_schedule(kind, adapter)}
    changes = [f"schedule.{key}={json.dumps(value)}" for key, value in own.items()]
    if kind == "adapted":
        changes = [f"model.speed_adapter={adapter}"]
    return load_config(JobConfig, JOBS / f"{name}.yaml", ["schedule={}", "actors.threads=2", *changes])


def write_lines(name: str, kind: str, adapter: Path, count: int, others: Mapping[str, Path]) -> None:
    """Score the first `count` rows at every speed; write lines and answers into work/real/<name>/evaluate-<kind>."""
    job, folder = scoring_job(name, kind, adapter), WORK / name / f"evaluate-{kind}"
    rows = pq.read_table(WORK / name / "test.parquet").to_pylist()[:count]
    model = resolve_checkpoint(job.model, job.storage)
    spec = (model.checkpoint.spec or ScheduleSpec()).overridden(job.schedule.changes())
    prompts = [Prompt(row["prompt"], name, number) for number, row in enumerate(rows)]
    references = [row["references"] for row in rows]
    found = score(job, model, variants(spec, SPEEDS[name][0]), prompts, references, others=others)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {line: [answer.generated_text or "" for answer in each] for line, each in found.answers.items()}
    lengths = {
        line: [(len(row["prompt"]), answer.generated_tokens) for row, answer in zip(rows, each, strict=True)]
        for line, each in found.answers.items()
    }
    (folder / "answers.json").write_text(json.dumps({"texts": texts, "lengths": lengths}))
    (folder / "table.json").write_text(json.dumps(_flat(found), indent=2) + "\n")


def _flat(found: Evaluation) -> list[dict[str, Any]]:
    """The lines as rows of a table: each metric with its loss and interval in columns of their own."""
    table = []
    for line in found.to_dict()["lines"]:
        scores = line.pop("scores")
        values = {f"{metric}_{key}": value for metric, one in scores.items() for key, value in one.items()}
        values |= {metric: one["value"] for metric, one in scores.items()}
        table.append({**line, "rows": found.rows, "batch": found.batch, **values})
    return table


def speed_adapter(name: str, changes: list[str], sample: int | None) -> Path:
    """The folder of the job's speed adapter: the committed one, else that of the job's last training."""
    committed, trained = COMMITTED.get(name, JOBS / f"{name}-adapter"), Path()
    if (committed / "skipdecode.json").is_file():
        return committed
    for config, output, own in [(f"{name}.yaml", "adapt", []), *FURTHER.get(name, [])]:
        folder, given = WORK / name / output, [*own, *changes]
        if trained.name:
            given += [f"adapt.output={folder}", f"adapt.adapter.start={trained}"]
        trained = folder / "speed-adapter"
        if not (folder / "after.parquet").is_file():
            if sample is not None:
                given += [f"adapt.rows={sample}", f"adapt.held_out={max(2, sample // 5)}"]
            command("adapt", f"{JOBS}/{config}", *given, result=trained / "skipdecode.json")
    if name in DRAWN:
        trained = WORK / name / "best" / "speed-adapter"
        if not (trained / "skipdecode.json").is_file():
            file, own = DRAWN[name]
            drawn = ["sampling.temperature=0.7", "sampling.seed=1", f"output.path={WORK / name / 'sampled'}"]
            command("run", f"{JOBS}/{file}", *own, *drawn)
            choose_best(name)
            steps = next((int(one.rpartition("=")[2]) for one in changes), None)
            train_on_best(name, FURTHER[name][-1][1], steps)
    return trained


def train_on_best(name: str, before: str, steps: int | None) -> None:
    """Train the adapter in work/real/<name>/<before>/speed-adapter further, on the chosen answers."""
    best, tokenizer, start = BEST[name], load_tokenizer(MODEL), WORK / name / before / "speed-adapter"
    files = []
    for file in ("train", "held-out"):
        rows = pq.read_table(WORK / name / "best" / f"{file}.parquet").to_pylist()
        for row in rows:
            row["response"] = tokenizer(row["response"].strip(), add_special_tokens=False)["input_ids"]
        files.append(training_pairs(rows, tokenizer.eos_token_id, MOST))
    pairs, held_out = files
    count = min(best.dev_rows, len(held_out))
    dev = [held_out[row * len(held_out) // count] for row in range(count)]
    found = with_adapter(inspect(MODEL), start)
    assert found.spec is not None
    spec = found.spec.overridden({**best.schedule, "speedup": float(best.speedups[-1])})
    schedules = {one.name: one.spec.build(found.num_layers) for one in variants(spec, best.speedups)}
    settings = {**ONE_SPEED, "micro_batch_tokens": 2600, "threads": 1, **best.training} | _steps(steps)
    loss, adapter = LossConfig(references=1.0, distillation=0.5), AdapterConfig(start=str(start))
    recipe = Recipe(spec, schedules, loss, TrainingConfig.model_validate(settings), adapter)
    train(MODEL, recipe, pairs, dev, WORK / name / "best" / "speed-adapter")


def _steps(steps: int | None) -> dict[str, int]:
    return {} if steps is None else {"max_steps": steps}


def dense_model(name: str, adapter: Path, steps: int | None) -> Path | None:
    """The model of the layers needed most, healed on the answers that the adapter was trained on; None without them."""
    folder = WORK / name
    pruned, healed, pairs = folder / "pruned", folder / "healed", folder / "adapt"
    if not (pairs / "train.parquet").is_file():
        print(f"{pairs}: no answers to heal a pruned model with; that line is left out", flush=True)
        return None
    if not (pruned / "tokenizer.json").is_file():
        order = with_adapter(inspect(MODEL), adapter).schedule({"speedup": 1.0}).keep_order
        prune(MODEL, pruned, order[:DENSE_LAYERS])
    if not (healed / "config.json").is_file():
        end = load_tokenizer(MODEL).eos_token_id
        rows, dev = (training_pairs(read_pairs(pairs, f"{one}.parquet"), end, MOST) for one in ("train", "held-out"))
        spec = ScheduleSpec(speedup=1.0, horizon=2)
        schedules = {one.name: one.spec.build(DENSE_LAYERS) for one in variants(spec, [1])}
        settings, loss = TrainingConfig.model_validate({**HEALING, **_steps(steps)}), LossConfig(teacher=str(MODEL))
        began = time.time()
        train(pruned, Recipe(spec, schedules, loss, settings), rows, dev, healed)
        (folder / "healing.json").write_text(json.dumps({"seconds": time.time() - began}) + "\n")
    return healed


def command(verb: str, file: str, *changes: str, result: Path | None = None) -> None:
    """Run a command of skipdecode; end with its exit status if it fails, unless with 1 and its result is there."""
    print(f"skipdecode {verb} {file} " + " ".join(f"--set '{change}'" for change in changes), flush=True)
    options = [part for change in changes for part in ("--set", change)]
    ended = subprocess.run([sys.executable, "-m", "pipeline", verb, file, *options]).returncode
    # adapt ends with 1 where no speed is within the tolerance: the evidence says by how much
    if ended and not (ended == 1 and result is not None and result.is_file()):
        sys.exit(ended)


def prune(base: Path, out: Path, kept: Sequence[int]) -> None:
    """Write `base` with the layers `kept` alone, in their usual sequence."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    layers = family_of(model.config).layers(model)
    left = nn.ModuleList(layers[number] for number in sorted(kept))
    parent = next(module for module in model.modules() if getattr(module, "layers", None) is layers)
    parent.layers = left
    for number, layer in enumerate(left):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(left)
    with torch.no_grad():
        model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(out)
    print(f"{out}: layers {sorted(kept)} of {base}")


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
    config = scoring_job(name, "adapted", adapter)
    torch.set_num_threads(config.actors.threads or torch.get_num_threads())
    print("measuring the machine's ceilings", flush=True)
    ceilings = measure(getattr(torch, config.model.dtype))
    rows: list[Row] = []
    for kind in lines:
        rows += _rows(name, kind, config, adapter, ceilings, bool(rows))
    text = _markdown(name, rows, _cost(WORK / name))
    folder = WORK / name
    (folder / "table.md").write_text(text)
    plain = [{"kind": row.kind, **row.values_stated(), **row.values} for row in rows]
    (folder / "table.json").write_text(json.dumps(plain, indent=2) + "\n")
    print(f"{text}\n{folder / 'table.md'}")


def _rows(name: str, kind: str, config: JobConfig, adapter: Path, ceilings: Ceilings, again: bool) -> list[Row]:
    """The lines of one evaluation; again: 1x, the same in all, is left out."""
    folder = WORK / name / f"evaluate-{kind}"
    base = inspect(config.model.path)
    checkpoint = with_adapter(base, adapter) if kind == "adapted" else base
    shape, item = Shape.of(base.config), getattr(torch, config.model.dtype).itemsize
    rows, answers = list[Row](), json.loads((folder / "answers.json").read_text())
    for values in json.loads((folder / "table.json").read_text()):
        lengths = answers["lengths"][values["name"]]
        work = None
        if values["nominal"] is not None:
            schedule = checkpoint.schedule({"speedup": values["nominal"]} | unadapted_schedule(kind, adapter))
            work = least(lengths, schedule, shape, ceilings, item, values["batch"])
        stated = _stated(name, answers["texts"][values["name"]])
        full = rows[0] if rows else None  # the first line is 1x
        rows.append(Row(kind if values["nominal"] is not None else "dense", values, work, stated, full))
    return rows[1:] if again else rows


def unadapted_schedule(kind: str, adapter: Path) -> dict[str, Any]:
    """The keys of the schedule of a line that the adapter was trained for; the order only if `kind` is measured."""
    keys = {"adapted": (), "paper": OF_PROMPT_AND_FALL, "measured": (*OF_PROMPT_AND_FALL, "keep_order", "warmup")}[kind]
    stored = json.loads((adapter / "skipdecode.json").read_text())
    return {key: stored[key] for key in keys if key in stored}


def _stated(name: str, texts: list[str]) -> Array | None:
    """See `Row`."""
    if name not in TEXTS:
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
    metric, full = METRICS[name], rows[0]
    count, lines = full.values["rows"], []
    for row in rows:
        values, facts = row.values, row.values_stated()
        whole, decode = ("-", "-") if row.ideal is None else (f"{speedup:.2f}x" for speedup in row.ideal)
        saved = (full.values["seconds"] - values["seconds"]) / count
        pays = row.kind == "adapted" and row is not full and "adapt" in cost
        cells = {
            "line": row.title,
            "layer ratio": "-" if values["layer_ratio"] is None else f"{values['layer_ratio']:.2f}x",
            "wall clock, whole": clock_ratio(values["wall_clock"]),
            "ideal": whole,
            "decode": clock_ratio(values["decode_wall_clock"]),
            "decode, ideal": decode,
            TITLES[metric]: f"{values[metric]:.1f}",
            "loss against 1x": "-" if row is full else _loss(values, metric),
        }
        if facts:
            cells["values stated"] = f"{facts['values_stated']:.1f}%"
            cells["loss"] = "-" if row is full else _loss(facts, "values_stated")
        cells["same answer %"] = f"{values['agreement_exact']:.1f}"
        cells["token KL, nats"] = f"{values['token_kl']:.3f}"
        cells["break-even rows"] = "-" if not pays else f"{cost['adapt'] / saved:,.0f}" if saved > 0 else "never"
        if row is full:
            lines = ["| " + " | ".join(cells) + " |", "|---" + "|---:" * (len(cells) - 1) + "|"]
        lines.append("| " + " | ".join(cells.values()) + " |")
    notes = [f"{count} rows, batches of up to {full.values['batch']}; brackets: 95% intervals, paired bootstrap."]
    fewer = {row.values["rows"] for row in rows} - {count}
    if fewer:
        notes.append(f"Unadapted: {min(fewer)} rows.")
    if metric == "exact_match":
        notes.append(_nearest(name, count))
    if "tune" in cost:
        tune, adapt = cost["tune"] / 60, cost["adapt"] / 60
        notes.append(f"Training of the adapter {tune:.1f} min, with its answers {adapt:.1f} min.")
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
    main()
