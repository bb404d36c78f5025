"""Throughput of vLLM on this device, plain and with the add-on, with random weights of a model's shape. See gpu.sh.

    python tests/benchmarks/vllm_speed.py --shape llama-3-8b --rows 32,256,1024 --out work/gpu/vllm.json

Plain vLLM has its CUDA graphs; the add-on runs eagerly, and so does plain vLLM in a further line, which tells how much
of the difference is launches. Each line is a process of its own, and its second run is timed. Generated tokens a second
of the whole run, prefill included; builds: metadata of subsets a forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
LINES: dict[str, tuple[float | None, dict[str, Any]]] = {  # speed-up of the add-on, options of vLLM
    "plain": (None, {}),
    "plain, eager": (None, {"enforce_eager": True}),
    "2x": (2, ADD_ON),
    "3x": (3, ADD_ON),
}


def measure(shape: str, line: str, rows: list[int], prompt_tokens: int, new_tokens: int) -> list[dict[str, Any]]:
    """Throughput of a line at each number of rows in flight."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from shapes import SHAPES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    speedup, options = LINES[line]
    skipping = {"speedup": speedup, "horizon": new_tokens, "unadapted": True}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[shape]()
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=prompt_tokens + new_tokens,
            max_num_seqs=max(rows),
            additional_config={} if speedup is None else {"skipdecode": skipping},
            **options,
        )
    vocabulary = llm.model_config.get_vocab_size()
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    chance = random.Random(0)
    for count in rows:
        prompts = [
            {"prompt_token_ids": [chance.randrange(vocabulary) for _ in range(prompt_tokens)]} for _ in range(count)
        ]
        for _ in range(2):
            before = {} if speedup is None else llm.collective_rpc("skip_counts")[0]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
        result = {"line": line, "rows": count, "tokens_per_second": count * new_tokens / seconds}
        if speedup is not None:
            counts = {name: value - before.get(name, 0) for name, value in llm.collective_rpc("skip_counts")[0].items()}
            result |= {
                "builds_per_pass": counts["builds"] / counts["passes"],
                "layers_per_token": counts["token_layers"] / counts["tokens"],
            }
        found.append(result)
    return found


def table(results: list[dict[str, Any]], rows: list[int]) -> str:
    """Tokens a second, and in brackets the ratio to plain vLLM."""
    speeds = {(result["line"], result["rows"]): result["tokens_per_second"] for result in results}
    text = ["| tokens/s at rows | " + " | ".join(map(str, rows)) + " |", "|---|" + "---:|" * len(rows)]
    for line in dict.fromkeys(line for line, _ in speeds):
        cells = [
            f"{speeds[line, count]:,.0f}" + (f" ({speeds[line, count] / plain:.2f})" if plain else "")
            for count in rows
            for plain in [speeds.get(("plain", count))]
        ]
        text.append(f"| {line} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--rows", default="32,256,1024")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--lines", default=";".join(LINES), help="some of: " + "; ".join(LINES))
    parser.add_argument("--out", type=Path, default=Path("work/gpu/vllm.json"))
    parser.add_argument("--line", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = [int(count) for count in given.rows.split(",")]
    if given.line is not None:
        results = measure(given.shape, given.line, rows, given.prompt_tokens, given.new_tokens)
        given.out.write_text(json.dumps(results))
        return
    results = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for line in given.lines.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            # a line that fails, e.g. for memory, costs no other line
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], f"--line={line}", f"--out={part}"])
            results += json.loads(part.read_text()) if done.returncode == 0 else []
        given.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results, rows) if results else "no line was measured")


if __name__ == "__main__":
    main()
