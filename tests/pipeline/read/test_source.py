"""Shards hold every row of every file exactly once, whatever the row groups and limits."""

from __future__ import annotations

import errno
import gzip
import os
import uuid
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.job import StorageConfig
from pipeline.read.files import InputFile, list_files, read_footer
from pipeline.read.ipc import from_ipc, to_ipc
from pipeline.read.shards import Shard, cut_shards, group_shards, read_shards
from pipeline.read.source import ShardSource
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import filesystem

LOCAL = StorageConfig()
PROMPT = pa.schema([("prompt", pa.string())])


def write(path: Path, groups: list[int], first: int = 0) -> None:
    """A file whose row groups have these many rows, numbered from `first`."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("other", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            ids = list(range(first, first + rows))
            values = {"id": ids, "prompt": [f"prompt {one}" for one in ids], "other": [0.5] * rows}
            writer.write_table(pa.table(values, schema=schema), row_group_size=max(rows, 1))
            first += rows


def pinned(url: str, storage: StorageConfig = LOCAL) -> InputFile:
    ((name, (size, version)),) = list_files([url], storage).items()
    return read_footer(name, size, version, storage)[0]


def refusal(paths: list[str], storage: StorageConfig = LOCAL) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        _look(paths, storage)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _look(paths: list[str], storage: StorageConfig) -> None:
    for url, (size, version) in list_files(paths, storage).items():
        read_footer(url, size, version, storage)


@pytest.fixture(scope="module", params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, StorageConfig]:
    """A folder of inputs, and how it is reached: a.parquet, sub/b.parquet and files that are none."""
    folder = tmp_path_factory.mktemp("inputs")
    write(folder / "a.parquet", [3, 2])
    (folder / "sub").mkdir()
    write(folder / "sub" / "b.parquet", [4], first=5)
    (folder / "bad.parquet.txt").write_text("not parquet")
    (folder / "other").mkdir()
    (folder / "other" / "bad.parquet").write_text("not parquet either")
    (folder / "empty").mkdir()
    (folder / "empty" / "x.txt").write_text("")
    (folder / "in").mkdir()
    write(folder / "in" / "c.parquet", [2], first=9)
    for hidden in ("in/_old.parquet", "in/.part.parquet", "in/_tmp/d.parquet", "in/.git/e.parquet", "in2/f.parquet"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        write(folder / hidden, [1])
    if request.param == "local":
        return str(folder), LOCAL
    storage: StorageConfig = request.getfixturevalue("s3")
    root = f"s3://bucket/{uuid.uuid4().hex}"
    fs, inside = filesystem(root, storage)
    fs.put(str(folder), inside, recursive=True)
    return root, storage


def test_a_file_a_folder_a_glob_and_a_list_are_found(place: tuple[str, StorageConfig]) -> None:
    root, storage = place
    single = list_files([f"{root}/a.parquet"], storage)
    assert list(single) == [f"{root}/a.parquet"]
    assert list(list_files([f"{root}/in"], storage)) == [f"{root}/in/c.parquet"]
    assert list(list_files([f"{root}/in/"], storage)) == [f"{root}/in/c.parquet"]
    assert list(list_files([f"{root}/*.parquet"], storage)) == [f"{root}/a.parquet"]
    assert list(list_files([f"{root}/*/[bc].parquet"], storage)) == [f"{root}/in/c.parquet", f"{root}/sub/b.parquet"]
    several = list_files([f"{root}/sub", f"{root}/a.parquet", f"{root}/a*"], storage)
    assert list(several) == [f"{root}/sub/b.parquet", f"{root}/a.parquet"]
    assert several[f"{root}/a.parquet"] == single[f"{root}/a.parquet"]


def test_what_is_found_can_be_read(place: tuple[str, StorageConfig]) -> None:
    root, storage = place
    files = list_files([f"{root}/a.parquet", f"{root}/sub"], storage)
    columns = pa.schema([("id", pa.int64())])
    both = [read_footer(url, size, version, storage) for url, (size, version) in files.items()]
    assert [file.group_rows for file, _ in both] == [(3, 2), (4,)]
    assert both[0][1].names == ["id", "prompt", "other"]
    shards = cut_shards([file for file, _ in both], 3, 10**9)
    assert [(shard.first_row, shard.rows) for shard in shards] == [(0, 3), (3, 2), (0, 3), (3, 1)]
    source = ShardSource(shards, [file for file, _ in both], columns, storage, 100, 10**9)
    blocks = [block for task in source.get_read_tasks(2) for block in task()]
    rows = [from_ipc(row["rows"])["id"].to_pylist() for block in blocks for row in block.to_pylist()]
    assert rows == [[0, 1, 2], [3, 4], [5, 6, 7], [8]]


def test_paths_that_match_nothing_are_named(place: tuple[str, StorageConfig]) -> None:
    root, storage = place
    assert refusal([f"{root}/a.parquet", f"{root}/none"], storage) == f"{root}/none: no such file or folder"
    assert refusal([f"{root}/empty"], storage) == f"{root}/empty: folder without .parquet files"
    assert refusal([f"{root}/*.arrow"], storage) == f"{root}/*.arrow: matches no file"
    assert refusal([f"{root}/other"], storage).startswith(f"{root}/other/bad.parquet: not readable as Parquet: ")
    assert refusal([f"{root}/bad*"], storage).startswith(f"{root}/bad.parquet.txt: not readable as Parquet: ")


def test_a_missing_bucket_and_an_unknown_scheme_are_named(s3: StorageConfig) -> None:
    named = "s3://no-such-bucket/in: cannot be listed: s3://no-such-bucket: no such bucket"
    assert refusal(["s3://no-such-bucket/in"], s3) == named
    assert refusal(["gs://bucket/in"]).startswith("gs://bucket/in: storage gs:// is not supported")


def test_a_store_outage_while_planning_is_no_mistake_of_the_user(s3: StorageConfig, tmp_path: Path) -> None:
    nowhere = StorageConfig(endpoint_url="http://127.0.0.1:1", retry_seconds=0)
    for ask in (
        lambda: list_files(["s3://bucket/in"], nowhere),
        lambda: read_footer("s3://bucket/in", 1, "v", nowhere),
    ):
        with pytest.raises(StoreFailed, match=r"^s3://bucket/in/?: the store [^\n]+$"):
            ask()


def test_a_failing_disk_is_no_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", [3])

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", broken)
    with pytest.raises(OSError, match="Input/output error"):
        read_footer(f"{tmp_path}/a.parquet", 1, "v", LOCAL)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"}\n', "JSON"),
        (b'\xef\xbb\xbf[\n  {"prompt": "gr\xc3\xbc\xc3\x9f"}\n]', "JSON"),
        (b"id,prompt\n1,a\n", "CSV"),
        (b"id\tprompt\r\n1\ta\r\n", "CSV"),
        (gzip.compress(b"id,prompt\n1,a\n"), "gzip"),
        (b"ARROW1\0\0" + b"\0" * 99, "an Arrow IPC file"),
    ],
)
def test_a_file_of_another_format_is_named_as_such(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    named = f"{tmp_path}/a.parquet: not readable as Parquet: the file is {kind}; convert it to Parquet"
    assert refusal([str(tmp_path)]) == named


def test_a_damaged_footer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"x" * 30 + b"\x10\0\0\0PAR1")
    assert refusal([str(tmp_path)]).startswith(f"{tmp_path}/a.parquet: not readable as Parquet: Couldn't deserialize")


def test_an_existing_file_is_no_glob(tmp_path: Path) -> None:
    write(tmp_path / "[x].parquet", [3])
    write(tmp_path / "x.parquet", [2])
    assert list(list_files([f"{tmp_path}/[x].parquet"], LOCAL)) == [f"{tmp_path}/[x].parquet"]
    assert list(list_files([f"{tmp_path}/[xy].parquet"], LOCAL)) == [f"{tmp_path}/x.parquet"]


def test_a_file_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [3])
    os.rename(tmp_path / "a.parquet", os.fsencode(tmp_path) + b"/a\xff.parquet")
    assert refusal([str(tmp_path)]) == f"{tmp_path}/a\ufffd.parquet: the file name is not UTF-8; rename the file"


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [100])
    data = (tmp_path / "a.parquet").read_bytes()
    for part in (data[:-30], data[:3], b""):
        (tmp_path / "a.parquet").write_bytes(part)
        assert refusal([str(tmp_path)]).startswith(f"{tmp_path}/a.parquet: not readable as Parquet")


def test_versions_follow_the_content(tmp_path: Path, s3: StorageConfig) -> None:
    write(tmp_path / "a.parquet", [3])
    before = list_files([str(tmp_path)], LOCAL)
    assert list_files([str(tmp_path)], LOCAL) == before
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    assert list_files([str(tmp_path)], LOCAL) != before
    fs, _ = filesystem("s3://bucket", s3)
    url = f"s3://bucket/{uuid.uuid4().hex}.parquet"
    versions = []
    for content in (b"abc", b"abc", b"abd"):
        fs.pipe_file(url, content)
        versions.append(list_files([url], s3)[url])
    assert versions[0] == versions[1] != versions[2]


def test_the_footer_is_pinned(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [7, 2])
    file, schema = read_footer(f"{tmp_path}/a.parquet", 12, "v", LOCAL)
    assert (file.url, file.size, file.version, file.group_rows) == (f"{tmp_path}/a.parquet", 12, "v", (7, 2))
    assert file.rows == 9 and len(file.group_bytes) == 2 and all(size > 0 for size in file.group_bytes)
    assert schema.field("prompt").type == pa.string()


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


def test_small_groups_are_gathered() -> None:
    file = InputFile("f", 1, "v", (2, 2, 2, 9, 1, 1), (2, 2, 2, 9, 1, 1))
    assert [(shard.first_row, shard.rows) for shard in cut_shards([file], 4, 100)] == [
        (0, 4),
        (4, 2),
        (6, 4),
        (10, 4),
        (14, 1),
        (15, 2),
    ]


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.integers(1, 15),
    st.integers(1, 30),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_shards_are_read_row_for_row(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], shard_rows: int, task_rows: int, left: list[bool]
) -> None:
    """Of any file, any of its shards, such as a resumed job has left, in read tasks of any size."""
    path = tmp_path_factory.getbasetemp() / "law.parquet"
    write(path, groups)
    file = pinned(str(path))
    shards = [shard for shard in cut_shards([file], shard_rows, 2**30) if left[shard.index]]
    if not shards:
        return
    tables = list(read_shards(shards, ["id", "prompt"], LOCAL))
    expected = [list(range(shard.first_row, shard.first_row + shard.rows)) for shard in shards]
    assert [table["id"].to_pylist() for table in tables] == expected
    assert all(table.column_names == ["id", "prompt"] for table in tables)
    tasks = ShardSource(shards, [file], PROMPT, LOCAL, task_rows, 2**30).get_read_tasks(3)
    blocks = [block for task in tasks for block in task()]
    assert all(block.num_rows == 1 for block in blocks)
    rows = [block.to_pylist()[0] for block in blocks]
    assert [(row["shard"], row["url"], row["first_row"]) for row in rows] == [
        (shard.index, shard.url, shard.first_row) for shard in shards
    ]
    prompts = [from_ipc(row["rows"])["prompt"].to_pylist() for row in rows]
    assert prompts == [[f"prompt {one}" for one in some] for some in expected]
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
    tasks = ShardSource(shards, files, PROMPT, LOCAL, 8, 10**9).get_read_tasks(1)
    assert [task.metadata.num_rows for task in tasks] == [2, 2, 1, 2, 2, 1]
    names = Counter(name for task in tasks for name in task.metadata.input_files or ())
    assert names == {"a": 3, "b": 3}


def test_pieces_of_a_row_group_are_one_read_task() -> None:
    """Whatever the limits, and of those alone that a resumed job has left; its neighbours have tasks of their own."""
    files = [InputFile("a", 1, "v", (4, 0, 100, 4, 4), (40, 0, 1000, 40, 40))]
    shards = cut_shards(files, 10, 10**9)
    assert [shard.rows for shard in shards] == [4, *[10] * 10, 8]
    for limits in ((20, 10**9), (10**9, 100), (1, 1)):
        assert rows_of(group_shards(shards, files, *limits)) == [[4], [10] * 10, [8]]
    assert rows_of(group_shards(shards, files, 112, 10**9)) == [[4, *[10] * 10, 8]]
    assert rows_of(group_shards(shards[3:7:2], files, 1, 1)) == [[10, 10]]


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


def test_a_shard_longer_than_its_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [3])
    with pytest.raises(OSError, match=r"a\.parquet: cannot be read, .* fewer rows than when the job was planned"):
        list(read_shards([Shard(0, f"{tmp_path}/a.parquet", 0, 4)], ["id"], LOCAL))


@given(
    st.lists(
        st.tuples(
            st.none() | st.text(max_size=5),
            st.none() | st.lists(st.integers(-(2**31), 2**31 - 1)),
            st.binary(max_size=4),
        ),
        max_size=9,
    )
)
@settings(deadline=None)
def test_ipc_keeps_a_table(rows: list[tuple[str | None, list[int] | None, bytes]]) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.list_(pa.int32())), ("c", pa.large_binary())])
    columns = [[row[place] for row in rows] for place in range(3)]
    table = pa.table([pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema)
    assert from_ipc(to_ipc(table)).equals(table)
    assert from_ipc(to_ipc(table.select([]))).num_rows == len(rows)
