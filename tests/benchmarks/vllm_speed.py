"""Throughput of vLLM on this device, plain and with the add-on: a checkpoint, or random weights of a model's shape.

    python tests/benchmarks/vllm_speed.py --model work/real/model --rows 32 --prompt-tokens 64 --new-tokens 64 \
        --memory 0.05 --rounds 5 --lines "plain;1x;uniform 2x;uniform 3x;one layer"    # on a CPU
    python tests/benchmarks/vllm_speed.py --shape llama-3-8b --rows 32,256,1024     # on a GPU, see gpu.sh
    python tests/benchmarks/vllm_speed.py --shape llama-3-8b --task labels --shared 384
    python tests/benchmarks/vllm_speed.py --schedule --rows 256,1024               # host work of the scheduler

Tasks: texts (each row generates --new-tokens), or labels (prompts that begin with the same --shared tokens, and one of
16 labels by a grammar, as `choices` makes it). Each line is an engine in a process of its own; its first run only warms
it up. With --rounds all lines are loaded at once and run in turn, else one after the other, and each is run twice.

Columns: rows and generated tokens a second of the whole run, prefill included; in brackets the ratio to plain vLLM;
step: median milliseconds of a decode step; ideal: ratio on the line through the times of plain vLLM and of one layer;
predicted: ratio and step by the model of time in predict.py, on an H200 only. Raw results come as they are measured.

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
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import predict
from shapes import write_unfilled

LABELS = range(300, 316)  # tokens
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ADD_ON = {"worker_cls": "actors.vllm.worker.SkipWorker", "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler"}
UNIFORM = {"decay": "constant", "prompt": "first"}
LINES: dict[str, dict[str, Any] | None] = {  # schedule and settings of the add-on; None: plain vLLM
    "plain": None,
    "1x": {"speedup": 1},
    "one layer": {"depths": [1], "prompt": "first"},
    "uniform 2x": {"speedup": 2, **UNIFORM},
    "uniform 3x": {"speedup": 3, **UNIFORM},
    **{
        f"falling {speed}x, {prompt}{', graphs' if graphs else ''}": {
            **{"speedup": speed, "prompt": prompt},
            **({"graphs": True} if graphs else {}),
        }
        for graphs in (False, True)
        for prompt in ("first", "full")
        for speed in (2, 3)
    },
}


def load(given: argparse.Namespace, folder: str) -> Any:
    """Return the engine of a line."""
    import vllm

    settings, more = LINES[given.line], dict[str, Any]()
    if settings is not None:
        is_falling = given.line.startswith("falling")
        settings = {**settings, "unadapted": True, "self_check": False}
        settings |= {"horizon": max(2, given.new_tokens)} if is_falling else {}
        more = {**ADD_ON, "additional_config": {"skipdecode": settings}, "enforce_eager": is_falling}
    return vllm.LLM(
        folder,
        load_format="auto" if given.model else "dummy",
        dtype="bfloat16",
        enable_prefix_caching=given.shared > 0,
        structured_outputs_config={"backend": "guidance"},
        max_model_len=given.prompt_tokens + given.new_tokens,
        max_num_seqs=given.max_rows or max(map(int, given.rows.split(","))),
        gpu_memory_utilization=given.memory,
        **{**more, **json.loads(given.options)},
    )


def serve(given: argparse.Namespace, folder: str) -> None:
    """Load a line's engine, and run as many rows as each line of standard input says; results go to standard output."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's own lines go to standard error
    began = time.perf_counter()
    llm = load(given, folder)
    start = time.perf_counter() - began
    for line in sys.stdin:
        print(json.dumps({"start_s": start, **measure(given, llm, int(line))}), file=replies)


def measure(given: argparse.Namespace, llm: Any, count: int) -> dict[str, Any]:
    """Run `count` rows once; return seconds, and counts where the add-on has wrapped layers."""
    import vllm

    engine, chance = llm.llm_engine, random.Random(count)
    core = engine.engine_core.engine_core
    skipper: Any = getattr(core.model_executor.driver_worker.worker, "skipper", None)
    vocabulary = llm.model_config.get_vocab_size()
    common = [chance.randrange(vocabulary) for _ in range(given.shared)]
    own = given.prompt_tokens - given.shared
    prompts = [{"prompt_token_ids": common + [chance.randrange(vocabulary) for _ in range(own)]} for _ in range(count)]
    if given.task == "labels":
        rule = " | ".join(f"<[{token}]>" for token in LABELS)
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: {rule}'
        form = vllm.sampling_params.StructuredOutputsParams(grammar=grammar)
        params = vllm.SamplingParams(temperature=0, max_tokens=1, structured_outputs=form, detokenize=False)
    else:
        params = vllm.SamplingParams(temperature=0, max_tokens=given.new_tokens, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    tokens: list[int] = []  # scheduled in each step

    def note(output: Any) -> None:
        tokens.append(output.total_num_scheduled_tokens)

    with ExitStack() as stack:
        steps = _watched(stack, engine, "step")
        _watched(stack, core.scheduler, "schedule", note)
        plans = [] if skipper is None else _watched(stack, skipper, "_prepare")
        if skipper is not None:
            skipper.counts.clear()
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        whole = time.perf_counter() - began
    found = [answer.outputs[0].token_ids for answer in answers]
    if given.task == "labels":
        assert all(len(ids) == 1 and ids[0] in LABELS for ids in found), "an answer is no label"
    decode = [seconds for seconds, given in zip(steps, tokens, strict=False) if given <= count]
    result = {
        "seconds": whole,
        "tokens": sum(map(len, found)),
        "steps": len(steps),
        "step_ms": 1e3 * statistics.median(decode) if decode else None,
    }
    if skipper is not None and (counts := skipper.counts)["passes"]:
        result |= {"layers_per_token": counts["token_layers"] / counts["tokens"], "overhead": sum(plans) / whole}
    return result


def measure_schedule(rows: int, block_size: int) -> dict[str, Any]:
    """Measure `schedule()` in steps of `rows` rows that each generate a token, without and with the short way."""
    os.environ.update(ENVIRONMENT)
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


def _watched(stack: ExitStack, owner: Any, name: str, note: Callable[[Any], None] = lambda result: None) -> list[float]:
    """Return a list to which each call of a method adds its seconds until the stack is closed. note: gets results."""
    function, seconds = getattr(owner, name), list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            result = function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - began)
        note(result)
        return result

    setattr(owner, name, timed)
    stack.callback(setattr, owner, name, function)
    return seconds


class Line:
    """An engine in a process of its own, which sleeps while others run."""

    def __init__(self, name: str, folder: str, log: Path, limit_s: float) -> None:
        self.name, self.log = name, log
        command = [sys.executable, __file__, *sys.argv[1:], "--line", name, "--folder", folder]
        with log.open("w") as file:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=file, text=True, env=os.environ | ENVIRONMENT
            )
        self.timer = threading.Timer(limit_s, self.process.kill)
        self.timer.start()

    def run(self, count: int) -> dict[str, Any]:
        """Return the figures of a run, or of a process that has ended only the end of its log as `failed`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(count, file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return {"line": self.name, "rows": count, **json.loads(answer)}
        self.process.wait()
        return {"line": self.name, "rows": count, "failed": self.log.read_text(errors="replace")[-1500:]}

    def close(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.wait()


def results(given: argparse.Namespace, config: dict[str, Any], folder: str, logs: Path) -> list[dict[str, Any]]:
    """Run all lines; write raw results as they come. A line that fails, e.g. for memory, costs no other line."""
    rows, found = [int(count) for count in given.rows.split(",")], list[dict[str, Any]]()
    first = {count: count if given.task == "texts" else min(count, 64) for count in rows}  # rows of the warm-up

    def add(result: dict[str, Any]) -> None:
        found.append({"task": given.task, "shared": given.shared, **result})
        given.out.write_text(json.dumps({"command": ["python", *sys.argv], "results": found}, indent=1) + "\n")
        shown = result.get("failed") or f"{result['seconds']:.2f} s, {result['rows'] / result['seconds']:,.1f} rows/s"
        if given.predict:
            milliseconds, _ = predict.run(config, LINES[result["line"]], given, result["rows"])
            shown += f"; predicted {milliseconds / 1000:.2f} s"
        print(f"  {result['line']}, {result['rows']} rows: {shown}", file=sys.stderr, flush=True)

    names = given.lines.split(";")
    with ExitStack() as stack:

        def started(name: str, into: ExitStack) -> Line:
            line = Line(name, folder, logs / f"{name}.log".replace(" ", "-"), given.limit)
            into.callback(line.close)
            return line

        if given.rounds:
            lines = []
            for name in names:
                lines.append(started(name, stack))
                for count in rows:
                    lines[-1].run(first[count])  # one after the other: loading takes the machine
            for number in range(given.rounds):
                for line in lines[number % len(lines) :] + lines[: number % len(lines)]:
                    for count in rows:
                        add(line.run(count))
            return found
        for name in names:
            with ExitStack() as alone:
                line = started(name, alone)
                for count in rows:
                    line.run(first[count])
                    add(line.run(count))
    return found


def table(found: list[dict[str, Any]], config: dict[str, Any], given: argparse.Namespace) -> str:
    """Return medians as a table. The ratios are medians of the rounds' ratios."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for one in found:
        if "seconds" in one:
            seconds[one["rows"], one["line"]].append(one["seconds"])
    layers = config["num_hidden_layers"]
    text = [
        "| rows | line | rows/s | tokens/s | of plain | ideal | step, ms | predicted | start, s |",
        "|---:|---|" + "---:|" * 7,
    ]
    for count, name in seconds:
        one = next(one for one in reversed(found) if (one["rows"], one["line"]) == (count, name) and "seconds" in one)
        took, plain, floor = seconds[count, name], seconds.get((count, "plain")), seconds.get((count, "one layer"))
        of_plain = ideal = predicted = ""
        if plain:
            of_plain = f"{statistics.median(base / own for base, own in zip(plain, took, strict=False)):.3f}"
        depth = predict.constant_depth(predict.schedule_of(LINES[name], layers, given.new_tokens))
        if plain and floor and depth:
            share = (depth - 1) / (layers - 1)
            ideals = [base / (low + (base - low) * share) for base, low in zip(plain, floor, strict=False)]
            ideal = f"{statistics.median(ideals):.3f}"
        if given.predict:
            (base, _), (own, step) = (predict.run(config, LINES[line], given, count) for line in ("plain", name))
            predicted = f"{base / own:.2f}" + (f", {step:.1f} ms" if step else "")
        whole = statistics.median(took)
        cells = [str(count), name, f"{count / whole:,.1f}", f"{one['tokens'] / whole:,.0f}", of_plain, ideal]
        cells += ["" if one["step_ms"] is None else f"{one['step_ms']:.2f}"]
        cells += [predicted, f"{one['start_s']:.0f}"]
        text.append(f"| {' | '.join(cells)} |")
    text += [f"{one['line']}, {one['rows']} rows FAILED: {one['failed']}" for one in found if "failed" in one]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default random weights of --shape")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--task", choices=("texts", "labels"), default="texts")
    parser.add_argument("--rows", default="32,256,1024", help="of texts: in flight at once")
    parser.add_argument("--max-rows", type=int, help="in flight at once; default: all rows")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shared", type=int, default=0, help="tokens with which all prompts begin")
    parser.add_argument("--memory", type=float, default=0.9, help="share of memory; on a CPU 0.05")
    parser.add_argument("--lines", default="plain;uniform 2x;uniform 3x;one layer", help="some of: " + "; ".join(LINES))
    parser.add_argument("--options", default="{}", help="further engine arguments of vLLM for all lines, as JSON")
    parser.add_argument("--rounds", type=int, default=0, help="runs of each line, all loaded at once and in turn")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for a line")
    parser.add_argument("--predict", action="store_true", help="show what predict.py says of an H200")
    parser.add_argument("--out", type=Path, default=Path("work/vllm-speed.json"))
    parser.add_argument("--schedule", action="store_true", help="measure the scheduler alone")
    parser.add_argument("--block-sizes", default="32,64,128", help="with --schedule; 16 on a GPU")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.line is not None:
        serve(given, given.folder)
        return
    if given.schedule:
        for count, size in itertools.product(map(int, given.rows.split(",")), given.block_sizes.split(",")):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(json.dumps(pool.apply(measure_schedule, (count, int(size)))), flush=True)
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or str(Path(scratch, given.shape))
        if not given.model:
            write_unfilled(given.shape, Path(folder))
        logs = given.out.with_suffix(".logs")
        logs.mkdir(exist_ok=True)
        config = json.loads(Path(folder, "config.json").read_text())
        found = results(given, config, folder, logs)
    print(table(found, config, given))


if __name__ == "__main__":
    main()
