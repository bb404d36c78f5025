"""YAML 1.2 as job files use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.engine.errors import UserError
from pipeline.config.job import JobConfig
from pipeline.config.load import dump_yaml, load_config, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("1e-5", 1e-5),
        ("1.5e5", 1.5e5),
        ("0o17", 15),
        ("017", 17),
        ("1:30", "1:30"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(f"key: {text}")["key"]
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (r'input={path: a, template: "\ud800 {{ x }}"}', "input.template"),
        (r'input={path: a, messages: m, chat_template_kwargs: {"\udfff": 1}}', "a key of input.chat_template_kwargs"),
        (r'choices=[a, "b\ud800"]', "choices.1"),
        (r'output_format={json_schema: {enum: ["\ud800"]}}', "output_format.json_schema.enum.0"),
        ("input.path=\udcff", "input.path"),
        ("\udcff=1", "a key"),
        ("choices=FILE", "choices: FILE: cannot be read as JSON: label.1"),
    ],
)
def test_text_that_utf_8_cannot_hold_is_refused_wherever_it_stands(tmp_path: Path, change: str, key: str) -> None:
    job, labels = tmp_path / "job.yaml", tmp_path / "labels.json"
    job.write_text("{input: {path: a}, output: {path: b}, model: {path: c}}")
    labels.write_text(r'["a", "\ud800"]')
    with pytest.raises(UserError) as refused:
        load_config(JobConfig, job, [change.replace("FILE", str(labels))])
    message = str(refused.value).replace(str(labels), "FILE")
    assert message.startswith(f"{job}: {key}: holds '\\ud"), ascii(message)
    assert "a lone surrogate, which UTF-8 cannot store; remove it" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", 'line 3, column 1: found duplicate key "a"; '),
        ("a: {{ b }}", "line 1, column 5: found unhashable key; .* put a text with special characters"),
        ("a: *.csv", "line 1, column 4: found undefined alias '.csv'; "),
        ("a:\n\tb: 1", r"line 2, column 1: found character .* that cannot start any token; indent with spaces"),
        ("a: [1, 2", "line 1, column 9: expected ',' or "),
        ("[" * 1_000, "nested too deeply"),
        ("a: !!python/object/apply:os.system [true]", "line 1, column 4: could not determine a constructor"),
    ],
    ids=["twice", "braces", "glob", "tab", "open", "deep", "python"],
)
def test_a_refused_document_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["*a", "&a [*a]", "2020-99-99", "a: 'b", "%YAML 9.9\n---\na: 1", "\x07", "<<: 3"])
@pytest.mark.parametrize("tag", ["", "!!bool ", "!!int ", "!!float ", "!!timestamp ", "!x ", "? [a]\n: "])
def test_any_document_is_read_or_refused(text: str, tag: str) -> None:
    try:
        parse_yaml(tag + text)
    except UserError as error:
        message = str(error)
    else:
        return
    assert message and "\n" not in message


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["yes", "1e-5", "null", "~", "012", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
@example({"a": "\U0001f600" * 13 + " b\x85"})
def test_written_values_are_read_back(values: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(values)) == values
