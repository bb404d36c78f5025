"""What a template may not do: take a job's time, or run what lies in the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from memory_probe import watch_peak

from actors.engine.model.loading import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.prepare import tokenizer as tokenizers
from pipeline.prepare.chat import Chat, render_chat
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.templates import render

ENDLESS = """
import sys
from pathlib import Path
import pyarrow as pa
from pipeline.prepare import stage
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
[done] = stage.prepare(batch, PromptSpec(sys.argv[1], 300, 64, template=template), quarantine)["rows"]
print(from_ipc(done)[ERROR].to_pylist())
"""


def test_a_template_that_never_ends_costs_its_row_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Its process ends at the deadline, and the next one prepares the shard again, as Ray does it."""
    command = [sys.executable, "-c", ENDLESS, str(checkpoint), str(tmp_path)]
    for _ in range(8):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            break
        assert "Timeout" in done.stderr
    assert done.stdout == "[None, 'the process died 2 times while it worked on this row alone', None]\n", done.stderr


def test_large_values_within_the_bounds_are_made() -> None:
    assert len(render("{{ q * 1000000 }}", {"q": "abc"})) == 3_000_000
    long = "word " * 200_000
    assert render("{{ doc | replace('x', 'y') | trim }}", {"doc": long}) == long.strip()
    assert render("{{ form.replace('DOC', doc) }}", {"form": "a DOC b", "doc": long}) == f"a {long} b"
    assert render("{{ docs | join('\n---\n') }}", {"docs": [long] * 3}) == "\n---\n".join([long] * 3)
    assert render("{{ '%s: %5.2f' % (doc, 1) }}", {"doc": long}).startswith("word ")
    assert render("{{ doc | wordwrap(79) }}", {"doc": long}).count("\n") > 10_000
    assert render("{{ 'x' | center(80) }}{{ 3.14159 | round(2) }}{{ [1, 2] | sum }}", {}).split() == ["x", "3.143"]
    assert render("{{ {'a': [1, q]} | tojson(2) }}{{ 2 ** 10 }}", {"q": "b"}).endswith("}1024")


DOC = "word " * 500_000
SANE: list[tuple[str, dict[str, Any], str]] = [
    ("{{ 'Report of 20240131: %s' % t }}", {"t": "a"}, "Report of 20240131: a"),
    ("{{ 'Call 18005551234, {}'.format(t) }}", {"t": "a"}, "Call 18005551234, a"),
    ("{{ 'No. 12345678 %s' | format(1) }}", {}, "No. 12345678 1"),
    ("{{ '%d%% of %(x)s' % {'x': 1} if false else '100%% %s' % 1 }}", {}, "100% 1"),
    ("{{ ', '.join(t | map('upper')) }}", {"t": ["a", "b"]}, "A, B"),
    ("{{ ', '.join(t | map(attribute='type')) }}", {"t": [{"type": "x"}] * 2}, "x, x"),
    ("{{ '{} {} {} {} {}'.format('a', 'b', 'c', 'd', d) }}", {"d": DOC}, f"a b c d {DOC}"),
    ("{{ '%s %s %s %s %s' % ('a', 'b', 'c', 'd', d) }}", {"d": DOC}, f"a b c d {DOC}"),
    ("{{ '%(d)s %(a)s %(a)s %(a)s %(a)s' % {'a': 1, 'd': d} }}", {"d": DOC}, f"{DOC} 1 1 1 1"),
    ("{{ '{d} {a} {a} {a} {a}'.format(a=1, d=d) }}", {"d": DOC}, f"{DOC} 1 1 1 1"),
    ("{{ '{{{{{{{{%s' % d }}", {"d": DOC}, "{" * 8 + DOC),
    ("{{ d.split()[:100] | join(' ') }}", {"d": DOC}, "word " * 99 + "word"),
    ("{{ d.split() | map('upper') | list | length }}", {"d": DOC[:250_000]}, "50000"),
    ("{{ d.splitlines() | length }}", {"d": "a\n" * 900_000}, "900000"),
    ("{{ d.split() | batch(3) | list | length }}", {"d": DOC}, "166667"),
    ("{{ (d ~ d ~ d) | replace('w', 'W') | length }}", {"d": DOC}, "7500000"),
    ("{{ d.translate({119: 'vv'}) | length }}", {"d": DOC}, "3000000"),
    ("{{ d | indent(4) | length }}", {"d": "ab\n" * 900_000}, str(900_000 * 7 - 4)),
    ("{{ (d | wordwrap(79, wrapstring='\n    ')).count('\n') > 9999 }}", {"d": DOC[:500_000]}, "False"),
    ("{{ d | tojson(indent=4) | length }}", {"d": "x" * 1_800_000}, "1800002"),
    ("{{ m | tojson(indent=2) | length }}", {"m": [{"role": "user", "content": DOC}] * 2}, "5000096"),
    ("{% for i in range(300) %}{{ (d | trim)[:1] }}{% endfor %}", {"d": DOC}, "w" * 300),
]


@pytest.mark.parametrize(("template", "row", "text"), SANE, ids=[one[0][:60] for one in SANE])
def test_ordinary_templates_over_large_documents(template: str, row: dict[str, Any], text: str) -> None:
    assert render(template, row) == text


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
        "{{ q.__init__.__globals__ }}",
        "{{ q['__class__'] }}",
        "{{ q | attr('__class__') }}",
        "{{ '{0.__class__}'.format(q) }}",
        "{{ tags.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
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


def spec(checkpoint: Path, **changes: Any) -> PromptSpec:
    sampling = SamplingParams(max_new_tokens=10)
    return PromptSpec(str(checkpoint), 300, 64, **{"column": "prompt", "sampling": sampling, **changes})


@pytest.mark.parametrize("settings", [{}, {"column": None, "template": "{{ prompt }}"}])
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
    first, second = prepare_table(table, spec(checkpoint, **settings))[ERROR].to_pylist()
    assert first.startswith("prompt of at least ") and first.endswith("tokens leaves no room in a context of 64")
    assert second is None and tokenized == ["fine"] and peak() < 400 * 2**20


def test_truncation_reads_the_end_of_a_huge_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.prepare.prompts.TRUNCATED_CHARACTERS", 100_000)
    text = "word " * 30_000 + "at the end"
    done = prepare_table(pa.table({"prompt": [text]}), spec(checkpoint, too_long="truncate_left"))
    assert done[ERROR].to_pylist() == [None]
    assert done[PROMPT_IDS].to_pylist() == [load_tokenizer(checkpoint)(text)["input_ids"][-54:]]


def test_a_text_that_is_not_long_is_counted_exactly(checkpoint: Path) -> None:
    text = "x" * tokenizers.SHORT_CHARACTERS
    tokens = len(load_tokenizer(checkpoint)(text)["input_ids"])
    done = prepare_table(pa.table({"prompt": [text]}), spec(checkpoint))
    assert done[ERROR].to_pylist() == [f"prompt of {tokens} tokens leaves no room in a context of 64"]
