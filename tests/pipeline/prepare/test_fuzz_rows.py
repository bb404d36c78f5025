"""Any Parquet file, put to any use: refused in one line, or every row comes out once, in its place, with its id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_values import values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from part_builders import fake_answers, part_spec

from actors.answers import Answer, Prompt
from actors.engine.types import SamplingParams
from pipeline.answer.output import part_bytes, part_table
from pipeline.answer.stage import prompts
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import list_files
from pipeline.input.rows import from_ipc, to_ipc
from pipeline.input.schema import conform
from pipeline.input.shards import cut_shards, read_groups
from pipeline.plan.columns import check_columns
from pipeline.plan.manifest import read_footers
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import prepare_table

LOCAL = StorageConfig()
UNITS = st.sampled_from(["ms", "us", "ns"])
ZONES = st.sampled_from([None, "UTC", "Europe/Berlin", "+05:30", "Not/AZone"])
PLAIN = st.one_of(
    st.sampled_from(
        [
            pa.null(),
            pa.bool_(),
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float16(), pa.float32(), pa.float64()),
            *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
            *(pa.binary(3), pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.uuid(), pa.json_(), pa.duration("ns"), pa.duration("s"), pa.bool8()),
        ]
    ),
    st.builds(pa.timestamp, UNITS, ZONES),
    st.builds(lambda whole, scale: pa.decimal128(whole + scale, scale), st.integers(1, 30), st.integers(0, 8)),
    st.builds(lambda whole: pa.decimal256(whole, 2), st.integers(3, 76)),
)
KINDS = st.recursive(
    PLAIN,
    lambda below: st.one_of(
        st.builds(pa.list_, below),
        st.builds(pa.large_list, below),
        st.builds(lambda kind: pa.list_(kind, 2), below),
        st.builds(lambda kind: pa.map_(pa.string(), kind), below),
        st.builds(
            lambda kinds: pa.struct([(f"f{n}", kind) for n, kind in enumerate(kinds)]), st.lists(below, max_size=3)
        ),
    ),
    max_leaves=3,
)
NAMES = st.one_of(
    st.sampled_from(
        ["id", "prompt", "a.b", "", " ", "../x", "a\nb", "ERROR", "{{ x }}", "\u202e", "x" * 300, "row_id"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4),
)


def column(kind: pa.DataType, values: list[Any]) -> pa.Array | None:
    """None for what this Arrow cannot make."""
    try:
        if isinstance(kind, pa.BaseExtensionType):
            return kind.wrap_array(pa.array(values, kind.storage_type))
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
        return None


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 5))
    usual = draw(st.integers(0, 3)) > 0  # else most jobs would be refused
    names = ["prompt", "id", *draw(st.lists(NAMES, max_size=2))] if usual else draw(st.lists(NAMES, max_size=4))
    columns, kept = [], []
    for name in names:
        kind = pa.string() if usual and name == "prompt" else draw(st.just(pa.string()) | KINDS)
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        made = column(kind, [draw(values_of(storage)) for _ in range(rows)])
        if made is None:
            continue
        if draw(st.integers(0, 9)) == 0 and pa.types.is_string(kind):
            made = made.dictionary_encode()
        if draw(st.integers(0, 9)) == 0 and pa.types.is_string(kind) and rows:
            made = pa.array([b"\xff\xfe"] * rows, pa.binary()).view(pa.string())
        columns.append(made)
        kept.append(name)
    return pa.Table.from_arrays(columns, names=kept) if columns else pa.table({})


@st.composite
def uses(draw: st.DrawFn) -> tuple[list[pa.Table], dict[str, Any]]:
    """Files of a job, the second one perhaps of another schema, and what its columns are for."""
    first = draw(tables())
    files = [first, *draw(st.lists(st.just(first) | tables(), max_size=1))]
    name = st.sampled_from([*first.column_names, "prompt"]) if first.column_names else NAMES
    given: dict[str, Any] = {}
    way = draw(st.integers(0, 3))
    if way == 0:
        given["prompt"] = draw(name)
    elif way == 1:
        given["template"] = draw(
            st.sampled_from(
                ["{{ id }}", "x{{ prompt }}", "{% for a in id %}{{ a }}{% endfor %}", "{{ prompt.f0 }}", "fixed"]
            )
        )
    elif way == 2:
        given["messages"] = draw(name)
    if draw(st.booleans()):
        given["id"] = draw(name)
    if draw(st.integers(0, 3)) == 0:
        given["sampling"] = draw(name) if draw(st.booleans()) else {"temperature": draw(name), "seed": draw(name)}
    if draw(st.integers(0, 3)) == 0:
        given["choices"] = draw(name)
    return files, {"input": given, "keep": draw(st.lists(name, max_size=2))}


def fake(prompt: Prompt, row: int) -> Answer:
    answered, _, failed = fake_answers(3)
    return replace(answered if prompt.error is None else failed, row=row, error=prompt.error)


def through(config: JobConfig, checkpoint: Path) -> list[tuple[str, int, int, pa.Table]] | None:
    """A job's rows through all but planning's checkpoint and the model: (file, first row, rows, part) of each shard;
    None if it is refused."""
    try:
        check_columns(config)
        files, schema = read_footers(config, list_files(config.input.path, LOCAL))
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert len(refusal.splitlines()) == 1, refusal
        return None
    given = config.input
    spec = PromptSpec(str(checkpoint), 300, 64, given, SamplingParams(max_new_tokens=4))
    out = part_spec(id_column=given.id, keep=tuple(config.output.keep), root=given.path[0])
    done = []
    for file in files:
        shards = cut_shards([file], 2, 2**20)
        for shard, table in zip(shards, read_groups(shards, schema.names, LOCAL) if shards else (), strict=True):
            rows = from_ipc(to_ipc(conform(table, schema)))
            prepared = from_ipc(to_ipc(prepare_table(rows, spec)))
            answers = [fake(one, row) for row, one in enumerate(prompts(prepared, shard))]
            part = part_bytes(part_table(prepared, answers, out, shard), out, shard)
            done.append((shard.url, shard.first_row, shard.rows, pq.read_table(pa.BufferReader(part))))
    return done


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(job=uses())
def test_every_row_of_any_parquet_comes_out_once_or_the_job_is_refused(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, job: tuple[list[pa.Table], dict[str, Any]]
) -> None:
    files, use = job
    folder = tmp_path_factory.mktemp("fuzz")
    written = {}
    for number, table in enumerate(files):
        path = folder / f"{number}.parquet"
        try:
            pq.write_table(table, path, row_group_size=3)
        except (pa.ArrowException, ValueError):
            path.unlink(missing_ok=True)
            continue
        written[str(path)] = table
    try:
        config = JobConfig.model_validate(
            {
                "input": {"path": str(folder), **use["input"]},
                "output": {"path": "unused", "keep": use["keep"]},
                "model": {"path": "unused"},
            }
        )
    except ValueError:
        return
    done = through(config, checkpoint)
    if done is None:
        return
    places = {(url, first + row) for url, first, rows, _ in done for row in range(rows)}
    assert places == {(url, row) for url, table in written.items() for row in range(table.num_rows)}
    for url, first, rows, part in done:
        assert part.num_rows == rows
        errors, texts = part["error"].to_pylist(), part["generated_text"].to_pylist()
        assert [text is None for text in texts] == [error is not None for error in errors]
        assert all("\n" not in error for error in errors if error is not None)
        if config.input.id is None:
            assert part["id"].to_pylist() == [f"{Path(url).name}:{first + row}" for row in range(rows)]
        elif pa.types.is_integer(written[url].schema.field(config.input.id).type) and not any(errors):
            assert part["id"].to_pylist() == written[url][config.input.id].to_pylist()[first : first + rows]
