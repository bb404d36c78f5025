"""A published model with its published speed adapter: by `LLM`, `vllm run-batch`, `vllm serve` and `ray.data.llm`."""

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

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import vllm
import vllm_cases as cases
from transformers import AutoTokenizer

from actors.engine.schedule.file import load_spec

ROOT = Path(__file__).parents[2]
MODEL, ADAPTER = ROOT / "work" / "real" / "model", ROOT / "configs" / "real" / "speed-adapter"
SYSTEM = "You write one short paragraph that describes a place from the given facts, and uses every fact."
FACTS = [
    "name[The Plough], eatType[pub], food[French], priceRange[less than £20], customer rating[high]",
    "name[Alimentum], area[city centre], familyFriendly[no]",
    "name[Blue Spice], eatType[coffee shop], customer rating[5 out of 5]",
    "name[Zizzi], food[Italian], near[Burger King]",
]
CHATS = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": facts}] for facts in FACTS]
SETTINGS: dict[str, dict[str, Any]] = {
    "falling": {"speed_adapter": str(ADAPTER), "speedup": 2},
    "constant": {"speed_adapter": str(ADAPTER), "speedup": 2, "decay": "constant"},
}
TOKENS = 48
OPTIONS: dict[str, Any] = {
    "worker_cls": "actors.vllm.worker.SkipWorker",
    "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
    "dtype": "float32",
    "max_model_len": 320,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.3,
}
if not (MODEL / "config.json").is_file():
    pytest.skip("no model in work/real/model: make real-model", allow_module_level=True)


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[str]]:
    """The builtin engine's answers."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    stored = load_spec(ADAPTER, 30)
    assert stored is not None
    found = {}
    for name, settings in SETTINGS.items():
        spec = stored.overridden({key: value for key, value in settings.items() if key != "speed_adapter"})
        answers = cases.library_answers(MODEL, spec, prompts, [TOKENS] * len(prompts), ADAPTER)
        ends = [[*answer, tokenizer.eos_token_id].index(tokenizer.eos_token_id) for answer in answers]
        found[name] = [tokenizer.decode(answer[:end]).strip() for answer, end in zip(answers, ends, strict=True)]
    return found


def command(module: str, *parts: str) -> list[str]:
    """Of `vllm run-batch` or `vllm serve`: the program `vllm` itself does not start with the CPU build of PyPI."""
    given = ["--model", str(MODEL), "--served-model-name", "model"]
    for name, value in OPTIONS.items():
        given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    given += ["--additional-config", json.dumps({"skipdecode": SETTINGS["constant"]})]
    return [sys.executable, "-m", f"vllm.entrypoints.openai.{module}", *given, *parts]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def body(chat: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "model", "messages": chat, "max_tokens": TOKENS, "temperature": 0}


def test_llm_answers_with_the_adapter_as_the_library_engine(wanted: dict[str, list[str]]) -> None:
    """With a schedule that falls; the other programs below have a constant depth, and vLLM compiles the model."""
    config = {"skipdecode": SETTINGS["falling"]}
    llm = vllm.LLM(str(MODEL), enforce_eager=True, additional_config=config, **OPTIONS)
    try:
        params = vllm.SamplingParams(temperature=0, max_tokens=TOKENS)
        answers = llm.chat(CHATS, params, use_tqdm=False)  # type: ignore[arg-type]
        assert [answer.outputs[0].text.strip() for answer in answers] == wanted["falling"]
    finally:
        llm.llm_engine.engine_core.shutdown()
        cases.cleanup_dist_env_and_memory()


def test_an_unadapted_model_in_bfloat16_passes_the_self_check() -> None:
    """Such a model magnifies rounding to 16 bits from layer to layer."""
    settings = {"speedup": 2, "horizon": TOKENS, "unadapted": True}
    with cases.engine(MODEL, settings, dtype="bfloat16") as llm:
        assert cases.answers(llm, [[5, 6, 7]], [4])


def test_run_batch_answers_a_batch_file(wanted: dict[str, list[str]], tmp_path: Path) -> None:
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(chat)}
        for number, chat in enumerate(CHATS)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    run = command("run_batch", "-i", str(source), "-o", str(target))
    done = subprocess.run(
        run, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    texts = [lines[str(number)]["response"]["body"]["choices"][0]["message"]["content"] for number in range(len(CHATS))]
    assert [text.strip() for text in texts] == wanted["constant"]


def test_serve_answers_requests(wanted: dict[str, list[str]], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    _, _, program, _, _, *options = command("api_server", "--host", "127.0.0.1", "--port", str(port))
    recipe = ROOT / "configs" / "recipes" / "vllm" / "serve.sh"
    run = ["sh", str(recipe), str(MODEL), str(ADAPTER), *options]
    with (tmp_path / "log").open("w") as log:
        env = environment() | {"VLLM": f"{sys.executable} -m {program}"}
        server = subprocess.Popen(run, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        for _ in range(900):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        texts = []
        for chat in CHATS[:2]:
            data, headers = json.dumps(body(chat)).encode(), {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data, headers)) as answer:
                texts.append(json.load(answer)["choices"][0]["message"]["content"].strip())
        assert texts == wanted["constant"][:2]
    finally:
        server.terminate()
        server.wait(timeout=600)


def test_ray_data_llm_answers_a_dataset(wanted: dict[str, list[str]], tmp_path: Path) -> None:
    """The recipe's program; what it sets itself is given again with the same values."""
    program = ROOT / "configs" / "recipes" / "vllm" / "ray_data_llm.py"
    run = [sys.executable, str(program), str(MODEL), str(ADAPTER), json.dumps(OPTIONS)]
    env = environment() | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
    assert [answer["answer"].strip() for answer in answers] == wanted["constant"][: len(answers)] and len(answers) == 2
