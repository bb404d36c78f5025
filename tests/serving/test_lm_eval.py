"""lm-eval's own client, `local-completions`, against its reference in transformers, on tasks from a local file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_server import running

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["cheap", "French", "riverside"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS = ["name[Zizzi] is", "The Eagle serves", "area[city centre]", "Alimentum", "a pub that families"]


@pytest.mark.slow
def test_lm_eval_scores_the_server_as_it_scores_transformers(
    chat_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": one, "answer": n % 3}) + "\n" for n, one in enumerate(QUESTIONS)))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def answers(model: str, arguments: dict[str, Any]) -> dict[str, list[Any]]:
        done = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=list(TASKS),
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
        )
        assert done is not None
        return {name: [row["filtered_resps"] for row in done["samples"][name]] for name in TASKS}

    with running(chat_checkpoint, schedule={"speedup": 1}) as server:
        url = f"{server.url}/v1/completions"
        client = {"model": "tiny", "base_url": url, "tokenizer": str(chat_checkpoint), "num_concurrent": 4}
        got = answers("local-completions", {**client, "max_length": 64, "tokenized_requests": True})
    want = answers(
        "hf",
        {
            "pretrained": str(chat_checkpoint),
            "dtype": "float32",
            "device": "cpu",
            "max_length": 64,
            "add_bos_token": False,
        },
    )
    assert got["texts"] == want["texts"] and len({str(text) for text in got["texts"]}) > 1
    for mine, theirs in zip(got["choices"], want["choices"], strict=True):
        for (score, is_greedy), (expected, expected_greedy) in zip(mine, theirs, strict=True):
            assert float(score) == pytest.approx(float(expected), abs=1e-3)
            assert str(is_greedy) == str(expected_greedy)
