"""What `skipdecode plan` predicts against what `skipdecode run` takes, process for process.

    .venv/bin/python tests/benchmarks/plan_accuracy.py --jobs demo-1x,demo-3x --out work/plan-accuracy.json

    .venv/bin/python tests/benchmarks/plan_accuracy.py --processor --limit 600

Each job is planned and then run, its agreement measured by the plan. Times are wall clocks of whole commands. The error
of a progress line's ETA is that of the end which it expects, over the seconds of the command. Run it on a machine that
does nothing else: other work changes both, and not equally.

The inputs come from `make demo`, the data sets beside the repository, `make real` and
`real_data.py {labels,groups,summaries}`.

With --processor plan and run are in this process, without Ray, by one actor, and compared by the processor's seconds of
that actor: other work changes them less.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SKIPDECODE = str(Path(sys.executable).parent / "skipdecode")
E2E, BANKING = "input.path=../shared/data/e2e/test.parquet", "work/real/{}/train-{}.parquet"
PROGRESS = re.compile(r"(?P<done>[\d,]+)/(?P<rows>[\d,]+) rows.* ETA (?P<eta>[\d:]+)")
WITHIN = 0.1  # of the command's seconds
TAILS = "work/plan-accuracy/tails.parquet"  # as `write_tails` makes it
JOBS: dict[str, list[str]] = {
    **{f"demo-{speed}x": ["configs/demo.yaml", f"schedule.speedup={speed}"] for speed in (1, 2, 3, 4, 5)},
    **{
        f"demo-1-actor-{speed}x": ["configs/demo.yaml", f"schedule.speedup={speed}", "actors.count=1"]
        for speed in (1, 3)
    },
    "demo-refill": ["configs/demo.yaml", "actors.scheduler=refill"],
    "demo-sampled": ["configs/demo.yaml", "sampling.temperature=0.7", "sampling.max_new_tokens=200"],
    "demo-small-batches": ["configs/demo.yaml", "actors.max_batch=8"],
    "demo-three-samples": ["configs/demo.yaml", "sampling.n=3", "sampling.temperature=0.7"],
    "tails": ["configs/demo.yaml", f"input.path={TAILS}", "input.sampling=sampling"],
    "tails-1x-refill": [
        "configs/demo.yaml",
        f"input.path={TAILS}",
        "input.sampling=sampling",
        "schedule.speedup=1",
        "actors.scheduler=refill",
    ],
    "e2e-demo": ["configs/demo.yaml", E2E, "input.id=id"],
    "smollm2-e2e-1x": ["configs/real/1x.yaml", E2E],
    "smollm2-e2e-2x": ["configs/real/2x.yaml", E2E],
    "smollm2-e2e-bf16": ["configs/real/1x.yaml", E2E, "model.dtype=bfloat16"],
    "smollm2-labels": ["configs/real/labels.yaml", f"input.path={BANKING.format('labels', 300)}"],
    "smollm2-groups": ["configs/real/groups.yaml", f"input.path={BANKING.format('groups', 300)}"],
    "smollm2-summaries": ["configs/real/summaries.yaml", f"input.path={BANKING.format('summaries', 48)}"],
}


def write_inputs() -> None:
    """Prompts with limits of long-tailed lengths, which they reach, and the first rows of the larger inputs."""
    if not Path("work/demo/prompts").is_dir():
        subprocess.run([sys.executable, "-m", "pipeline.demo_data", "work/demo/prompts"], check=True)
    prompts = pq.read_table("work/demo/prompts")
    chance = np.random.default_rng(0)
    limits = np.clip(chance.lognormal(3.3, 0.9, prompts.num_rows), 4, 300).astype(int)
    sampling = pa.array([{"max_new_tokens": int(limit), "ignore_eos": True} for limit in limits])
    Path(TAILS).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(prompts.append_column("sampling", sampling).slice(0, 1000), TAILS)
    for name, rows in (("labels", 300), ("groups", 300), ("summaries", 48)):
        if not Path(f"work/real/{name}/train.parquet").exists():  # made by `make real` and real_data.py
            continue
        table = pq.read_table(f"work/real/{name}/train.parquet")
        pq.write_table(table.slice(0, rows), BANKING.format(name, rows))


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Plan and run one job, each as a process of its own."""
    file, *changes = JOBS[name]
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)  # of an earlier measurement
    options = [option for change in [*changes, f"output.path={output}"] for option in ("--set", change)]
    began = time.monotonic()
    plan = command("plan", file, *options, "--json")
    plan_seconds = time.monotonic() - began
    began = time.monotonic()
    run, shown = watched_run(file, *options, "--json", "--overwrite")
    seconds = time.monotonic() - began
    chosen = plan["chosen"]
    return {
        "job": name,
        "plan_seconds": plan_seconds,
        "predicted": chosen["seconds"],
        "low": chosen["low"],
        "high": chosen["high"],
        "measured": seconds,
        "error": chosen["seconds"] / seconds - 1,
        "eta_errors": [eta.end / seconds - 1 for eta in shown if WITHIN <= eta.done < 1],
        "predicted_busy": chosen["busy_seconds"],
        "measured_busy": run["generate_seconds"],
        "predicted_tokens": chosen["generated_tokens"],
        "measured_tokens": run["generated_tokens"],
        "predicted_startup": plan["startup"]["seconds"],
    }


def by_processor(name: str, folder: Path, limit: int) -> dict[str, Any]:
    """Plan and run the first rows of one job in this process, whose clock for intervals is the processor's."""
    from pipeline import job as jobs
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_config
    from pipeline.estimate import estimate
    from pipeline.run.in_process import InProcess

    file, *changes = JOBS[name]
    one_actor = ["actors.count=1", "actors.threads=1"]
    config = load_config(JobConfig, file, [*changes, *one_actor, f"output.path={folder / name}"])
    began = time.perf_counter()
    found = estimate(config, limit=limit, backend=InProcess())
    seconds = time.perf_counter() - began
    chosen = found["chosen"]
    totals = jobs.run(config, limit=limit, overwrite=True, backend=InProcess()).totals
    startup = found["startup"]["seconds"]
    return {
        "job": name,
        "plan_seconds": seconds,
        "predicted": chosen["busy_seconds"],
        "low": chosen["low"] - startup,
        "high": chosen["high"] - startup,
        "measured": totals.generate_seconds,
        "error": chosen["busy_seconds"] / totals.generate_seconds - 1,
        "eta_errors": [],
        "predicted_busy": chosen["busy_seconds"],
        "measured_busy": totals.generate_seconds,
        "predicted_tokens": chosen["generated_tokens"],
        "measured_tokens": totals.generated_tokens,
        "predicted_startup": startup,
    }


@dataclass(frozen=True)
class Eta:
    """A progress line. at, end: s since the command began, of the line and of the end that it expects. done: share."""

    at: float
    end: float
    done: float


def watched_run(*arguments: str) -> tuple[dict[str, Any], list[Eta]]:
    """The JSON object of a run, and its progress lines with an ETA."""
    began = time.monotonic()
    shown: list[Eta] = []
    pipe = subprocess.PIPE
    with subprocess.Popen([SKIPDECODE, "run", *arguments], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            found = PROGRESS.search(line)
            if found:
                left, now = 0, time.monotonic() - began
                for part in found["eta"].split(":"):
                    left = 60 * left + int(part)
                shown.append(Eta(now, now + left, _number(found["done"]) / _number(found["rows"])))
        printed = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return _last_object(printed), shown


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def of_etas(errors: Sequence[float]) -> str:
    """Number of ETAs, how many lie within a tenth, median and worst error."""
    if not errors:
        return "none"
    sizes = np.abs(errors)
    within, worst = int((sizes <= WITHIN).sum()), max(errors, key=abs)
    return f"{within} of {len(errors)} within {WITHIN:.0%}, median {np.median(sizes):.0%}, worst {worst:+.0%}"


def command(*arguments: str) -> dict[str, Any]:
    """The JSON object that `skipdecode` prints last. CalledProcessError if it fails."""
    return _last_object(subprocess.run([SKIPDECODE, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout)


def _last_object(printed: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--processor", action="store_true", help="without Ray, by the processor's seconds")
    parser.add_argument("--limit", type=int, default=600, help="with --processor: rows of each job")
    parser.add_argument("--folder", type=Path, default=Path("work/plan-accuracy"))
    parser.add_argument("--out", type=Path, default=Path("work/plan-accuracy.json"))
    options = parser.parse_args()
    if options.processor:
        time.perf_counter = time.process_time
    write_inputs()
    lines = []
    for name in options.jobs.split(","):
        line = (
            by_processor(name, options.folder, options.limit) if options.processor else measured(name, options.folder)
        )
        lines.append(line)
        inside = "inside" if line["low"] <= line["measured"] <= line["high"] else "outside"
        print(
            f"{name}: predicted {line['predicted']:.1f} s [{line['low']:.1f}, {line['high']:.1f}], measured "
            f"{line['measured']:.1f} s ({line['error']:+.0%}, {inside}); actors {line['predicted_busy']:.1f} s and "
            f"{line['measured_busy']:.1f} s, tokens {line['predicted_tokens']:,} and {line['measured_tokens']:,}; "
            f"ETAs from a tenth of the rows on: {of_etas(line['eta_errors'])}",
            flush=True,
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(lines, indent=2) + "\n")
    errors = np.abs([line["error"] for line in lines])
    if not options.processor:
        errors_of_etas = [error for line in lines for error in line["eta_errors"]]
        print(f"ETAs from a tenth of the rows on: {of_etas(errors_of_etas)}")
    print(f"{len(lines)} jobs: median error {np.median(errors):.0%}, 90th percentile {np.percentile(errors, 90):.0%}")


if __name__ == "__main__":
    main()
