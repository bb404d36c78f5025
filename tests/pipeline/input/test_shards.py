"""Shards hold every row once, and are read row for row, alone and as a Ray Data source; rows spread over them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_files import write_rows
from part_builders import fake_answers, part_spec

from actors.engine.errors import UserError
from pipeline.answer.output import part_bytes, part_table
from pipeline.commit.sink import PART, part_name
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile, list_files, read_footer
from pipeline.input.rows import read_shards
from pipeline.input.shards import (
    Shard,
    cut_shards,
    group_shards,
    read_groups,
)
from pipeline.run.ray_data import ShardSource

LOCAL = StorageConfig()
PROMPT = pa.schema([("prompt", pa.string())])


def read_prompts(shards: Sequence[Shard], files: Sequence[InputFile]) -> Iterator[pa.Table]:
    for shard, rows in read_shards(files, shards, PROMPT, LOCAL):
        yield pa.table({"shard": [shard.index], "prompt": [rows["prompt"].to_pylist()]})


def pinned(url: str, storage: StorageConfig = LOCAL) -> InputFile:
    ((name, (size, version)),) = list_files([url], storage).items()
    return read_footer(name, size, version, storage)[0]


@st.composite
def input_files(draw: st.DrawFn) -> list[InputFile]:
    files = []
    for number in range(draw(st.integers(1, 4))):
        groups = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=8))
        rows = tuple(count for count, _ in groups)
        files.append(InputFile(f"f{number}", 1, "v", rows, tuple(count * width for count, width in groups)))
    return files


@given(input_files(), st.integers(1, 50), st.integers(1, 600))
@settings(max_examples=300, deadline=None)
def test_shards_hold_every_row_once(files: list[InputFile], shard_rows: int, shard_bytes: int) -> None:
    shards = cut_shards(files, shard_rows, shard_bytes)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    rows = [(shard.url, shard.first_row + row) for shard in shards for row in range(shard.rows)]
    assert rows == [(file.url, row) for file in files for row in range(file.rows)]
    assert all(1 <= shard.rows <= shard_rows for shard in shards)
    for file in files:
        edges, larger, bytes_a_row = {0}, [], []
        for count, size in zip(file.group_rows, file.group_bytes, strict=True):
            first = max(edges)
            edges.add(first + count)
            bytes_a_row += [size / count] * count if count else []
            if count > shard_rows or size > shard_bytes:
                larger.append(range(first, first + count + 1))
        for shard in (shard for shard in shards if shard.url == file.url):
            first, end = shard.first_row, shard.first_row + shard.rows
            assert {first, end} <= edges or any(first in group and end in group for group in larger)
            assert shard.rows == 1 or sum(bytes_a_row[first:end]) <= shard_bytes + 1e-6


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.integers(1, 15),
    st.integers(1, 30),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_shards_are_read_row_by_row(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], shard_rows: int, task_rows: int, left: list[bool]
) -> None:
    """Of any file, any of its shards, such as a resumed job has left, in read tasks of any size."""
    path = tmp_path_factory.getbasetemp() / "law.parquet"
    write_rows(path, groups)
    file = pinned(str(path))
    shards = [shard for shard in cut_shards([file], shard_rows, 2**30) if left[shard.index]]
    if not shards:
        return
    tables = list(read_groups(shards, ["id", "prompt"], LOCAL))
    expected = [list(range(shard.first_row, shard.first_row + shard.rows)) for shard in shards]
    assert [table["id"].to_pylist() for table in tables] == expected
    assert all(table.column_names == ["id", "prompt"] for table in tables)
    tasks = ShardSource(read_prompts, shards, [file], task_rows, 2**30).get_read_tasks(3)
    blocks = [block for task in tasks for block in task()]
    assert [block["shard"].to_pylist() for block in blocks] == [[shard.index] for shard in shards]
    assert [block["prompt"][0].as_py() for block in blocks] == [[f"prompt {one}" for one in some] for some in expected]
    assert sum(task.metadata.num_rows or 0 for task in tasks) == len(shards)


def rows_of(tasks: list[list[Shard]]) -> list[list[int]]:
    return [[shard.rows for shard in task] for task in tasks]


def test_read_tasks_keep_to_one_file_and_their_limits() -> None:
    """Whole row groups, five files' worth of four rows and forty bytes each."""
    files = [InputFile(url, 1, "v", (4,) * 5, (40,) * 5) for url in "ab"]
    shards = cut_shards(files, 4, 10**9)
    assert rows_of(group_shards(shards, files, 8, 10**9)) == [[4, 4], [4, 4], [4]] * 2
    assert rows_of(group_shards(shards, files, 100, 10**9)) == [[4] * 5] * 2
    assert rows_of(group_shards(shards, files, 100, 90)) == [[4, 4], [4, 4], [4]] * 2
    assert rows_of(group_shards(shards, files, 1, 1)) == [[4]] * 10
    tasks = ShardSource(read_prompts, shards, files, 8, 10**9).get_read_tasks(1)
    assert [task.metadata.num_rows for task in tasks] == [2, 2, 1, 2, 2, 1]
    names = Counter(name for task in tasks for name in task.metadata.input_files or ())
    assert names == {"a": 3, "b": 3}


@given(input_files(), st.integers(1, 50), st.integers(1, 600), st.integers(1, 80), st.integers(1, 900))
@settings(max_examples=200, deadline=None)
def test_no_row_group_is_in_two_read_tasks(
    files: list[InputFile], shard_rows: int, shard_bytes: int, task_rows: int, task_bytes: int
) -> None:
    shards = cut_shards(files, shard_rows, shard_bytes)
    tasks = group_shards(shards, files, task_rows, task_bytes)
    assert [shard for task in tasks for shard in task] == shards
    seen: set[tuple[str, int]] = set()
    for task in tasks:
        (url,) = {shard.url for shard in task}
        edges = [0]
        for rows in next(file for file in files if file.url == url).group_rows:
            edges.append(edges[-1] + rows)
        first, end = task[0].first_row, task[-1].first_row + task[-1].rows
        groups = {
            (url, number) for number in range(len(edges) - 1) if max(first, edges[number]) < min(end, edges[number + 1])
        }
        assert not groups & seen
        seen |= groups
        assert end - first <= task_rows or len(groups) == 1 or len(task) == 1


def test_a_shard_longer_than_its_file_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [3])
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read, .* fewer rows than when the job was planned"):
        list(read_groups([Shard(0, f"{tmp_path}/a.parquet", 0, 4)], ["id"], LOCAL))


ROWS = 500


def written(path: Path) -> pa.Table:
    draw = random.Random(1)
    table = pa.table({"prompt": [f"{draw.random()}" for _ in range(ROWS)]})
    pq.write_table(table, path, row_group_size=200, use_dictionary=False, compression="zstd")
    return table


def read(path: Path, shards: list[Shard]) -> list[str]:
    return [text for table in read_groups(shards, ["prompt"], LOCAL) for text in table["prompt"].to_pylist()]


def test_a_damaged_page_names_the_file(tmp_path: Path) -> None:
    """A damaged file raises no other error, and a file that can be read in spite of damage gives all its rows."""
    path = tmp_path / "a.parquet"
    whole = written(path)["prompt"].to_pylist()
    data = path.read_bytes()
    shards = cut_shards([read_footer(str(path), len(data), "v", LOCAL)[0]], 100, 2**20)
    assert read(path, shards) == whole
    refused, draw = 0, random.Random(3)
    for _ in range(60):
        place = draw.randrange(4, len(data) - 600)
        path.write_bytes(data[:place] + draw.randbytes(8) + data[place + 8 :])
        try:
            assert len(read(path, shards)) == ROWS
        except UserError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{path}: cannot be read, since it is damaged or cut short: "), message
            assert len(message.splitlines()) == 1
    assert refused > 20


@pytest.mark.parametrize(
    "name", ["a\nb.parquet", "x..parquet", "part-000000.parquet", "'; rm -rf.parquet", "é\u202e.parquet"]
)
def test_names_in_the_data_name_no_file_of_the_output(tmp_path: Path, name: str) -> None:
    written(tmp_path / name)
    (url,) = list_files([str(tmp_path)], LOCAL)
    file, _ = read_footer(url, 1, "v", LOCAL)
    (shard,) = cut_shards([file], ROWS, 2**30)
    rows = pa.table({"id": ["../../etc/passwd", "/etc/x", "a\nb"]})
    for spec in (part_spec(), part_spec(id_column=None, root=str(tmp_path))):
        table = part_table(rows, fake_answers(3), spec, shard)
        assert table["id"].to_pylist() == (
            rows["id"].to_pylist() if spec.id_column else [f"{name}:{n}" for n in range(3)]
        )
        assert pq.read_table(pa.BufferReader(part_bytes(table, spec, shard))).num_rows == 3
    assert PART.fullmatch(part_name(shard.index))
