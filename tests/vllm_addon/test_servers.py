"""The recipes of vLLM's server and of Ray Serve LLM answer as the builtin engine does, with a tiny model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-serve")
import vllm_cases as cases
from random_adapter import random_adapter
from tiny_checkpoint import SENTENCES
from transformers import AutoTokenizer

from actors.engine.schedule.schedule import ScheduleSpec

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes" / "vllm"
PROMPTS, TOKENS = list(SENTENCES), 12
STORED = ScheduleSpec(speedup=2, horizon=12, prompt="first")
ASKED = ScheduleSpec(speedup=2, decay="constant", prompt="first")  # as the recipes ask
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "block_size": cases.BLOCK,
    "enforce_eager": True,  # to compile takes longer than all else here
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 2**28,
}
SECONDS = 900  # against hanging


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A tiny model, its speed adapter, and the builtin engine's answers to `PROMPTS`."""
    base = cases.text_checkpoint(tmp_path_factory.mktemp("model") / "base")
    adapter = random_adapter(base, tmp_path_factory.mktemp("adapter"), STORED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(PROMPTS)["input_ids"]
    found = cases.library_answers(base, ASKED, ids, [TOKENS] * len(ids), adapter)
    assert len({tuple(answer) for answer in found}) > 1
    return base, adapter, [tokenizer.decode(answer, skip_special_tokens=True).rstrip("\ufffd") for answer in found]


def options() -> list[str]:
    """`OPTIONS` as arguments of `vllm serve`."""
    given: list[str] = []
    for name, value in OPTIONS.items():
        given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return given


@pytest.mark.parametrize("server", ["vllm serve", "Ray Serve LLM"])
def test_a_server_answers_as_the_library_engine(
    model: tuple[Path, Path, list[str]], server: str, tmp_path: Path
) -> None:
    base, adapter, wanted = model
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    if server == "vllm serve":
        shown = ["--served-model-name", "model", "--host", "127.0.0.1", "--port", port]
        run = ["sh", str(RECIPES / "serve.sh"), str(base), str(adapter), *shown, *options()]
    else:
        run = [sys.executable, str(RECIPES / "ray_serve_llm.py"), str(base), str(adapter), port, json.dumps(OPTIONS)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM": f"{sys.executable} -m vllm.entrypoints.openai.api_server",  # the CPU build of PyPI has no `vllm`
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(run, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        until = time.monotonic() + SECONDS
        while not _answers(f"{url}/models"):
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-4000:]
            time.sleep(1)
        body = {"model": "model", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            # vLLM leaves out a character that is incomplete at the end
            assert [choice["text"].rstrip("\ufffd") for choice in json.load(answer)["choices"]] == wanted
    finally:
        process.terminate()
        process.wait(SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(json.load(answer)["data"])
    except (urllib.error.URLError, OSError):
        return False
