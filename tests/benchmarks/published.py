"""The engine against its peers on a published model and real prompts: SmolLM2-135M-Instruct, E2E's facts in a chat.

    .venv/bin/python tests/benchmarks/published.py [--rows 300] [--max-rows 64] [--runs 3] [--threads 2] [--out FILE]
        [--peers vllm,llama.cpp-q8_0,llama.cpp-q4_1]

The model of `make real-model`, E2E's test prompts after two examples, greedy. Every contestant answers the same prompts
with as many new tokens each as the model's own answer at 1x has, in rounds taken in turn after one that only warms up;
medians of tokens a second of the whole run. The beginning that all prompts share is computed once by the engine, vLLM
(prefix caching on, emptied before each round) and llama.cpp, which takes the best of 8, 16, 32 and 64 rows in flight.
2x and 3x run the committed speed adapter. The ceiling is what 1x's work takes at the rates measured in the same run
(`ideal`), that beginning computed once. Peers (`make peers`) that are not installed are passed by, with a line.
Without the data sets: exit status 3. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402
from contestants import Timing, start_peers  # noqa: E402
from ideal import Shape, least, measure  # noqa: E402
from peak_memory import forget_peak, peak_bytes  # noqa: E402
from real_data import MODEL, WORK  # noqa: E402
from real_model import ADAPTER, FOLDER, GGUF, make_model  # noqa: E402
from speed import INSTALLED, PEERS, median, processor, rounds  # noqa: E402
from workloads import Workload  # noqa: E402

from actors.answers import Prompt  # noqa: E402
from actors.engine.model.loading import read_config  # noqa: E402
from actors.engine.scheduler import common_length  # noqa: E402
from actors.generator import Generator  # noqa: E402

NEW_TOKENS = 96  # at most, as configs/real/text.yaml has them
LLAMA_CPP = ("peer_llama_cpp.py", INSTALLED / "llama-cpp/bin/python")
GGUF_FILE = {"PEER_GGUF": str((ROOT / FOLDER / GGUF).absolute())}
OF_REAL_WEIGHTS = {
    "vllm": (*PEERS["vllm"][:2], {"PEER_LOAD_FORMAT": "auto", "PEER_PREFIX_CACHING": "1"}),
    "llama.cpp-q8_0": (*LLAMA_CPP, {**GGUF_FILE, "PEER_QUANTIZE": "Q8_0"}),
    "llama.cpp-q4_1": (*LLAMA_CPP, GGUF_FILE),
}


class Ours:
    """The engine at all its speeds, weights in bfloat16 and in 8 bits; fixed lengths are the rows' own parameters."""

    def __init__(self, max_rows: int, threads: int) -> None:
        self.options: dict[str, Any] = {"max_batch": max_rows, "threads": threads, "cumulative_logprob": False}
        weights = {"": None, " int8": "int8"}
        self.of_1x = {name: self._load(kind) for name, kind in weights.items()}
        fast: dict[str, Any] = {"schedule": {"speedup": 2.0}, "speed_adapter": str(ADAPTER)}
        adapted = {name: self._load(kind, **fast) for name, kind in weights.items()}
        self.engines = {}
        for name, one in adapted.items():
            self.engines[f"engine 1x{name}"] = self.of_1x[name]
            for speed in (2, 3):
                self.engines[f"engine {speed}x{name}"] = one.at(one.schedule_at(speed))

    def _load(self, weights: str | None, **more: Any) -> Generator:
        chosen = {"schedule": {"speedup": 1.0}, **more}
        return Generator(str(MODEL), weights=weights, sampling={"max_new_tokens": NEW_TOKENS}, **chosen, **self.options)

    def workload(self, prompts: list[list[int]]) -> Workload:
        """Lengths are those of the model's own answers, their end included."""
        answers = self.of_1x[""].answer([Prompt(tuple(ids), "bench", row) for row, ids in enumerate(prompts)])
        new = [len(answer.token_ids or ()) for answer in answers]
        return Workload("e2e chat", prompts, new, max(new))

    def answer(self, name: str, workload: Workload) -> Timing:
        generator = self.engines[name]
        rows = [
            Prompt(tuple(ids), "bench", row, sampling={"max_new_tokens": new, "ignore_eos": True})
            for row, (ids, new) in enumerate(zip(workload.prompts, workload.new, strict=True))
        ]
        generator.take_stats()
        forget_peak()
        began = time.perf_counter()
        answers = generator.answer(rows)
        seconds = time.perf_counter() - began
        assert [len(answer.token_ids or ()) for answer in answers] == workload.new
        stats = generator.take_stats()
        return Timing(seconds, workload.generated, peak_bytes(), stats.prefill_seconds, stats.decode_seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--max-rows", type=int, default=64, help="in flight at once")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default=list(OF_REAL_WEIGHTS), type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    make_model()
    if not (WORK / "text" / "test.parquet").is_file():
        ended = subprocess.run([sys.executable, str(ROOT / "tests/benchmarks/real_data.py"), "text"]).returncode
        if ended:
            sys.exit(ended)
    table = pq.read_table(WORK / "text" / "test.parquet", columns=["prompt"]).slice(0, options.rows)
    ours = Ours(options.max_rows, options.threads)
    gc.freeze()  # as an actor of the pipeline does
    workload = ours.workload(table["prompt"].to_pylist())
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        found = compare(ours, workload, options, Path(folder))
    print(json.dumps(found))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(ours: Ours, workload: Workload, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all, print a table; figures by contestant."""
    checkpoint = folder / "model"
    shutil.copytree(MODEL, checkpoint)  # a peer writes beside it
    chosen = {name: OF_REAL_WEIGHTS[name] for name in options.peers if name}
    peers = start_peers(chosen, checkpoint, options.threads, options.max_rows)
    contestants: dict[str, Callable[[], Timing]] = {
        name: partial(ours.answer, name, workload) for name in ours.engines
    } | {name: partial(peer.answer, workload) for name, peer in peers.items()}
    try:
        seen = rounds(contestants, options.runs)
    finally:
        for peer in peers.values():
            peer.close()
    lines = {name: _figures(timings[1:]) for name, timings in seen.items()}
    ceilings = measure(torch.bfloat16)
    shortest = least(
        [(len(prompt), new) for prompt, new in zip(workload.prompts, workload.new, strict=True)],
        ours.of_1x[""].schedule_at(1.0),
        Shape.of(read_config(MODEL)),
        ceilings,
        torch.bfloat16.itemsize,
        options.max_rows,
        common_length(workload.prompts),
    )
    lines["ceiling of 1x"] = {"tokens_per_second": workload.generated / shortest.whole, "peak_bytes": 0}
    prompt_tokens = sum(map(len, workload.prompts))
    rows = len(workload.prompts)
    print(f"SmolLM2-135M-Instruct (from Q4_1), {rows} rows, {prompt_tokens} prompt and {workload.generated} new tokens")
    print(f"  {'':20}{'tokens/s':>9}{'of 1x':>7}{'of vLLM':>9}{'peak MiB':>10}")
    for name, one in lines.items():
        of_vllm = one["tokens_per_second"] / lines["vllm"]["tokens_per_second"] if "vllm" in lines else float("nan")
        of_1x = one["tokens_per_second"] / lines["engine 1x"]["tokens_per_second"]
        print(
            f"  {name:20}{one['tokens_per_second']:9,.0f}{of_1x:7.2f}{of_vllm:9.2f}{one['peak_bytes'] / 2**20:10,.0f}"
        )
    return {
        "machine": processor(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "tests/benchmarks/published.py", *sys.argv[1:]]),
        "gflops": ceilings.flops / 1e9,
        "gigabytes_per_second": ceilings.bandwidth / 1e9,
        "peers": {name: peer.version for name, peer in peers.items()},
        "lines": lines,
    }


def _figures(timings: list[Timing]) -> dict[str, Any]:
    one = median(timings)
    return {
        "tokens_per_second": one.tokens / one.seconds,
        "seconds": [timing.seconds for timing in timings],
        "prefill_seconds": one.prefill,
        "decode_seconds": one.decode,
        "peak_bytes": max(timing.peak_bytes for timing in timings),
    }


if __name__ == "__main__":
    main()
