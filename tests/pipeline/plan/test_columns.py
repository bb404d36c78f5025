"""A column must be able to hold what the job reads from it, and each is read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from actors.answers import ANSWER_TYPES, OPTIONAL_TYPES
from pipeline.config.job import JobConfig
from pipeline.input.schema import plain
from pipeline.plan.columns import check_columns, check_type, needed_columns
from pipeline.prepare.prompts import ADDED

TEXT = pa.string()
MESSAGE = pa.struct([("role", TEXT), ("content", TEXT)])


def job(keep: Sequence[str] = (), **given: Any) -> JobConfig:
    output = {"path": "o", "keep": list(keep)}
    return JobConfig.model_validate({"input": {"path": "in", **given}, "output": output, "model": {"path": "m"}})


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"prompt": "x"}, TEXT),
        ({"prompt": "x"}, pa.dictionary(pa.int32(), TEXT)),
        ({"prompt": "x"}, pa.list_(pa.int32())),
        ({"prompt": "x"}, pa.large_list(pa.uint16())),
        ({"messages": "x"}, pa.list_(MESSAGE)),
        ({"messages": "x"}, pa.large_string()),
        ({"sampling": "x"}, MESSAGE),
        ({"sampling": {"n": "x"}}, pa.float64()),
        ({"choices": "x"}, pa.list_(TEXT)),
        ({"template": "{{ x.y }}"}, MESSAGE),
    ],
)
def test_types_that_fit(given: dict[str, Any], kind: pa.DataType) -> None:
    config = job(**given)
    assert "x" in needed_columns(config)
    check_type(config, "x", plain(kind), "file")


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"prompt": "x"}, pa.int64(), "a prompt must be a string or a list of token ids"),
        ({"prompt": "x"}, pa.list_(pa.float32()), "a prompt must be"),
        (
            {"prompt": "x", "examples": [{"user": "u", "assistant": "a"}]},
            pa.list_(pa.int32()),
            "a chat needs text: remove chat, system and examples",
        ),
        ({"messages": "x"}, MESSAGE, "messages must be a list of structs or a JSON string"),
        ({"messages": "x"}, pa.list_(TEXT), "messages must be"),
        ({"sampling": "x"}, TEXT, "sampling must be a struct"),
        ({"choices": "x"}, TEXT, "choices must be a list of strings"),
        ({"choices": "x"}, pa.list_(pa.int32()), "choices must be"),
        ({"id": "x"}, MESSAGE, "an id must be one plain value"),
        ({"prompt": "x"}, pa.binary(), "a prompt must be a string or a list of token ids"),
    ],
)
def test_types_that_do_not_fit_are_refused(given: dict[str, Any], kind: pa.DataType, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        check_type(job(**given), "x", kind, "file")
    assert str(caught.value).startswith(f"file: column 'x' is {kind}; {said}")


def test_columns_of_a_job_with_everything() -> None:
    assert needed_columns(job()) == ["prompt"]
    assert needed_columns(job(["b"], template="{{ b }} {{ a }} {{ b }}")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"^input\.template: line 1: "):
        needed_columns(job(template="{{ b"))
    exchange = {"user": "{{ u }}", "assistant": "{{ v }} {{ u }}"}
    assert needed_columns(job(messages="m", system="{{ s }}", examples=[exchange])) == ["m", "s", "u", "v"]
    with pytest.raises(ValueError, match=r"^input\.system, examples: line 1: "):
        needed_columns(job(messages="m", system="{{ s"))
    assert needed_columns(job(messages="m", sampling="s", choices="c", id="i")) == ["i", "m", "s", "c"]
    columns = {"temperature": "t", "seed": "i"}
    assert needed_columns(job(template="{{ a.b }} {{ t }}", sampling=columns, id="i")) == ["i", "a", "t"]


@pytest.mark.parametrize(
    ("keep", "given", "said"),
    [
        *(
            (["topic", name], {}, rf"^output\.keep: {name} is the name of")
            for name in [*ANSWER_TYPES, *OPTIONAL_TYPES, *ADDED]
        ),
        (["id"], {}, r"^output\.keep: the job writes its own ids"),
        (["id"], {"id": "key"}, r"^output\.keep: the job writes its own ids"),
        (["topic", "topic"], {}, r"^output\.keep: topic"),  # many readers refuse two columns of one name
        ([], {"template": "{{ __error }}"}, "__"),
        ([], {"template": "Say"}, r"^input\.template: inserts no column, so all answers would be the same; insert one"),
        (
            [],
            {"template": "Say {topic}."},
            r"^input\.template: write \{\{ topic \}\} instead of \{topic\} to insert a c",
        ),
    ],
)
def test_columns_that_would_collide_are_refused(keep: list[str], given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_columns(job(keep, **given))
    assert "\n" not in str(caught.value)
    check_columns(job(["id", "topic"], id="id"))
