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
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import contestants
import pyarrow.parquet as pq
import torch
from ideal import Shape, least, measure
from real_data import MODEL, NO_DATA, WORK, write_rows
from real_model import ADAPTER, FOLDER, GGUF, make_model
from workloads import Workload

from actors.answers import Prompt
from actors.engine.model.loading import inspect, read_config, with_adapter
from actors.engine.scheduler import common_length
from actors.generator import Generator
from actors.settings import EngineSettings

NEW_TOKENS = 96  # at most, as configs/real/text.yaml has them
LLAMA_CPP = ("peer_llama_cpp.py", contestants.INSTALLED / "llama-cpp/bin/python")
GGUF_FILE = {"PEER_GGUF": str((FOLDER / GGUF).absolute())}
OF_REAL_WEIGHTS = {
    "vllm": (*contestants.PEERS["vllm"][:2], {"PEER_LOAD_FORMAT": "auto", "PEER_PREFIX_CACHING": "1"}),
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
        trained = with_adapter(inspect(str(MODEL)), str(ADAPTER))
        self.engines = {}
        for name, one in adapted.items():
            self.engines[f"engine 1x{name}"] = self.of_1x[name]
            for speed in (2, 3):
                self.engines[f"engine {speed}x{name}"] = one.at(trained.schedule({"speedup": speed}))

    def _load(self, weights: str | None, **more: Any) -> Generator:
        chosen = {"schedule": {"speedup": 1.0}, **more}
        return Generator(
            EngineSettings(
                str(MODEL), weights=weights, sampling={"max_new_tokens": NEW_TOKENS}, **chosen, **self.options
            )
        )

    def workload(self, prompts: list[list[int]]) -> Workload:
        """Lengths are those of the model's own answers, their end included."""
        answers = self.of_1x[""].answer([Prompt(tuple(ids), "bench", row) for row, ids in enumerate(prompts)])
        return Workload(prompts, [len(answer.token_ids or ()) for answer in answers])

    def answer(self, name: str, workload: Workload) -> contestants.Timing:
        generator = self.engines[name]
        rows = [
            Prompt(tuple(ids), "bench", row, sampling={"max_new_tokens": new, "ignore_eos": True})
            for row, (ids, new) in enumerate(zip(workload.prompts, workload.new, strict=True))
        ]
        return contestants.timed(workload, partial(generator.answer, rows), generator.engine)


def main() -> None:
    """Measure and print."""
    options = contestants.comparison(__doc__, 300, 64, OF_REAL_WEIGHTS).parse_args()
    make_model()
    if not (WORK / "text" / "test.parquet").is_file() and not write_rows("text"):
        sys.exit(NO_DATA)
    rows = pq.read_table(WORK / "text" / "test.parquet", columns=["prompt"]).slice(0, options.rows)
    ours = Ours(options.max_rows, options.threads)
    gc.freeze()  # as an actor of the pipeline does
    workload = ours.workload(rows["prompt"].to_pylist())
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        found = compare(ours, workload, options, Path(folder, "model"))
    print(json.dumps(found))
    contestants.save(found, options.out)


def compare(ours: Ours, workload: Workload, options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Time all, print a table; figures by contestant."""
    shutil.copytree(MODEL, checkpoint)  # a peer writes beside it
    with contestants.running_peers(OF_REAL_WEIGHTS, checkpoint, options) as peers:
        runners = {name: partial(ours.answer, name, workload) for name in ours.engines}
        seen = contestants.rounds(runners, peers, workload, options.runs)
    lines = {name: contestants.figures(timings) for name, timings in seen.items()}
    ceilings = measure(torch.bfloat16)
    shortest = least(
        [(len(prompt), new) for prompt, new in zip(workload.prompts, workload.new, strict=True)],
        ours.of_1x[""].schedule,
        Shape.of(read_config(MODEL)),
        ceilings,
        torch.bfloat16.itemsize,
        options.max_rows,
        common_length(workload.prompts),
    )
    lines["ceiling of 1x"] = {"tokens/s": workload.generated / shortest.whole}
    for title, name in (("of 1x", "engine 1x"), ("of vLLM", "vllm")):
        for one in lines.values() if name in lines else ():
            one[title] = one["tokens/s"] / lines[name]["tokens/s"]
    rows, prompt_tokens = len(workload.prompts), sum(map(len, workload.prompts))
    print(f"SmolLM2-135M-Instruct (from Q4_1), {rows} rows, {prompt_tokens} prompt and {workload.generated} new tokens")
    print(contestants.table(lines))
    versions = {name: peer.version for name, peer in peers.items()}
    return {"facts": contestants.facts(options, ceilings), "peers": versions, "lines": lines}


if __name__ == "__main__":
    main()
