"""The evidence on a published model for one job: quality against clock, unadapted, adapted, and of a pruned model.

    .venv/bin/python tests/benchmarks/real_evidence.py NAME [--rows N] [--steps N] [--sample N]

NAME: text, labels, groups or summaries. Steps, each skipped if its result is there, so that the same command goes on
where it was stopped: model, prompts, speed adapter, a model of half the layers healed on the same answers, evaluations,
table and chart in work/real/<name>. A speed adapter in configs/real/<name>-adapter takes the place of the trained one.
With --rows, --steps and --sample: a few rows to score, training steps and answers to learn from, to try the commands.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from prune_layers import prune
from real_data import JOBS, MODEL, NO_DATA, WORK
from real_model import ADAPTER, make_model
from real_table import unadapted_schedule, write_table

from actors.engine.model.loading import inspect

DENSE_LAYERS = 15
UNADAPTED_ROWS = 100  # their losses are large
COMMITTED = {"text": ADAPTER}  # that of `make real`
HERE = Path(__file__).parent
# trainings after that of configs/real/<name>.yaml, each from the adapter of the one before: job file, folder, changes
FURTHER: dict[str, list[tuple[str, str, list[str]]]] = {
    "text": [
        ("text-own.yaml", "adapt-own", []),
        (
            "text-own.yaml",
            "adapt-recombined",
            [
                'input.path=["work/real/text/own.parquet", "work/real/text/recombined.parquet"]',
                "adapt.rows=2351",
                "adapt.training.epochs=1",
            ],
        ),
    ],
    "labels": [("labels-further.yaml", "adapt-further", [])],
    "summaries": [("summaries.yaml", "adapt-again", ["adapt.training.max_steps=170", "adapt.training.seed=1"])],
}


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("text", "labels", "groups", "summaries"))
    parser.add_argument("--rows", type=int, help="rows to score")
    parser.add_argument("--steps", type=int, help="training steps, of the adapter and of the pruned model")
    parser.add_argument("--sample", type=int, help="answers to learn from")
    arguments = parser.parse_args()
    name, folder = arguments.name, WORK / arguments.name
    make_model()
    if not (folder / "test.parquet").is_file():
        ended = subprocess.run([sys.executable, str(HERE / "real_data.py"), name]).returncode
        if ended:
            sys.exit(0 if ended == NO_DATA else ended)  # skipped, with the reason printed
    steps = [] if arguments.steps is None else [f"training.max_steps={arguments.steps}"]
    adapter = speed_adapter(name, [f"adapt.{step}" for step in steps], arguments.sample)
    order = keep_order(adapter)
    dense = dense_model(name, order, steps)
    few = UNADAPTED_ROWS if arguments.rows is None else min(arguments.rows, UNADAPTED_ROWS)
    rows = [] if arguments.rows is None else [f"data.limit={arguments.rows}"]
    baselines = [] if dense is None else [f"baselines={json.dumps({f'{DENSE_LAYERS} layers, healed': str(dense)})}"]
    lines = {
        "adapted": [f"model.speed_adapter={adapter}", *baselines, *rows],
        "measured": [*of_schedule("measured", adapter), f"data.limit={few}"],
        "paper": ["schedule.keep_order=paper", *of_schedule("paper", adapter), f"data.limit={few}"],
    }
    for line, changes in lines.items():
        output = folder / f"evaluate-{line}"
        if not (output / "table.json").is_file():
            command("evaluate", f"{JOBS}/evaluate-{name}.yaml", f"output={output}", *changes)
    write_table(name, adapter, list(lines))


def of_schedule(kind: str, adapter: Path) -> list[str]:
    """The schedule of an unadapted line, as changes of evaluate's configuration."""
    return [f"schedule.{key}={value}" for key, value in unadapted_schedule(kind, adapter).items()]


def speed_adapter(name: str, changes: list[str], sample: int | None) -> Path:
    """The folder of the job's speed adapter: the committed one, else that of the last `adapt` of the job."""
    committed, trained = COMMITTED.get(name, JOBS / f"{name}-adapter"), Path()
    if (committed / "skipdecode.json").is_file():
        return committed
    for config, output, own in [(f"{name}.yaml", "adapt", []), *FURTHER.get(name, [])]:
        folder, given = WORK / name / output, [*own, *changes]
        if trained.name:
            given += [f"adapt.output={folder}", f"adapt.adapter.start={trained}"]
        trained = folder / "speed-adapter"
        if not (folder / "after" / "table.json").is_file():
            if sample is not None:
                given += [f"adapt.rows={sample}", f"adapt.held_out={max(2, sample // 5)}"]
            command("adapt", f"{JOBS}/{config}", *given, may_fail=(trained / "skipdecode.json").is_file)
    return trained


def keep_order(adapter: Path) -> list[int]:
    """The measured order that the adapter was trained for."""
    values = json.loads((adapter / "skipdecode.json").read_text())
    order = values.get("keep_order", "paper")
    if isinstance(order, str):
        return list(inspect(MODEL).schedule({"keep_order": order, "speedup": 1.0}).keep_order)
    return [int(number) for number in order]


def dense_model(name: str, order: list[int], steps: list[str]) -> Path | None:
    """The model of the layers needed most, healed on the answers that the adapter was trained on; None without them."""
    folder = WORK / name
    pruned, healed, pairs = folder / "pruned", folder / "healed", folder / "adapt"
    if not (pairs / "train.parquet").is_file():
        print(f"{pairs}: no answers to heal a pruned model with; that line is left out", flush=True)
        return None
    if not (pruned / "tokenizer.json").is_file():
        prune(MODEL, pruned, order[:DENSE_LAYERS])
    if not (healed / "config.json").is_file():
        paths = {
            "model.path": pruned,
            "data.train": pairs / "train.parquet",
            "data.dev": pairs / "held-out.parquet",
            "output": healed,
        }
        began = time.time()
        command("tune", f"{JOBS}/heal.yaml", *(f"{key}={path}" for key, path in paths.items()), *steps)
        (folder / "healing.json").write_text(json.dumps({"seconds": time.time() - began}) + "\n")
    return healed


def command(verb: str, file: str, *changes: str, may_fail: object = None) -> None:
    """Run a command of skipdecode; end with its exit status if it fails and its result is not there."""
    print(f"skipdecode {verb} {file} " + " ".join(f"--set '{change}'" for change in changes), flush=True)
    options = [part for change in changes for part in ("--set", change)]
    ended = subprocess.run([sys.executable, "-m", "pipeline", verb, file, *options]).returncode
    # adapt ends with 1 where no speed is within the tolerance: the evidence says by how much
    if ended and not (ended == 1 and callable(may_fail) and may_fail()):
        sys.exit(ended)


if __name__ == "__main__":
    main()
