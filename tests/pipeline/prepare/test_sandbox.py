"""What a template may not do: take a job's time, or run what lies in the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from memory_probe import watch_peak
from prompt_specs import spec_of

from actors.engine.model.loading import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.prepare import tokenizer as tokenizers
from pipeline.prepare.chat import Chat, render_chat
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.templates import render

ENDLESS = """
import os
import sys
from pathlib import Path
import pyarrow as pa
from pipeline.prepare import stage
from pipeline.config.input import InputConfig
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR
from pipeline.input.rows import from_ipc, to_ipc
from pipeline.runtime.quarantine import Quarantine
from pipeline.storage.folder import LocalFolder
stage.DEADLINE_SECONDS = stage.SECONDS_PER_ROW = 0.1
forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
template = "{{ q }}{% if q == 'bad' %}" + forever + "{% endif %}"
rows = to_ipc(pa.table({"q": ["good", "bad", "fine"]}))
batch = {"shard": [0], "url": ["a"], "first_row": [0], "rows": [rows]}
quarantine = Quarantine(LocalFolder("out", Path(sys.argv[2])), "run", 2, "prepare")
spec = PromptSpec(sys.argv[1], 300, 64, InputConfig(path=["in"], template=template))
stage.tokenizer_of(sys.argv[1])  # its imports take seconds
for _ in range(8):
    if os.fork() == 0:
        [done] = stage.prepare(batch, spec, quarantine)["rows"]
        print(from_ipc(done)[ERROR].to_pylist(), flush=True)
        os._exit(0)
    if os.wait()[1] == 0:
        break
"""


def test_a_template_that_never_ends_costs_its_row_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Its process ends at the deadline, and the next one prepares the shard again, as Ray does it."""
    command = [sys.executable, "-c", ENDLESS, str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Timeout" in done.stderr
    assert done.stdout == "[None, 'the process died 2 times while it worked on this row alone', None]\n", done.stderr


@pytest.mark.parametrize(
    "template",
    ["{% for a in x %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"],
)
def test_a_template_that_python_cannot_compile_is_one_line(template: str) -> None:
    with pytest.raises(ValueError, match=r"^template: [^\n]+$"):
        render(template, {"x": []})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ q['__class__'] }}",
        "{{ q | attr('__class__') }}",
        "{{ '{0.__class__}'.format(q) }}",
        "{{ tags.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match=r"^template: [^\n]+$"):
        render(template, {"q": "a", "tags": ["x"]})


def test_values_of_rows_are_not_rendered_as_templates(chat_checkpoint: Path) -> None:
    evil = "{{ 7 * 7 }}{% for a in range(9) %}x{% endfor %}{# gone #}"
    assert render("{{ q }}", {"q": evil}) == evil
    assert render("{{ '%s' | format(q) }}{{ [q] | join }}", {"q": evil}) == evil * 2
    tokenizer = load_tokenizer(chat_checkpoint)
    messages = [{"role": "user", "content": evil, "name": evil}]
    text, _ = render_chat(tokenizer, Chat(system=evil), messages)
    assert text == f"<s>[system]{evil}</s>[user]{evil}({evil})</s>[assistant]"


def test_row_errors_are_short() -> None:
    with pytest.raises(ValueError, match=r"^template: UndefinedError") as caught:
        render("{{ meta['" + "x" * 50_000 + "'] }}", {"meta": {}})
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize("settings", [{}, {"template": "{{ prompt }}"}])
def test_a_prompt_longer_than_the_context_of_longest_tokens_is_refused_untokenized(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    load_tokenizer(checkpoint)
    tokenized: list[str] = []
    monkeypatch.setattr(
        "pipeline.prepare.prompts.tokenize",
        lambda checkpoint, texts, special_tokens: iter([tokenized.append(text) or [5] for text in texts]),  # type: ignore[func-returns-value]
    )
    table, peak = pa.table({"prompt": ["word " * 10_000_000, "fine"]}), watch_peak()
    first, second = prepare_table(table, spec_of(checkpoint, **settings))[ERROR].to_pylist()
    assert first.startswith("prompt of at least ") and first.endswith("tokens leaves no room in a context of 64")
    assert second is None and tokenized == ["fine"] and peak() < 400 * 2**20


def test_truncation_reads_the_end_of_a_huge_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.prepare.prompts.TRUNCATED_CHARACTERS", 100_000)
    text = "word " * 30_000 + "at the end"
    done = prepare_table(
        pa.table({"prompt": [text]}),
        spec_of(checkpoint, params=SamplingParams(max_new_tokens=10), too_long="truncate_left"),
    )
    assert done[ERROR].to_pylist() == [None]
    assert done[PROMPT_IDS].to_pylist() == [load_tokenizer(checkpoint)(text)["input_ids"][-54:]]


def test_a_text_that_is_not_long_is_counted_exactly(checkpoint: Path) -> None:
    text = "x" * tokenizers.SHORT_CHARACTERS
    tokens = len(load_tokenizer(checkpoint)(text)["input_ids"])
    done = prepare_table(pa.table({"prompt": [text]}), spec_of(checkpoint))
    assert done[ERROR].to_pylist() == [f"prompt of {tokens} tokens leaves no room in a context of 64"]
