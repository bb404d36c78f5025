"""Input files are listed, named when they cannot be read, and pinned; columns are read from as little as need be."""

from __future__ import annotations

import errno
import gzip
import os
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_files import read_columns, uploaded, write_rows
from parquet_damage import ROWS, UNREADABLE, write_unreadable

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.rows import read_rows
from pipeline.input.shards import cut_shards
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import filesystem
from pipeline.storage.parquet import parquet_bytes
from pipeline.storage.s3 import PatientS3FileSystem

LOCAL = StorageConfig()
RECIPE = "list its files as configs/recipes/lakehouse does"


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
    write_rows(folder / "a.parquet", [3, 2])
    (folder / "sub").mkdir()
    write_rows(folder / "sub" / "b.parquet", [4], first=5)
    (folder / "bad.parquet.txt").write_text("not parquet")
    (folder / "other").mkdir()
    (folder / "other" / "bad.parquet").write_text("not parquet either")
    (folder / "empty").mkdir()
    (folder / "empty" / "x.txt").write_text("")
    (folder / "in").mkdir()
    write_rows(folder / "in" / "c.parquet", [2], first=9)
    for hidden in ("in/_old.parquet", "in/.part.parquet", "in/_tmp/d.parquet", "in/.git/e.parquet", "in2/f.parquet"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        write_rows(folder / hidden, [1])
    if request.param == "local":
        return str(folder), LOCAL
    storage: StorageConfig = request.getfixturevalue("s3")
    return uploaded(folder, storage), storage


def test_list_files_of_a_file_a_folder_a_glob_and_a_list(place: tuple[str, StorageConfig]) -> None:
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


def test_spark_dates_beyond_nanoseconds_keep_their_value(tmp_path: Path) -> None:
    """Spark's INT96 has any year; in nanoseconds an int64 ends in 2262."""
    path, end = tmp_path / "a.parquet", datetime(9999, 12, 31, 23)
    table = pa.table({"end": pa.array([end, None], pa.timestamp("us"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    ((url, (size, version)),) = list_files([str(path)], LOCAL).items()
    file, schema = read_footer(url, size, version, LOCAL)
    (read,) = read_rows(cut_shards([file], 5, 10**6), file, schema, LOCAL)
    assert read["end"].to_pylist() == [end, None]


def test_a_path_without_files_is_named(place: tuple[str, StorageConfig]) -> None:
    root, storage = place
    assert refusal([f"{root}/a.parquet", f"{root}/none"], storage) == f"{root}/none: no such file or folder"
    assert refusal([f"{root}/empty"], storage) == f"{root}/empty: folder without .parquet files"
    nothing = "matches no file; names that begin with _ or . are ignored"
    assert refusal([f"{root}/*.arrow"], storage) == f"{root}/*.arrow: {nothing}"
    assert refusal([f"{root}/in/_*.parquet"], storage) == f"{root}/in/_*.parquet: {nothing}"
    assert refusal([f"{root}/other"], storage).startswith(f"{root}/other/bad.parquet: not readable as Parquet: ")
    assert refusal([f"{root}/bad*"], storage).startswith(f"{root}/bad.parquet.txt: not readable as Parquet: ")


def test_an_object_that_marks_a_folder_is_no_file(s3: StorageConfig) -> None:
    """Consoles and Spark create such objects: without bytes, with a name that ends in a slash."""
    fs, folder = filesystem(f"s3://bucket/{uuid.uuid4().hex}", s3)
    bucket, _, key = folder.partition("/")
    for name in ("", "a.parquet/", "a.parquet/part-0"):
        fs.call_s3("put_object", Bucket=bucket, Key=f"{key}/{name}", Body=b"")
    assert list(list_files([f"s3://{folder}/**"], s3)) == [f"s3://{folder}/a.parquet/part-0"]


def test_a_missing_bucket_and_an_unknown_scheme_are_named(s3: StorageConfig) -> None:
    named = "s3://no-such-bucket/in: cannot be listed: s3://no-such-bucket: no such bucket"
    assert refusal(["s3://no-such-bucket/in"], s3) == named
    assert refusal(["gs://bucket/in"]).startswith("gs://bucket/in: storage gs:// is not supported")


def test_an_object_is_read_without_the_right_to_list(s3: StorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, _ = filesystem("s3://bucket", s3)
    name = f"s3://bucket/{uuid.uuid4().hex}/a[1].parquet"
    fs.pipe_file(name, parquet_bytes(pa.table({"id": ["x"]})))
    call = PatientS3FileSystem._call_s3

    async def gate(self: PatientS3FileSystem, method: str, *settings: Any, **options: Any) -> Any:
        if method.startswith("list_objects"):
            raise PermissionError("access refused: AccessDenied")
        return await call(self, method, *settings, **options)

    monkeypatch.setattr(PatientS3FileSystem, "_call_s3", gate)
    assert read_columns(name, ["id"], s3) == {"id": ["x"]}
    for other in (f"{name}x", name.replace("a[1]", "*"), os.path.dirname(name)):
        assert refusal([other], s3).startswith(f"{other}: cannot be listed: ")


def test_a_store_outage_is_not_a_user_error(s3: StorageConfig, tmp_path: Path) -> None:
    nowhere = StorageConfig(endpoint_url="http://127.0.0.1:1", retry_seconds=0)
    for ask in (
        lambda: list_files(["s3://bucket/in"], nowhere),
        lambda: read_footer("s3://bucket/in", 1, "v", nowhere),
    ):
        with pytest.raises(StoreFailed, match=r"^s3://bucket/in/?: the store [^\n]+$"):
            ask()


def test_a_disk_failure_is_not_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "a.parquet", [3])

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", broken)
    with pytest.raises(OSError, match="Input/output error"):
        read_footer(f"{tmp_path}/a.parquet", 1, "v", LOCAL)


@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"}\n', "JSON", "set input.format: jsonl"),
        (b'\xef\xbb\xbf[\n  {"prompt": "gr\xc3\xbc\xc3\x9f"}\n]', "JSON", "set input.format: jsonl"),
        (b"id,prompt\n1,a\n", "CSV", "set input.format: csv"),
        (b"id\tprompt\r\n1\ta\r\n", "CSV", "set input.format: csv"),
        (gzip.compress(b"id,prompt\n1,a\n" * 9999, mtime=0), "gzipped CSV", "set input.format: csv"),
        (gzip.compress(b'{"id": 1}\n', mtime=0), "gzipped JSON", "set input.format: jsonl"),
        (b"ARROW1\0\0" + b"\0" * 99, None, "Parquet magic bytes not found"),
        (b"PAR1" + b"x" * 30 + b"\x10\0\0\0PAR1", None, "Couldn't deserialize"),
        (b"PAR1" + b"x" * 30, None, ""),  # cut short
        (b"", None, ""),
    ],
)
def test_a_file_that_is_no_parquet_is_named_with_its_format(
    tmp_path: Path, content: bytes, kind: str | None, remedy: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    named = f"{tmp_path}/a.parquet: not readable as Parquet: "
    said = refusal([str(tmp_path)])
    assert said.startswith(f"{named}{remedy}") if kind is None else said == f"{named}the file is {kind}; {remedy}"


def test_a_glob_leaves_out_what_a_folder_leaves_out(place: tuple[str, StorageConfig]) -> None:
    root, storage = place
    in_folder = list(list_files([f"{root}/in"], storage))
    for pattern in ("in/*", "in/**", "in/*.parquet", "in/**/*.parquet", "i*/c*"):
        assert list(list_files([f"{root}/{pattern}"], storage)) == in_folder, pattern
    assert list(list_files([f"{root}/in/_tmp/*"], storage)) == [f"{root}/in/_tmp/d.parquet"]  # asked for by name
    assert list(list_files([f"{root}/in/_old.parquet"], storage)) == [f"{root}/in/_old.parquet"]


def test_the_file_of_that_very_name_comes_before_the_glob(place: tuple[str, StorageConfig], tmp_path: Path) -> None:
    root, storage = place
    fs, inside = filesystem(f"{root}/odd", storage)
    names = ["[x].parquet", "x.parquet", "a*b?.parquet", "[d]/x.parquet"]
    for name in names:
        fs.pipe_file(f"{inside}/{name}", name.encode()) if storage is not LOCAL else _write(inside, name)
    for name in names:
        assert list(list_files([f"{root}/odd/{name}"], storage)) == [f"{root}/odd/{name}"]
    assert list(list_files([f"{root}/odd/[d]"], storage)) == [f"{root}/odd/[d]/x.parquet"]
    assert list(list_files([f"{root}/odd/[xy].parquet"], storage)) == [f"{root}/odd/x.parquet"]


def _write(folder: str, name: str) -> None:
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)


def linked(tmp_path: Path) -> Path:
    """A folder with a file, a link to a file, one to a folder, and one to a folder above."""
    data, blobs = tmp_path / "data", tmp_path / "blobs"
    for folder in (data, blobs / "more"):
        folder.mkdir(parents=True)
    write_rows(data / "a.parquet", [2])
    write_rows(blobs / "1234", [3], first=2)
    write_rows(blobs / "more" / "c.parquet", [4], first=5)
    (data / "b.parquet").symlink_to("../blobs/1234")
    (data / "sub").symlink_to("../blobs/more")
    (blobs / "more" / "up").symlink_to("../../data")
    return data


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    data = linked(tmp_path)
    files = list_files([str(data)], LOCAL)
    assert list(files) == [f"{data}/a.parquet", f"{data}/b.parquet", f"{data}/sub/c.parquet"]
    assert files[f"{data}/b.parquet"] == list_files([f"{data}/b.parquet"], LOCAL)[f"{data}/b.parquet"]
    assert files[f"{data}/b.parquet"][0] == (tmp_path / "blobs" / "1234").stat().st_size
    assert list_files([f"{data}/*.parquet", f"{data}/*/*.parquet"], LOCAL) == files
    assert list_files([f"{data}/**"], LOCAL) == files
    (tmp_path / "link").symlink_to("data")
    assert list(list_files([f"{tmp_path}/link"], LOCAL)) == [name.replace("/data/", "/link/") for name in files]


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    data = linked(tmp_path)
    (tmp_path / "blobs" / "1234").unlink()
    for path in (data, data / "*.parquet", data / "b.parquet"):
        assert refusal([str(path)]).startswith(f"{data}/b.parquet: broken link; ")
    assert list(list_files([f"{data}/a*"], LOCAL)) == [f"{data}/a.parquet"]
    (tmp_path / "blobs" / "1234").symlink_to("1234")
    assert refusal([str(data)]).startswith(f"{data}/b.parquet: broken link; ")


@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize(
    ("mark", "remedy"),
    [
        ("_delta_log/00000000000000000000.json", RECIPE),
        ("metadata/00000-1.metadata.json", RECIPE),
        (".hoodie/hoodie.properties", "write its current rows to Parquet files elsewhere"),
    ],
)
def test_a_table_is_not_read_as_its_files(
    tmp_path: Path, request: pytest.FixtureRequest, store: str, mark: str, remedy: str
) -> None:
    table = tmp_path / "lake" / "t"
    for name in (mark, "data/dt=1/a.parquet", "dt=2/b.parquet", "c.parquet"):
        _write(str(table), name)
    root, storage = str(tmp_path), LOCAL
    if store == "s3":
        storage = request.getfixturevalue("s3")
        root = uploaded(tmp_path, storage)
    paths = ["lake/t", "lake", "lake/t/*.parquet", "lake/t/dt=*/*.parquet", "lake/t/dt=2", "lake/t/c.parquet"]
    for path in paths if "metadata" not in mark else [*paths, "lake/t/data/dt=1/*", "lake/t/data"]:
        message = refusal([f"{root}/{path}"], storage)
        assert message.startswith(f"{root}/lake/t: ") and message.endswith(f"; {remedy}"), path
    assert len(list_files([f"{root}/lake/t"], storage, "parquet")) == 3  # asked for: the files as they are


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_arrow_cannot_read_is_refused_by_the_footer_if_the_column_is_needed(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.parquet"
    write_unreadable(path, what)
    size = path.stat().st_size
    assert read_footer(str(path), size, "v", LOCAL, ["id"])[0].rows == ROWS
    assert read_columns(str(path), ["id"], LOCAL, 2) == {"id": ["a-0", "a-1"]}
    if what == "page":  # which no footer tells
        read_footer(str(path), size, "v", LOCAL, ["id", "prompt"])
        with pytest.raises(UserError, match=r"a\.parquet: cannot be read, .* damaged .*; replace the file") as damaged:
            read_columns(str(path), ["prompt"], LOCAL)
        assert damaged.type is UserError  # of an error in a worker, Ray keeps the name of its class
    else:
        with pytest.raises(UserError, match=r"a\.parquet: column 'prompt' cannot be read \(") as refused:
            read_footer(str(path), size, "v", LOCAL, ["id", "prompt"])
        assert "\n" not in str(refused.value)


def test_every_codec_and_encoding_that_arrow_writes_is_read(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "number": [1, 2], "lists": [[{"a.b": "x"}], []], "a.b": ["c", "d"]})
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        pq.write_table(table, tmp_path / f"{codec}.parquet", compression=codec, row_group_size=1)
    encodings = {"text": "DELTA_BYTE_ARRAY", "number": "DELTA_BINARY_PACKED", "a.b": "DELTA_LENGTH_BYTE_ARRAY"}
    pq.write_table(table, tmp_path / "delta.parquet", use_dictionary=False, column_encoding=encodings)
    split = {"number": "BYTE_STREAM_SPLIT"}
    pq.write_table(table, tmp_path / "split.parquet", use_dictionary=False, column_encoding=split)
    for path in tmp_path.iterdir():
        file, _ = read_footer(str(path), path.stat().st_size, "v", LOCAL, table.column_names)
        assert file.rows == 2, path


def test_a_file_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [3])
    os.rename(tmp_path / "a.parquet", os.fsencode(tmp_path) + b"/a\xff.parquet")
    assert refusal([str(tmp_path)]) == f"{tmp_path}/a\ufffd.parquet: the file name is not UTF-8; rename the file"


def test_the_version_changes_with_the_content(tmp_path: Path, s3: StorageConfig) -> None:
    write_rows(tmp_path / "a.parquet", [3])
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


@given(rows=st.integers(0, 9), group=st.integers(1, 4), limit=st.none() | st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_the_first_rows_whatever_the_row_groups(tmp_path: Path, rows: int, group: int, limit: int | None) -> None:
    texts, ids = [f"text {row}" for row in range(rows)], [[row] if row % 3 else None for row in range(rows)]
    table = pa.table({"text": pa.array(texts, pa.string()), "ids": pa.array(ids, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    path = str(tmp_path / "a.parquet")
    assert read_columns(path, ("ids", "text", "ids"), LOCAL, limit) == {"ids": ids[:limit], "text": texts[:limit]}


@pytest.mark.parametrize("limit", [None, 2])
def test_other_columns_are_not_read(tmp_path: Path, limit: int | None) -> None:
    """Their pages are torn, and nobody minds."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"good": ["a", "b", "c"], "torn": ["x" * 9999] * 3}), path, compression="none")
    torn = pq.read_metadata(path).row_group(0).column(1)
    start = torn.dictionary_page_offset or torn.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + torn.total_compressed_size] = b"\xff" * torn.total_compressed_size
    path.write_bytes(data)
    assert read_columns(str(path), ("good",), LOCAL, limit) == {"good": ["a", "b", "c"][:limit]}
    with pytest.raises(UserError, match="cannot be read, since it is damaged or cut short"):
        read_columns(str(path), ("torn",), LOCAL, limit)


def test_columns_of_paths_and_text_files_and_those_that_may_be_missing(tmp_path: Path) -> None:
    for day in ("1", "__HIVE_DEFAULT_PARTITION__", "a%20b"):
        (tmp_path / f"dt={day}").mkdir()
        (tmp_path / f"dt={day}" / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    read = read_columns(f"{tmp_path}/*/*.jsonl", ["text", "dt"], LOCAL, limit=5, optional=["id"])
    assert read == {"text": ["x", "y", "x", "y", "x"], "dt": ["1", "1", None, None, "a b"]}
