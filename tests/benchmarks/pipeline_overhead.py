"""What the pipeline costs on top of the bare engine, and whether its actor ever waits between shards.

    .venv/bin/python tests/benchmarks/pipeline_overhead.py [--shards 3] [--rows 4096] [--batch 64] [--threads 1]
        [--new 64] [--runs 1] [--picture work/benchmarks/pipeline.png]

Demo checkpoint at 3x, greedy, bf16; shards of so many prompts of E2E (without the data set, of the demo), repeated as
needed. A job with one actor, from its first shard's start to its last one's end, against the bare engine with as many
threads on the same shards in the same order, whose prompts are tokens already. Both in turn, medians.
A machine's speed drifts between the two: beside the clocks' ratio stands one that drift does not reach, by what each
spends outside prefill and decode; what the pipeline's processes take from the engine's threads is in the first alone.
One thread by default: where the engine's threads take all cores, Ray's own processes hold up each of its steps.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import timeline  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from workloads import DATA  # noqa: E402

from actors.answers import Prompt  # noqa: E402
from actors.generator import Generator  # noqa: E402
from pipeline.demo_data import write_prompts  # noqa: E402

CHECKPOINT = ROOT / "configs/demo/checkpoint"
E2E = DATA / "e2e" / "train.parquet"
SPEEDUP = 3.0


def prompts(rows: int) -> list[str]:
    """So many prompts of E2E, or of the demo."""
    if not E2E.exists():
        with tempfile.TemporaryDirectory() as folder:
            write_prompts(Path(folder), rows, 1, seed=2)
            return list(pq.read_table(folder)["prompt"].to_pylist())
    return list(itertools.islice(itertools.cycle(pq.read_table(E2E, columns=["prompt"])["prompt"].to_pylist()), rows))


def bare(texts: list[str], given: argparse.Namespace) -> dict[str, float]:
    """Seconds of the engine alone over the shards, those within it, and generated tokens."""
    generator = Generator(
        str(CHECKPOINT),
        schedule={"speedup": SPEEDUP},
        sampling={"max_new_tokens": given.new},
        max_batch=given.batch,
        threads=given.threads,
        cumulative_logprob=False,
    )
    ids = generator.tokenizer(texts)["input_ids"]
    wanted = [Prompt(tokens, "bench", row) for row, tokens in enumerate(ids)]
    generator.answer(wanted[: given.batch])
    generator.take_stats()
    began = time.perf_counter()
    for first in range(0, len(wanted), given.rows):
        answers = generator.answer(wanted[first : first + given.rows])
        assert not any(one.error for one in answers)
    seconds = time.perf_counter() - began
    stats = generator.take_stats()
    inside = stats.prefill_seconds + stats.decode_seconds
    return {"seconds": seconds, "inside": inside, "tokens": stats.generated_tokens}


def job(texts: list[str], given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Statistics of the shards of a job over the same rows."""
    folder.mkdir()
    table = pa.table({"prompt": texts})
    pq.write_table(table, folder / "prompts.parquet", row_group_size=given.rows)
    values = {
        "input": {"path": str(folder / "prompts.parquet")},
        "output": {"path": str(folder / "out")},
        "model": {"path": str(CHECKPOINT)},
        "schedule": {"speedup": SPEEDUP, "agreement_rows": 0},
        "sampling": {"max_new_tokens": given.new},
        "actors": {"count": 1, "threads": given.threads, "max_batch": given.batch},
        "shard_rows": given.rows,
        "shared_prefix": False,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "pipeline", "run", str(folder / "job.yaml")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return timeline.read(folder / "out")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4096, help="of a shard")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new", type=int, default=64, help="tokens at most")
    parser.add_argument("--runs", type=int, default=1, help="of each, in turn")
    parser.add_argument("--picture", type=Path, default=ROOT / "work/benchmarks/pipeline.png")
    given = parser.parse_args()
    texts = prompts(given.shards * given.rows)
    alone, jobs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):
            alone.append(bare(texts, given))
            jobs.append(job(texts, given, Path(folder) / str(number)))
    assert {one["tokens"] for one in alone} == {sum(shard["generated_tokens"] for shard in stats) for stats in jobs}
    spans = [max(one["finished"] for one in stats) - min(one["started"] for one in stats) for stats in jobs]
    inside = [sum(one["prefill_seconds"] + one["decode_seconds"] for one in stats) for stats in jobs]
    outside_alone = statistics.median(one["seconds"] / one["inside"] for one in alone)
    outside = statistics.median(span / own for span, own in zip(spans, inside, strict=True))
    found = {
        "tokens": alone[0]["tokens"],
        "bare_seconds": [one["seconds"] for one in alone],
        "job_seconds": spans,
        "shard_seconds": [one["generate_seconds"] for one in jobs[-1]],
        "overhead": statistics.median(spans) / statistics.median(one["seconds"] for one in alone) - 1,
        "overhead_outside_engine": outside / outside_alone - 1,
    }
    lanes = timeline.lanes(jobs[-1])
    print(
        f"{platform.processor() or platform.machine()}, {given.threads} threads, torch {torch.__version__}, bf16, no "
        f"torch.compile; {given.shards} shards of {given.rows} rows of {'E2E' if E2E.exists() else 'the demo'}, "
        f"{found['tokens']} tokens, 3x, batch {given.batch}"
    )
    print(
        f"bare engine {', '.join(f'{one:.1f}' for one in found['bare_seconds'])} s; job, from the first shard's start "
        f"to the last one's end, {', '.join(f'{one:.1f}' for one in spans)} s: overhead {found['overhead']:.1%}; by "
        f"what lies outside prefill and decode {found['overhead_outside_engine']:.1%}"
    )
    print(timeline.table(lanes))
    timeline.draw(lanes, given.picture)
    print(f"picture: {given.picture}")
    print(json.dumps({**found, "lanes": timeline.figures(lanes)}))


if __name__ == "__main__":
    main()
