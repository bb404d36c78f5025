"""Cost of a batch pipeline over the bare engine: the same rows by `skipdecode run`, `LLM.generate` and `ray.data.llm`.

    work/peers/vllm/bin/python tests/benchmarks/overhead.py [--rows 600] [--rounds 3]
    work/peers/vllm/bin/python tests/benchmarks/overhead.py --labels [--seconds 20]
    python3 tests/benchmarks/overhead.py --shape llama-3-8b --gpus 1 --rows 4000 --max-rows 1024  # on a GPU, see gpu.sh

Prompts and answers have mixed lengths; each row says how many tokens its answer has. All systems run vLLM at full depth
with the same arguments, in turn, each run as a command of its own. *Running*: tokens a second from the first row that
the engine gets to the last answer, without start-up. *Command*: tokens a second of the whole command. Without Ray the
job runs in the tests' in-process backend, and `ray.data.llm` is left out; with --without-ray too.

--labels: a job of Banking77's questions after similar ones (prompts of some 500 tokens) at 1x, uniform 2x and with one
layer, in turn, by the actor's seconds in the report. The ideal: the line through the times of all layers and of one.

Raw results, a table and a plot are written to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import real_data
import yaml

from actors.engine.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
Rounds = list[dict[str, Any]]  # for each round, the figures by system or schedule
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "by", "with", "as", "from", "his", "at")
PROMPT_WORDS, NEW_TOKENS = (16, 256), (8, 128)  # lengths of prompts and answers: log-uniform
CONTEXT = 2048  # the longest labels prompt has 1,034 tokens
JOB, PLAIN, BENCH, RAY = "skipdecode run", "LLM.generate", "vllm bench throughput", "ray.data.llm"
# what the command runs; the program `vllm` itself does not start with the CPU build of PyPI
BENCH_PROGRAM = """
from vllm.benchmarks import throughput
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    throughput.add_cli_args(parser)
    throughput.main(parser.parse_args())
"""
ADAPTER, EXAMPLES = "configs/real/labels-adapter", 16  # similar questions before each: prompts of some 500 tokens
LABELS_SCHEDULES: dict[str, dict[str, Any]] = {
    "1x": {"speedup": 1},
    "2x": {"speedup": 2},
    "one layer": {"depths": [1], "prompt": "first", "unadapted": True},
}


def write_rows(folder: Path, count: int) -> None:
    """Write the rows that all systems answer; the same number of rows makes the same rows."""
    chance = random.Random(count)

    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** chance.random())

    rows = [(" ".join(chance.choices(WORDS, k=length(*PROMPT_WORDS))), length(*NEW_TOKENS)) for _ in range(count)]
    table = {
        "id": [f"r{number}" for number in range(count)],
        "prompt": [prompt for prompt, _ in rows],
        "sampling": [{"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0} for _, new in rows],
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")


def engine_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's arguments that are the same in all systems."""
    on_cpu = {"kv_cache_memory_bytes": given.cache_bytes, "distributed_executor_backend": "uni"}
    memory = {"gpu_memory_utilization": 0.85} if given.gpus else on_cpu
    weights = {} if given.shape is None else {"load_format": "dummy"}
    return {"dtype": "bfloat16", "max_model_len": CONTEXT, "max_num_seqs": given.max_rows, **memory, **weights}


def job_values(given: argparse.Namespace, source: Path, output: Path, **more: Any) -> dict[str, Any]:
    """Return a job file's values for the engine arguments that all systems have."""
    of_job = {"dtype", "max_num_seqs", "kv_cache_memory_bytes", "distributed_executor_backend"}  # it sets these itself
    options = {name: value for name, value in engine_arguments(given).items() if name not in of_job}
    shutil.rmtree(output, ignore_errors=True)
    actors = {"gpus": given.gpus} if given.gpus else {"threads": given.threads, "cache_bytes": given.cache_bytes}
    return {
        "input": {"path": str(source), "id": "id", "sampling": "sampling"},
        "output": {"path": str(output)},
        "model": {"path": str(given.model), "dtype": "bfloat16", "engine": "vllm", "vllm": options},
        "schedule": {"speedup": 1},
        "sampling": {"max_new_tokens": NEW_TOKENS[1]},
        "actors": {"count": 1, "max_batch": given.max_rows, **actors},
        **more,
    }


def run_job(given: argparse.Namespace, folder: Path, values: dict[str, Any]) -> tuple[dict[str, Any], pa.Table]:
    """Run a job as a command. Return its whole seconds, and statistics of its shards."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    in_process = [str(Path(__file__).resolve()), "--system", JOB, "--folder", str(folder)]
    ray_job = ["-m", "pipeline", "run", str(file)]
    whole = command(given, folder, *(in_process if given.without_ray else ray_job))
    return {"command_s": whole}, pq.read_table(Path(values["output"]["path"]) / "_job" / "stats.pq")


def by_job(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`skipdecode run` with `model.engine: vllm` at 1x."""
    found, shards = run_job(given, folder, job_values(given, folder / "rows.parquet", folder / "answers"))
    sums = {name: sum(shards[name].to_pylist()) for name in ("rows", "errors", "generated_tokens", "generate_seconds")}
    assert sums["rows"] == given.rows and not sums["errors"]
    running = max(shards["finished"].to_pylist()) - min(shards["started"].to_pylist())
    idle = running - sums["generate_seconds"]  # seconds in which the actor waited for a shard
    shape = {"shards": len(shards), "idle_s": idle}
    return {**found, "running_s": running, "tokens": sums["generated_tokens"], **shape}


def job_in_process(given: argparse.Namespace, folder: Path) -> None:
    """The same job without Ray, by the tests' in-process backend."""
    sys.path.append(str(ROOT / "tests" / "pipeline"))
    from in_process import run_in_process

    from pipeline.config.job import JobConfig

    run_in_process(JobConfig.model_validate(yaml.safe_load((folder / "job.yaml").read_text())))


def by_program(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A system that this file starts as a process of its own (`SYSTEMS`), which writes its result as JSON."""
    shutil.rmtree(folder / "answers", ignore_errors=True)
    whole = command(given, folder, str(Path(__file__).resolve()), "--system", name, "--folder", str(folder))
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {"command_s": whole, **found}


def generate(given: argparse.Namespace, folder: Path) -> None:
    """All rows in one call of `LLM.generate`."""
    import vllm

    rows = pq.read_table(folder / "rows.parquet")
    llm = vllm.LLM(str(given.model), **engine_arguments(given))
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=row["max_new_tokens"], ignore_eos=True)
        for row in rows["sampling"].to_pylist()
    ]
    began = time.perf_counter()
    answers = llm.generate(rows["prompt"].to_pylist(), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    texts = pa.array([answer.outputs[0].text for answer in answers])
    pq.write_table(rows.append_column("generated_text", texts), folder / "answers.parquet")
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    (folder / "result.json").write_text(json.dumps({"running_s": seconds, "tokens": tokens}))


def ray_data_llm(given: argparse.Namespace, folder: Path) -> None:
    """The rows by `ray.data.llm`, from Parquet to Parquet."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    cpus = max(8, os.cpu_count() or 1)  # for its actors and tasks; with two it would wait for ever
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
    on_cpu = {} if given.gpus else {"placement_group_config": {"bundle_per_worker": {"CPU": 1}}}
    config = vLLMEngineProcessorConfig(
        model_source=str(given.model),
        engine_kwargs=engine_arguments(given),
        concurrency=1,
        batch_size=64,
        max_concurrent_batches=max(8, 2 * given.max_rows // 64),
        chat_template_stage=False,
        **on_cpu,
    )

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        own = row["sampling"]
        params = {"temperature": 0, "max_tokens": own["max_new_tokens"], "ignore_eos": True}
        return {"id": row["id"], "prompt": row["prompt"], "sampling_params": params}

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        kept = {name: row[name] for name in ("id", "generated_text", "num_generated_tokens", "time_taken_llm")}
        return {**kept, "ended": time.time()}

    processor = build_processor(config, preprocess=asked, postprocess=answered)
    processor(ray.data.read_parquet(str(folder / "rows.parquet"))).write_parquet(str(folder / "answers"))
    rows = pq.read_table(folder / "answers").to_pylist()
    assert len(rows) == given.rows
    running = max(row["ended"] for row in rows) - min(row["ended"] - row["time_taken_llm"] for row in rows)
    tokens = sum(row["num_generated_tokens"] for row in rows)
    (folder / "result.json").write_text(json.dumps({"running_s": running, "tokens": tokens}))


def by_bench(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`vllm bench throughput` with the same rows, as chats whose answers have as many tokens as the rows ask for."""
    rows, tokenizer = pq.read_table(folder / "rows.parquet").to_pylist(), load_tokenizer(given.model)
    special = len(tokenizer("a a").input_ids) - 2
    limits = [row["sampling"]["max_new_tokens"] for row in rows]
    chats = [
        {"conversations": [{"value": row["prompt"]}, {"value": "a" + " a" * (limit - special - 1)}]}
        for row, limit in zip(rows, limits, strict=True)
    ]
    (folder / "chats.json").write_text(json.dumps(chats))
    options = {
        **{"dataset-name": "sharegpt", "dataset-path": folder / "chats.json", "num-prompts": given.rows},
        **{"model": given.model, "output-json": folder / "bench.json"},
        **{name.replace("_", "-"): value for name, value in engine_arguments(given).items()},
    }
    shown = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    whole = command(given, folder, "-c", BENCH_PROGRAM, *shown)
    found = json.loads((folder / "bench.json").read_text())
    prompts = sum(len(tokenizer(row["prompt"]).input_ids) for row in rows)
    assert found["total_num_tokens"] == prompts + sum(limits), "vllm bench has left out rows"
    return {"command_s": whole, "running_s": found["elapsed_time"], "tokens": sum(limits)}


SYSTEMS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    JOB: job_in_process,
    PLAIN: generate,
    RAY: ray_data_llm,
}


def command(given: argparse.Namespace, folder: Path, *parts: str) -> float:
    """Run Python with some arguments and return the seconds that it took; exit with the end of its log if it fails."""
    of_rows = {"model": given.model, "shape": given.shape, "rows": given.rows, "max-rows": given.max_rows}
    of_rows |= {"gpus": given.gpus, "threads": given.threads, "cache-bytes": given.cache_bytes}
    own = [str(part) for name, value in of_rows.items() if value is not None for part in (f"--{name}", value)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **({} if given.gpus else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),  # a second process would take a core to wait
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    began = time.perf_counter()
    with (folder / "log").open("w") as log:
        run = [sys.executable, *parts, *(own if "--system" in parts else [])]
        status = subprocess.run(run, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
    if status:
        sys.exit(f"{shlex.join(run)}\nfailed:\n" + (folder / "log").read_text(errors="replace")[-3000:])
    return time.perf_counter() - began


def compare(given: argparse.Namespace, folder: Path, rounds: Rounds, save: Callable[[], None]) -> None:
    """Run the systems in turn. Add each round's figures to `rounds`, and call `save` after each run."""
    write_rows(folder, given.rows)
    systems: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
        JOB: by_job,
        PLAIN: partial(by_program, PLAIN),
        BENCH: by_bench,
        RAY: partial(by_program, RAY),
    }
    names = [name for name in given.systems if name != RAY or not given.without_ray]
    for number in range(given.rounds):
        rounds.append({})
        for name in names[number % len(names) :] + names[: number % len(names)]:  # no system is always the first
            one = rounds[-1][name] = systems[name](given, folder)
            print(f"  round {number + 1}: {name}: {one}", file=sys.stderr, flush=True)
            save()


def label_rows(folder: Path, count: int) -> Path:
    """Write Banking77's test questions, each after similar training questions."""
    real_data.EXAMPLES = EXAMPLES
    known, asked = (real_data.read(f"banking77/{split}") for split in ("train", "test"))
    random.Random(real_data.SEED).shuffle(asked)
    rows = real_data.with_examples(known, real_data.LABELLING)(asked[:count], 0)
    pq.write_table(pa.Table.from_pylist(rows), folder / "labels.parquet")
    return folder / "labels.parquet"


def label_speeds(given: argparse.Namespace, folder: Path, rounds: Rounds, save: Callable[[], None]) -> None:
    """Run the labels job at each schedule, as `compare` does. First runs find how many rows take the asked seconds."""
    categories = str((real_data.DATA / "banking77/categories.json").resolve())

    def seconds(schedule: str, count: int) -> dict[str, Any]:
        values = job_values(given, label_rows(folder, count), folder / "answers", choices=categories)
        values["input"] = {"path": str(folder / "labels.parquet"), "id": "id", "messages": "messages"}
        values["schedule"] = LABELS_SCHEDULES[schedule]
        values["model"] |= {} if schedule == "one layer" else {"speed_adapter": ADAPTER}
        values["sampling"] = {}
        found, shards = run_job(given, folder, values)
        sums = {name: sum(shards[name].to_pylist()) for name in ("generate_seconds", "rows", "prompt_tokens", "errors")}
        assert sums["rows"] == count and not sums["errors"]
        print(f"  {schedule}: {sums}", file=sys.stderr, flush=True)
        return {**found, **sums}

    count = given.first_rows
    for schedule in reversed(LABELS_SCHEDULES):  # 1x last; each compiles its layers for all later runs
        took = seconds(schedule, count)["generate_seconds"]
    count = round(count * given.seconds / took)
    for _ in range(given.rounds):
        rounds.append({})
        for name in LABELS_SCHEDULES:
            rounds[-1][name] = seconds(name, count)
            save()


def table(rounds: Rounds) -> str:
    """Return medians by system; in brackets the median of the rounds' ratios to `LLM.generate`."""
    lines = ["| | running, tokens/s | whole command, tokens/s |", "|---|---:|---:|"]
    for name in rounds[0]:
        cells = []
        for span in ("running_s", "command_s"):
            speeds = [one[name]["tokens"] / one[name][span] for one in rounds]
            cells.append(f"{statistics.median(speeds):,.0f}")
            if PLAIN in rounds[0]:
                bare = [one[PLAIN]["tokens"] / one[PLAIN][span] for one in rounds]
                ratio = statistics.median(speed / plain for speed, plain in zip(speeds, bare, strict=True))
                cells[-1] += f" ({ratio:.3f})"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def label_table(rounds: Rounds, layers: int) -> str:
    """Return the actor's seconds, the speed-up against 1x and the ideal speed-up."""
    seconds = {name: statistics.median(one[name]["generate_seconds"] for one in rounds) for name in LABELS_SCHEDULES}
    one, full = seconds["one layer"], seconds["1x"]
    lines = ["| | actor's seconds | of 1x | ideal | of the ideal |", "|---|---:|---:|---:|---:|"]
    for name, depth in (("1x", layers), ("2x", round(layers / 2)), ("one layer", 1)):
        ideal = one + (full - one) * (depth - 1) / (layers - 1)
        shown = f"{full / seconds[name]:.2f} | {full / ideal:.2f} | {ideal / seconds[name]:.2f}"
        lines.append(f"| {name} | {seconds[name]:.1f} | {shown} |")
    return "\n".join(lines)


def plot(rounds: Rounds, file: Path) -> None:
    """Draw tokens a second by system as SVG: a bar for the median, a line for each round; running and whole command."""
    names, left, wide, high = list(rounds[0]), 170, 260, 26
    parts = []
    for panel, (span, title) in enumerate((("running_s", "while running"), ("command_s", "whole command"))):
        speeds = {name: [one[name]["tokens"] / one[name][span] for one in rounds] for name in names}
        scale = wide / max(max(values) for values in speeds.values())
        x = left + panel * (wide + 70)
        parts.append(f'<text x="{x}" y="16">{title}, tokens/s</text>')
        for row, (name, values) in enumerate(speeds.items()):
            y, median = 26 + row * high, statistics.median(values)
            parts += [f'<text x="4" y="{y + 14}">{name}</text>'] if panel == 0 else []
            parts.append(f'<rect x="{x}" y="{y}" width="{median * scale:.1f}" height="18" fill="#8ab"/>')
            parts += [f'<path d="M{x + value * scale:.1f} {y}v18" stroke="#124"/>' for value in values]
            parts.append(f'<text x="{x + max(values) * scale + 4:.1f}" y="{y + 14}">{median:,.0f}</text>')
    size = f'width="{left + 2 * (wide + 70)}" height="{30 + len(names) * high}"'
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/real/model"))
    parser.add_argument("--shape", help="random weights of this shape instead of --model")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-rows", type=int, default=64, help="in flight at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="on a CPU")
    parser.add_argument("--cache-bytes", type=int, default=2**30, help="KV cache on a CPU")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--systems", default=[JOB, PLAIN, RAY], type=lambda text: text.split(","))
    parser.add_argument("--without-ray", action="store_true", default=find_spec("ray") is None)
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--seconds", type=float, default=20, help="of a labels job at 1x")
    parser.add_argument("--first-rows", type=int, default=48, help="rows of the first labels jobs, which are not timed")
    parser.add_argument("--out", type=Path, default=Path("work/overhead"))
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.system:
        SYSTEMS[given.system](given, given.folder)
        return
    folder = given.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    if given.shape is not None:
        from shapes import write_unfilled

        given.model = folder / given.shape
        write_unfilled(given.shape, given.model)
    rounds: Rounds = []
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "device": device(given),
        "versions": {name: import_module(name).__version__ for name in ("vllm", "ray", "torch") if find_spec(name)},
        "rounds": rounds,
    }
    name = "labels" if given.labels else "overhead"

    def save() -> None:
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")

    (label_speeds if given.labels else compare)(given, folder.resolve(), rounds, save)
    layers = json.loads((Path(given.model) / "config.json").read_text())["num_hidden_layers"]
    text = label_table(rounds, layers) if given.labels else table(rounds)
    (given.out / f"{name}.md").write_text(text + "\n")
    print(text)
    if not given.labels:
        plot(rounds, given.out / f"{name}.svg")


def device(given: argparse.Namespace) -> str:
    """Return the name of the GPU, or else of the CPU with the number of threads."""
    if given.gpus:
        import torch

        return torch.cuda.get_device_name()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':', 1)[1].strip() if names else 'CPU'}, {given.threads} threads"


if __name__ == "__main__":
    main()
