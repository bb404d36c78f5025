"""A row becomes a prompt or an error in its place; it never costs another row."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_files import stage_input
from memory_folder import MemoryFolder
from prompt_specs import spec_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.input.rows import from_ipc
from pipeline.prepare.prompt_spec import PromptSpec, check_generation
from pipeline.prepare.prompts import ADDED, ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.stage import prepare
from pipeline.prepare.templates import compile_template, template_columns
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.runtime.quarantine import QUARANTINE, Quarantine
from pipeline.storage.folder import LocalFolder

CONTEXT, VOCABULARY = 64, 300


def spec(checkpoint: Path, **changes: Any) -> PromptSpec:
    return spec_of(checkpoint, CONTEXT, params=SamplingParams(max_new_tokens=10), **changes)


def tokens(checkpoint: Path, text: str) -> list[int]:
    ids: list[int] = load_tokenizer(checkpoint)(text)["input_ids"]
    return ids


def prepared(
    checkpoint: Path, columns: dict[str, list[Any]], **changes: Any
) -> tuple[list[list[int]], list[str | None]]:
    table = pa.table(columns)
    done = prepare_table(table, spec(checkpoint, **changes))
    assert done.column_names == [*table.column_names, *ADDED]
    assert done.select(table.column_names).equals(table)
    return done[PROMPT_IDS].to_pylist(), done[ERROR].to_pylist()


def by_template(checkpoint: Path, template: str, **columns: list[Any]) -> tuple[list[list[int]], list[str | None]]:
    return prepared(checkpoint, columns, template=template)


def test_a_prompt_column_is_tokenized_as_the_tokenizer_does(checkpoint: Path) -> None:
    prompts = ["one", "name[Zizzi]", "gr\u00fc\u00df \U0001f600"]
    ids, errors = prepared(checkpoint, {"prompt": prompts, "other": [1, 2, 3]})
    assert ids == [tokens(checkpoint, prompt) for prompt in prompts]
    assert errors == [None] * 3


def test_an_end_token_that_the_tokenizer_puts_behind_each_prompt_is_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers then begin after an end; the tiny checkpoint's own <sep> is wanted."""

    def check(folder: Path, **section: Any) -> str:
        caplog.clear()
        values = {"input": {"path": "in", **section}, "output": {"path": "out"}, "model": {"path": str(folder)}}
        check_generation(JobConfig.model_validate(values), ResolvedCheckpoint(inspect(folder), str(folder)))
        return caplog.text

    shutil.copytree(checkpoint, tmp_path / "ends")
    file = tmp_path / "ends" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.save(str(file))
    assert "puts the end token </s> behind each prompt" in check(tmp_path / "ends")
    assert "</s>" in check(tmp_path / "ends", format="openai_batch")
    assert check(tmp_path / "ends", chat=True) == "" == check(checkpoint)


def test_null_and_blank_prompts_are_row_errors(checkpoint: Path) -> None:
    ids, errors = prepared(checkpoint, {"prompt": [None, "", " \n\t", "fine", "\u2003"]})
    assert errors == ["prompt is null", "prompt is empty", "prompt is empty", None, "prompt is empty"]
    assert [bool(one) for one in ids] == [False, False, False, True, False]
    _, errors = by_template(checkpoint, "{{ x }}", x=["", "  ", "a"])
    assert errors == ["prompt is empty", "prompt is empty", None]


def test_a_prompt_that_fills_the_context(checkpoint: Path) -> None:
    fits, fills, long = "a " * (CONTEXT - 3), "a " * (CONTEXT - 2), "b " + "a " * 200
    lengths = [len(tokens(checkpoint, prompt.strip())) for prompt in (fits, fills, long)]
    assert lengths[:2] == [CONTEXT - 1, CONTEXT] and lengths[2] > CONTEXT
    columns = {"prompt": [fits.strip(), fills.strip(), long.strip()]}
    ids, errors = prepared(checkpoint, columns)
    assert [len(one) for one in ids] == [CONTEXT - 1, 0, 0]
    assert errors == [None] + [
        f"prompt of {length} tokens leaves no room in a context of {CONTEXT}" for length in lengths[1:]
    ]
    ids, errors = prepared(checkpoint, columns, too_long="truncate_left")
    assert errors == [None] * 3
    assert [len(one) for one in ids] == [CONTEXT - 10] * 3
    assert ids[2] == tokens(checkpoint, columns["prompt"][2])[-(CONTEXT - 10) :]


def test_a_template_reaches_into_nested_columns(checkpoint: Path) -> None:
    meta = [{"question": "why", "items": "x", "deep": {"list": [{"k": "v"}]}}]
    text = "{{ meta.question }} {{ tags[0] }} {{ meta.items }} {{ meta.deep.list[0].k }} {{ meta['question'] }}"
    assert template_columns(text) == ["meta", "tags"]
    assert template_columns("{{ b }} {{ a.x }} {% for i in c %}{{ i }}{% endfor %}{% set d = 1 %}{{ d }}") == [*"abc"]
    ids, errors = by_template(checkpoint, text, meta=meta, tags=[["a", "b"]])
    assert errors == [None] and ids == [tokens(checkpoint, "why a x v why")]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint8())])
def test_token_ids_are_unchanged(checkpoint: Path, kind: pa.DataType) -> None:
    rows = [[1, 5, 3], [5], [0, 255]]
    done = prepare_table(pa.table({"prompt": pa.array(rows, kind)}), spec(checkpoint))
    assert done[PROMPT_IDS].to_pylist() == rows and done[ERROR].null_count == 3


def test_invalid_token_ids_are_a_row_error(checkpoint: Path) -> None:
    rows = [[1], None, [], [1, None], [-1], [VOCABULARY - 1], [2, VOCABULARY], [2**40], [7] * 70]
    ids, errors = prepared(checkpoint, {"prompt": rows})
    assert errors == [
        None,
        "prompt is null",
        "prompt is empty",
        "prompt: token 1 is null; the vocabulary is 0 to 299",
        "prompt: token 0 is -1; the vocabulary is 0 to 299",
        None,
        "prompt: token 1 is 300; the vocabulary is 0 to 299",
        f"prompt: token 0 is {2**40}; the vocabulary is 0 to 299",
        "prompt of 70 tokens leaves no room in a context of 64",
    ]
    assert [bool(one) for one in ids] == [error is None for error in errors]


def test_a_process_that_prepares_rows_imports_neither_torch_nor_models(checkpoint: Path, tmp_path: Path) -> None:
    known = ResolvedCheckpoint(inspect(checkpoint), str(checkpoint)).pinned()
    given = stage_input(tmp_path / "in.parquet", pa.table({"prompt": ["a"]}))
    quarantine = Quarantine(LocalFolder(str(tmp_path), tmp_path), "run", 2, "prepare")
    job = pickle.dumps({**given, "spec": replace(spec(checkpoint), checkpoint=known), "quarantine": quarantine})
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, sys; from pipeline.prepare.stage import prepare; "
            "print(sum(block.num_rows for block in prepare(**pickle.load(sys.stdin.buffer))), "
            "not {'torch', 'ray', 'transformers.modeling_utils'}.isdisjoint(sys.modules))",
        ],
        input=job,
        capture_output=True,
        check=True,
    )
    length, is_heavy = run.stdout.decode().split()
    assert int(length) == 1 and is_heavy == "False"


def test_values_that_python_cannot_hold_are_a_row_error(checkpoint: Path) -> None:
    """A year 300,000, and a lone surrogate that only a template can write."""
    days = pa.array([0, 10**18, 1], pa.timestamp("us"))
    done = prepare_table(pa.table({"d": days}), spec(checkpoint, template="{{ d.year }}"))
    errors = done[ERROR].to_pylist()
    assert errors[0] is None and errors[2] is None and "column d: timestamp[us] cannot be read: " in (errors[1] or "")
    far = pa.array([0], pa.timestamp("us", "Mars/Olympus"))
    (error,) = prepare_table(pa.table({"d": far}), spec(checkpoint, template="{{ d.year }}"))[ERROR].to_pylist()
    assert error is not None and "column d: timestamp[us, tz=Mars/Olympus] cannot be read: " in error
    _, errors = by_template(checkpoint, "{{ '\\ud800' if x else 'fine' }}", x=[1, 0])
    assert errors == ["prompt is not valid Unicode: it holds a lone surrogate", None]


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        ("{% for i in range(n) %}{{ i }} {% endfor %}", {"n": 3}, "0 1 2 "),  # `range` is jinja's own, no column
        ("{{ n }}", {"n": "a < b & c"}, "a < b & c"),
        ("Write a poem.", {"n": 1}, "Write a poem."),
        ("a{{ n or '' }}", {"n": None}, "a"),
        ("{% for one in n %}{{ loop.index }}={{ one.k }};{% endfor %}", {"n": [{"k": "a"}, {"k": "b"}]}, "1=a;2=b;"),
        ("{{ n | tojson }}", {"n": ["it's <é> & \"", None]}, '["it\'s <é> & \\"", null]'),
        ("{{ n | default('', true) | trim }}a{{ n | int ~ (n or '') }}", {"n": None}, "a0"),
        ("{{ n | reject('none') | join('-') }} {{ n | length }}", {"n": ["a", None]}, "a 2"),
    ],
)
def test_what_templates_render(checkpoint: Path, template: str, row: dict[str, Any], text: str) -> None:
    assert set(template_columns(template)) <= {"n"}
    ids, errors = by_template(checkpoint, template, **{name: [value] for name, value in row.items()})
    assert ids == [tokens(checkpoint, text)] and errors == [None]


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 / x }}", "TypeError"),
        ("{{ x.index('q') }}", "ValueError"),
        ("{{ 1 // (x | length - 1) }}", "ZeroDivisionError"),
        ("{{ meta.none.deeper }}", "'None' has no attribute 'deeper'"),
        ("{{ meta.none }}", "a null is printed; if null is allowed, write {{ column or '' }} (null here: meta.none)"),
        ("{{ q }}{{ x }}", "a null is printed; if null is allowed, write {{ column or '' }} (null here: q)"),
        ("{{ x[0] > 3 }}", "TypeError: '>' not supported between instances of 'str' and 'int'; a column of a CSV file"),
        ("{{ x[0] + 1.5 }}", 'TypeError: can only concatenate str (not "float") to str; a column of a CSV file is'),
        *(
            (template, "a null is printed; if null is allowed, ")
            for template in ("{{ q | trim }}", "{{ 'a' ~ q }}", "{{ [q] | join }}", "{{ '%s' | format(q) }}")
        ),
        ("{{ b | upper }}", "binary data is printed, not text; write {{ column.decode() }}"),
        ("{{ x[0] | truncate(2) }}", "AssertionError: expected length >= 3, got 2"),
        ("{{ x[0].title }}", "a method or function is printed"),
        ("{{ range }}", "a method or function is printed"),
    ],
)
def test_a_failing_template_is_a_row_error(checkpoint: Path, template: str, error: str) -> None:
    ids, errors = by_template(checkpoint, template, x=["a"], q=[None], b=[b"a"], meta=[{"none": None}])
    assert ids == [[]] and errors[0] is not None
    assert errors[0].startswith(f"template: {error}") and "\n" not in errors[0]


def test_text_that_is_not_utf8_is_a_row_error(checkpoint: Path) -> None:
    """Arrow and Parquet do not check what writers call a string."""
    text = b"good\xff\xfe\xfdfine"
    offsets = pa.py_buffer(np.array([0, 4, 7, 11], dtype=np.int32).tobytes())
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(text)])
    for changes in ({}, {"template": "{{ prompt }}"}):
        done = prepare_table(pa.table({"prompt": column}), spec(checkpoint, **changes))
        assert [error is None for error in done[ERROR].to_pylist()] == [True, False, True]
        assert done[PROMPT_IDS].to_pylist()[::2] == [tokens(checkpoint, "good"), tokens(checkpoint, "fine")]


@given(st.lists(st.none() | st.sampled_from(["", " ", "a", "b c", "x" * 150]), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_row_is_prepared_independently_of_others(checkpoint: Path, prompts: list[str | None]) -> None:
    table = pa.table({"prompt": pa.array(prompts, pa.string())})
    whole = prepare_table(table, spec(checkpoint))
    alone = pa.concat_tables([prepare_table(table.slice(row, 1), spec(checkpoint)) for row in range(len(prompts))])
    assert whole.combine_chunks().equals(alone.combine_chunks())
    for ids, error in zip(whole[PROMPT_IDS].to_pylist(), whole[ERROR].to_pylist(), strict=True):
        assert (error is None) == bool(ids)


def test_the_stage_yields_a_block_of_one_row_for_each_shard(checkpoint: Path, tmp_path: Path) -> None:
    tables = [pa.table({"prompt": ["a", None]}), pa.table({"prompt": ["b"]})]
    given = stage_input(tmp_path / "in.parquet", *tables, first=4)
    quarantine = Quarantine(MemoryFolder(), "run", 2, "prepare")
    blocks = list(prepare(**given, spec=spec(checkpoint), quarantine=quarantine))
    assert [row for block in blocks for row in block.drop(["rows", "prepare_seconds"]).to_pylist()] == [
        {"shard": shard.index, "url": shard.url, "first_row": shard.first_row} for shard in given["shards"]
    ]
    for table, block in zip(tables, blocks, strict=True):
        assert block["prepare_seconds"][0].as_py() > 0
        assert from_ipc(block["rows"][0].as_py()).equals(prepare_table(table, spec(checkpoint)))
    assert quarantine.folder.names(QUARANTINE) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"dtype": []}),
        ("generation_config.json", {"pad_token_id": "x"}),
        ("generation_config.json", {"cache_implementation": "new"}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
    ],
)
def test_values_that_transformers_refuses_are_one_line(
    checkpoint: Path, tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
    load: Any = inspect
    kind = re.escape(name)
    if name.startswith("tokenizer"):
        load, kind = tokenizer_of, "the tokenizer cannot be loaded"
    with pytest.raises(UserError, match=rf"^{folder}: {kind}: [A-Za-z]+: .+$"):
        load(str(folder))


@pytest.mark.parametrize("text", ["{{ a", "{{ Review Text }}", "{% for x in y %}", "{{ a | no }}", "a\n{% nothing %}"])
def test_a_template_that_does_not_parse_is_refused_in_one_line(text: str) -> None:
    for refuse in (compile_template, template_columns):
        with pytest.raises(ValueError, match=r"^line \d+: ") as caught:
            refuse(text)
        assert "\n" not in str(caught.value)
        assert ("; rename a column whose name is not one word" in str(caught.value)) == ("Review" in text)
