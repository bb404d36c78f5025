"""What `skipdecode plan` predicts against what `skipdecode run` takes, process for process.

    .venv/bin/python tests/benchmarks/plan_accuracy.py --jobs demo-1x,demo-3x --out work/plan-accuracy.json

Each job is planned and then run. Times are wall clocks of whole commands. The error
of a progress line's ETA is that of the end which it expects, over the seconds of the command. Run it on a machine that
does nothing else: other work changes both, and not equally.

Its inputs are written by `make demo`, `fetch_data.py`, `make real` and `real_data.py {labels,groups,summaries}`.
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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SKIPDECODE = str(Path(sys.executable).parent / "skipdecode")
E2E = "input.path=../shared/data/e2e/test.parquet"
FIRST, FIRST_ROWS = {"labels": 300, "groups": 300, "summaries": 48}, "work/real/{}/train-{}.parquet"
PROGRESS = re.compile(r"(?P<done>[\d,]+)/(?P<rows>[\d,]+) rows.* ETA (?P<eta>[\d:]+)")
WITHIN = 0.1  # of the command's seconds
TAILS = "work/plan-accuracy/tails.parquet"  # as `write_inputs` makes it
DEMO, SAMPLED = ["configs/demo.yaml"], "sampling.temperature=0.7"
TAILED = [*DEMO, f"input.path={TAILS}", "input.sampling=sampling"]
JOBS: dict[str, list[str]] = {
    **{f"demo-{speed}x": [*DEMO, f"schedule.speedup={speed}"] for speed in (1, 2, 3, 4, 5)},
    **{f"demo-1-actor-{speed}x": [*DEMO, f"schedule.speedup={speed}", "actors.count=1"] for speed in (1, 3)},
    "demo-refill": [*DEMO, "actors.scheduler=refill"],
    "demo-sampled": [*DEMO, SAMPLED, "sampling.max_new_tokens=200"],
    "demo-small-batches": [*DEMO, "actors.max_batch=8"],
    "demo-three-samples": [*DEMO, SAMPLED, "sampling.n=3"],
    "tails": TAILED,
    "tails-1x-refill": [*TAILED, "schedule.speedup=1", "actors.scheduler=refill"],
    "e2e-demo": [*DEMO, E2E, "input.id=id"],
    "smollm2-e2e-1x": ["configs/real/1x.yaml", E2E],
    "smollm2-e2e-2x": ["configs/real/2x.yaml", E2E],
    "smollm2-e2e-bf16": ["configs/real/1x.yaml", E2E, "model.dtype=bfloat16"],
    **{
        f"smollm2-{name}": [f"configs/real/{name}.yaml", f"input.path={FIRST_ROWS.format(name, rows)}"]
        for name, rows in FIRST.items()
    },
}


def write_inputs() -> None:
    """Prompts with limits of long-tailed lengths, which they reach, and the first rows of the larger inputs."""
    if not Path("work/demo/prompts").is_dir():
        subprocess.run([sys.executable, "-m", "pipeline.advise.demo_data", "work/demo/prompts"], check=True)
    prompts = pq.read_table("work/demo/prompts")
    chance = np.random.default_rng(0)
    limits = np.clip(chance.lognormal(3.3, 0.9, prompts.num_rows), 4, 300).astype(int)
    sampling = pa.array([{"max_new_tokens": int(limit), "ignore_eos": True} for limit in limits])
    Path(TAILS).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(prompts.append_column("sampling", sampling).slice(0, 1000), TAILS)
    for name, rows in FIRST.items():
        if (source := Path(f"work/real/{name}/train.parquet")).exists():  # made by `make real` and real_data.py
            pq.write_table(pq.read_table(source).slice(0, rows), FIRST_ROWS.format(name, rows))


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Plan and run one job, each as a process of its own."""
    file, *changes = JOBS[name]
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)  # of an earlier measurement
    options = [option for change in [*changes, f"output.path={output}"] for option in ("--set", change)]
    began = time.monotonic()
    plan = json.loads(subprocess.check_output([SKIPDECODE, "plan", file, *options, "--json"]).splitlines()[-1])
    plan_seconds = time.monotonic() - began
    began = time.monotonic()
    run, ends = watched_run(file, *options, "--json", "--overwrite")
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
        "eta_errors": [end / seconds - 1 for end in ends],
        "predicted_busy": chosen["busy_seconds"],
        "measured_busy": run["generate_seconds"],
        "predicted_tokens": chosen["generated_tokens"],
        "measured_tokens": run["generated_tokens"],
        "predicted_startup": plan["startup"]["seconds"],
    }


def watched_run(*arguments: str) -> tuple[dict[str, Any], list[float]]:
    """The JSON object of a run, and the end, s since it began, that each ETA from a tenth of the rows on expects."""
    began = time.monotonic()
    ends: list[float] = []
    pipe = subprocess.PIPE
    with subprocess.Popen([SKIPDECODE, "run", *arguments], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if found := PROGRESS.search(line):
                left, now = 0, time.monotonic() - began
                for part in found["eta"].split(":"):
                    left = 60 * left + int(part)
                done, rows = (int(found[name].replace(",", "")) for name in ("done", "rows"))
                if WITHIN <= done / rows < 1:
                    ends.append(now + left)
        printed = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return json.loads(printed.strip().splitlines()[-1]), ends


def of_etas(errors: Sequence[float]) -> str:
    """Number of ETAs, how many lie within a tenth, median and worst error."""
    if not errors:
        return "none"
    sizes = np.abs(errors)
    within, worst = int((sizes <= WITHIN).sum()), max(errors, key=abs)
    return f"{within} of {len(errors)} within {WITHIN:.0%}, median {np.median(sizes):.0%}, worst {worst:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--folder", type=Path, default=Path("work/plan-accuracy"))
    parser.add_argument("--out", type=Path, default=Path("work/plan-accuracy.json"))
    options = parser.parse_args()
    write_inputs()
    lines = []
    for name in options.jobs.split(","):
        line = measured(name, options.folder)
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
    errors_of_etas = [error for line in lines for error in line["eta_errors"]]
    print(f"ETAs from a tenth of the rows on: {of_etas(errors_of_etas)}")
    print(f"{len(lines)} jobs: median error {np.median(errors):.0%}, 90th percentile {np.percentile(errors, 90):.0%}")


if __name__ == "__main__":
    main()
