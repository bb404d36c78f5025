"""What a template may not do: take a job's time or memory, or run what lies in the data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from memory_probe import watch_peak

from actors.engine.checkpoint.loading import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.prepare import sandbox
from pipeline.prepare.chat import Chat
from pipeline.prepare.chat_template import check_chat, render_chat
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.templates import render

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% macro f(x, n) %}{% if n %}{{ f(BODY, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f(q, 60) }}"
LARGE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * [q] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (2 ** 60000) * (2 ** 60000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%.999999999f' % 1.0 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(q) }}",
    "{{ '{:>{}}'.format(q, 999999999) }}",
    "{{ '{a:>999999999}'.format_map({'a': q}) }}",
    "{{ q | center(10 ** 9) }}",
    "{{ q.center(10 ** 9) }}",
    "{{ (q | attr('ljust'))(10 ** 9) }}",
    "{{ q.zfill(10 ** 9) }}",
    "{{ ('\\t' * 1000).expandtabs(10 ** 7) }}",
    "{{ ('\\n' * 1000) | indent(10 ** 7, true, true) }}",
    "{{ range(99999) | map('string') | join(q * 10 ** 3) }}",
    "{{ [1] | tojson(indent=10 ** 9) }}",
    "{{ [q] | batch(10 ** 9, 'x') | list }}",
    "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "{{ 1.5 | round(10 ** 9) }}",
    "{{ 5 | round(8000000, 'floor') }}",
    "{{ [[q]] | sum(start=[]) }}",
    "{{ '%(a())999999999d' % {'a()': 1} }}",
    "{{ '%%%s%*d' % (q, 999999999, 1) }}",
    "{{ '{:{}}'.format(1, '>999999999') }}",
    "{{ ('%r' * 99999) % ((q * 99999,) * 80 + (1,) * 99919) }}",
    "{{ ('\\r' * 1000) | indent(10 ** 7) }}",
    "{{ q * 8000000 ~ q * 8000000 }}",
    "{% macro f(x, n) %}{{ f({1: x.values(), 2: x.values()}, n - 1) if n else x }}{% endmacro %}{{ f({1: q}, 60) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "{% set all %}{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    *(DOUBLE.replace("BODY", body) for body in ("x ~ x", "[x, x]", "{1: x, 2: x}")),
]


MEMORY_BOMBS = [
    "{{ (q * 10 ** 6) | replace('a', q * 10 ** 3) }}",
    "{{ (q * 10 ** 6).replace('', q * 10 ** 3) }}",
    "{{ (q * 10 ** 6) | join(q * 10 ** 3) }}",
    "{{ range(99999) | map('center', 99999) | list }}",
    "{{ (q * 10 ** 6) | replace(new=q * 10 ** 3, old=q) }}",
    "{{ (q * 10 ** 6).translate({97: q * 10 ** 3}) }}",
    "{% macro f(x, n) %}{{ f(x[1:], n - 1) if n }}{% endmacro %}{{ f(q * 8000000, 150) }}",
    "{% macro f(x, n) %}{{ f(x + q, n - 1) if n }}{% endmacro %}{{ f(q * 8000000, 150) }}",
    "{{ (q * 8000000) | replace('a', q * 8000000) }}",
    "{{ (q * 99999) | wordwrap(1, wrapstring=q * 99999) }}",
]
TOO_MUCH = r"makes more than [\d,]+ characters( in all)?$"


@pytest.mark.parametrize("template", LARGE)
def test_a_template_that_makes_too_much_is_refused_early(template: str) -> None:
    began, peak = time.thread_time(), watch_peak()
    with pytest.raises(ValueError, match=r"^template: " + TOO_MUCH):
        render(template, {"q": "a"})
    assert time.thread_time() - began < sandbox.SECONDS
    assert peak() < 800 * 2**20


LIMITED = """
import json, resource, sys
from pipeline.prepare.templates import render
render("{{ q }}", {"q": "a"})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20, resource.RLIM_INFINITY))
for template in json.load(sys.stdin):
    try:
        render(template, {"q": "a"})
        print("made")
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_memory_bomb_is_a_row_error_under_a_memory_limit() -> None:
    """These take gigabytes before their result is measured. Without a limit they may kill their worker process; the
    quarantine then finds their row (tests/pipeline/generate/test_isolated_rows.py)."""
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, input=json.dumps(MEMORY_BOMBS), capture_output=True, text=True, timeout=120)
    errors = done.stdout.splitlines()
    assert len(errors) == len(MEMORY_BOMBS), done.stderr
    assert all(re.match(rf"template: (MemoryError|{TOO_MUCH})", error) for error in errors), errors


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "another thread"])
def test_a_row_that_takes_too_long_is_an_error_and_affects_no_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, thread: bool
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    text = "{{ q }}{% if q == 'bad' %}" + FOREVER + "{% endif %}"
    spec = PromptSpec(str(checkpoint), 300, 64, template=text, sampling=SamplingParams(max_new_tokens=4))
    found: list[Any] = []

    def prepared() -> None:
        found.append(prepare_table(pa.table({"q": ["good", "bad", "good", "bad", "fine"]}), spec))

    if thread:
        worker = threading.Thread(target=prepared)
        worker.start()
        worker.join(30)
    else:
        prepared()
    (done,) = found
    late = "template: takes more than 0.3 seconds"
    assert done[ERROR].to_pylist() == [None, late, None, late, None]
    assert [bool(ids) for ids in done[PROMPT_IDS].to_pylist()] == [True, False, True, False, True]


@pytest.mark.parametrize(
    "template",
    [
        # one call may end within the bound, since its long steps in C cannot be stopped
        "{% for _ in range(50) %}{{ ('(' * 4000000 ~ 'www.a.b' ~ ')' * 4000000) | urlize | length }}{% endfor %}",
        "{{ ('a b ' * 2000000) | wordwrap(3) }}",
        "{{ ('x,' * 4000000).split(',') | sort | length }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_a_slow_filter_or_recursion_is_stopped(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    with pytest.raises(ValueError, match=r"^template: takes more than 0.3 seconds$"):
        render(template, {})


def test_the_time_bound_holds_without_thread_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"^template: takes more than 0.2 seconds$"):
        render(FOREVER, {})


def test_a_late_timeout_is_not_raised_after_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end about when the watchdog strikes: it never strikes after them, nor twice."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "_POLL_SECONDS", 0.001)
    time.sleep(0.15)  # the watchdog's last long nap
    ended = 0
    for turn in range(60):
        seconds = 0.009 + 0.0001 * (turn % 60)

        def busy(until: float = seconds) -> int:
            began = time.thread_time()
            while time.thread_time() - began < until:
                pass
            return 1

        try:
            assert sandbox.bounded(busy) == 1
        except sandbox.OutOfBounds:
            ended += 1
        assert not sandbox._runs
    assert ended > 0


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


def test_a_text_may_grow_in_small_steps(checkpoint: Path, tmp_path: Path) -> None:
    """1,000 texts of 1 MB on average are made on the way."""
    text = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "x" * 2000}] * 1000
    assert render_chat(chat_of(checkpoint, tmp_path / "c", text), Chat(), messages) == "x" * 2_000_000


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


def chat_of(checkpoint: Path, folder: Path, template: str) -> Any:
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ messages[0].content.center(10 ** 9) }}",
        "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=['ab']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
        "{% set ns = namespace(a='b') %}{% for i in range(99999) %}{% set ns.a = ns.a ~ 'b' * 9999 %}{% endfor %}",
    ],
)
def test_a_checkpoints_chat_template_has_the_same_bounds(checkpoint: Path, tmp_path: Path, template: str) -> None:
    tokenizer, peak = chat_of(checkpoint, tmp_path / "c", template), watch_peak()
    with pytest.raises(ValueError, match=r"^chat template: " + TOO_MUCH):
        render_chat(tokenizer, Chat(), USER)
    with pytest.raises(ValueError, match=r"^c: the chat template makes more than [^\n]+$"):
        check_chat(tokenizer, Chat(), "c")
    assert peak() < 400 * 2**20


def test_an_endless_chat_template_is_stopped(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    tokenizer = chat_of(checkpoint, tmp_path / "c", FOREVER)
    with pytest.raises(ValueError, match=r"^chat template: takes more than 0.3 seconds$"):
        render_chat(tokenizer, Chat(), USER)


def test_nested_namespaces_are_not_printed(checkpoint: Path, tmp_path: Path) -> None:
    tower = "{% set n = namespace() %}{% set n.a = ns.x %}{% set n.b = ns.x %}{% set ns.x = n %}"
    text = "{% set ns = namespace(x='q') %}{% for i in range(60) %}" + tower + "{% endfor %}{{ ns.x }}"
    assert render_chat(chat_of(checkpoint, tmp_path / "c", text), Chat(), USER) == "<Namespace>"


def test_values_of_rows_are_not_rendered_as_templates(chat_checkpoint: Path) -> None:
    evil = "{{ 7 * 7 }}{% for a in range(9) %}x{% endfor %}{# gone #}"
    assert render("{{ q }}", {"q": evil}) == evil
    assert render("{{ '%s' | format(q) }}{{ [q] | join }}", {"q": evil}) == evil * 2
    tokenizer = load_tokenizer(chat_checkpoint)
    messages = [{"role": "user", "content": evil, "name": evil}]
    text = render_chat(tokenizer, Chat(system=evil), messages)
    assert text == f"<s>[system]{evil}</s>[user]{evil}({evil})</s>[assistant]"


def test_row_errors_are_short() -> None:
    with pytest.raises(ValueError, match=r"^template: UndefinedError") as caught:
        render("{{ meta['" + "x" * 50_000 + "'] }}", {"meta": {}})
    assert len(str(caught.value)) < 1100
