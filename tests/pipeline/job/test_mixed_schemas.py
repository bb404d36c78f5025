"""Data as it is found: files of one folder that agree in little. Every row is answered or says why not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_config
from prompt_specs import spec_of

from actors.engine.types import SamplingParams
from pipeline import job as jobs
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import InputFile, list_files, read_footer
from pipeline.input.shards import cut_shards, read_groups
from pipeline.prepare import tokenizer as tokenizers
from pipeline.prepare.prompts import ERROR, prepare_table

LOCAL = StorageConfig()


def text(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    """Text that nobody has checked."""
    return pa.array(values, pa.binary()).cast(kind, safe=False)


def exotic(rows: int) -> dict[str, pa.Array]:
    """Columns that no job needs."""
    return {
        "int96": pa.array([None] * rows, pa.timestamp("ns")),
        "half": pa.array(np.zeros(rows, np.float16)),
        "decimal256": pa.array([Decimal(10) ** 60] * rows, pa.decimal256(70, 2)),
        "duration": pa.array([2**62] * rows, pa.duration("s")),
        "fixed": pa.array([b"abcd"] * rows, pa.binary(4)),
        "uuid": pa.array([b"u" * 16] * rows, pa.uuid()),
        "deep": pa.array([[{"a": [{"b": None}]}]] * rows),
        "view": pa.array([[1]] * rows, pa.list_view(pa.int8())),
        "twice": pa.array([1] * rows),
    }


def write_files(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Files with columns key, prompt, topic, tags, "a.b" in many types; key -> (the topic, part of the row's error)."""
    expected: dict[str, tuple[str, str | None]] = {}
    tags = pa.map_(pa.string(), pa.list_(pa.struct([("n", pa.int32())])))

    def write(
        name: str, columns: dict[str, Any], rows: int, errors: dict[int, str] | None = None, **options: Any
    ) -> None:
        keys = [f"{name}-{row}" for row in range(rows)]
        table = pa.table({"topic": [f"{key} topic" for key in keys], "a.b": ["dotted"] * rows, **columns, "name": keys})
        errors = errors or {}
        expected.update({key: (name, errors.get(row)) for row, key in enumerate(keys)})
        metadata = {"pandas": "{}", "written by": name}
        pq.write_table(table.replace_schema_metadata(metadata), folder / f"{name}.parquet", **options)

    write(
        "plain",
        {
            "key": pa.array([1, 1, None, 2], pa.int32()),
            "prompt": ["alpha", None, "bravo " * 9000, " "],
            "tags": pa.array([[("k", [{"n": 1}])], None, [], None], tags),
        },
        4,
        {1: "prompt is null", 2: "leaves no room in a context of 64", 3: "prompt is empty"},
    )
    large = {
        "key": pa.array([2**40, 2**40], pa.int64()),
        "prompt": pa.array(["charlie", "delta"], pa.large_string()),
        "topic": pa.array(["large", "topic"], pa.large_string()),
        "tags": pa.nulls(2),
        "a": pa.array([{"b": 1}, {"b": 2}]),  # its path in the file is that of the column "a.b", too
    }
    write("large", large, 2)
    write(
        "dictionary",
        {
            "key": pa.array([5, 6, 7], pa.uint16()),
            "prompt": pa.array(["echo", "echo", None]).dictionary_encode(),
            "topic": pa.array(["x", "y", "x"]).dictionary_encode(),
            "tags": pa.array([[("k", [{"n": 1}])]] * 3, pa.map_(pa.string(), pa.list_(pa.struct([("n", pa.int64())])))),
        },
        3,
        {2: "prompt is null"},
        row_group_size=1,
    )
    write("null", {"key": pa.nulls(2), "prompt": ["foxtrot", "golf"], "topic": pa.nulls(2), "tags": pa.nulls(2)}, 2)
    write(
        "broken",
        {
            "key": pa.array([9.0, 9.5, 10.0, 11.0]),
            "prompt": text([b"good", b"b\xffd", None, b"india"], pa.string()),
            "topic": text([b"good", b"good", b"b\xc3", "\u00e9".encode()], pa.large_string()),
            "tags": pa.nulls(4),
            **exotic(4),
        },
        4,
        {1: "column prompt: not UTF-8", 2: "column topic: not UTF-8"},  # whatever the prompt is worth
    )
    none = {"key": pa.array([], pa.int64()), "prompt": pa.array([], pa.string()), "tags": pa.nulls(0)}
    write("none", none, 0)
    with pq.ParquetWriter(folder / "gaps.parquet", pq.read_schema(folder / "large.parquet")) as writer:
        rows = pq.read_table(folder / "large.parquet")
        named = rows.set_column(rows.schema.get_field_index("name"), "name", pa.array(["gaps-0", "gaps-1"]))
        for table in (named.slice(0, 0), named.slice(0, 1), named.slice(0, 0), named.slice(1), named.slice(0, 0)):
            writer.write_table(table, row_group_size=1)
    expected |= {"gaps-0": ("gaps", None), "gaps-1": ("gaps", None)}
    return expected


def config(inputs: Path, into: Path, checkpoint: Path, **changes: Any) -> JobConfig:
    keep = ["name", "topic", "tags", "a.b"]
    return job_config(inputs, into, checkpoint, input={"id": "key"}, output={"keep": keep}, shard_rows=3, **changes)


def test_a_folder_of_doubtful_files(in_process: None, checkpoint: Path, tmp_path: Path) -> None:
    inputs, output = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    expected = write_files(inputs)
    job = config(inputs, output, checkpoint)
    outcome = jobs.run(job)
    rows = {row["name"]: row for row in pq.read_table(output).to_pylist()}
    assert set(rows) == set(expected) and outcome.totals.rows == len(expected)
    for name, (file, problem) in expected.items():
        error = rows[name]["error"]
        assert (error is None) if problem is None else (problem in str(error)), (name, error)
        assert (rows[name]["generated_text"] is None) == (error is not None)
        assert rows[name]["a.b"] == "dotted"
        assert (rows[name]["topic"] is None) == (file == "null")
    assert rows["broken-2"]["topic"] == "b\ufffd" and rows["broken-3"]["topic"] == "\u00e9"
    assert [rows[f"broken-{row}"]["id"] for row in range(4)] == [9.0, 9.5, 10.0, 11.0]
    assert rows["large-0"]["id"] == float(2**40) and rows["null-0"]["id"] is None
    assert rows["dictionary-0"]["tags"] == rows["plain-0"]["tags"] == [("k", [{"n": 1}])]

    parts = sorted(output.glob("part-*.parquet"))
    schemas = [pq.read_schema(part) for part in parts]
    assert len(parts) == len(outcome.manifest.shards) >= 8
    names = ("fingerprint", "shard", "file", "first_row", "num_layers")
    ours = {f"skipdecode.{name}".encode() for name in names}
    assert all(set(schema.metadata) == ours for schema in schemas)
    assert len({schema.remove_metadata().serialize().to_pybytes() for schema in schemas}) == 1
    kinds = {field.name: field.type for field in schemas[0]}
    assert kinds["id"] == pa.float64() and kinds["topic"] == pa.large_string() and kinds["a.b"] == pa.string()
    assert jobs.run(job).fresh_rows == 0


def pinned(path: Path) -> InputFile:
    ((name, (size, version)),) = list_files([str(path)], LOCAL).items()
    return read_footer(name, size, version, LOCAL)[0]


def test_prompts_of_50000_characters_are_tokenized_a_few_at_a_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are those of all at once, in order, and no call sees much more than the bound."""
    load, sizes = tokenizers.tokenizer_of(str(checkpoint)), []

    def tokenizer(texts: list[str], **options: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return load(texts, **options)

    tokenizer.bos_token_id = load.bos_token_id  # type: ignore[attr-defined]
    monkeypatch.setattr(tokenizers, "tokenizer_of", lambda _: tokenizer)
    monkeypatch.setattr(tokenizers, "BATCH_CHARACTERS", 120_000)
    prompts = ["x" * 50_000, "short", *["word " * 10_000] * 4, "e\u0301 " * 17_000, "last"]
    done = prepare_table(pa.table({"prompt": prompts}), spec_of(checkpoint, params=SamplingParams(max_new_tokens=8)))
    counts = [len(ids) for ids in load(prompts)["input_ids"]]
    fits = [count < 64 for count in counts]
    assert fits == [len(prompt) < 10 for prompt in prompts]
    assert [error is None for error in done[ERROR].to_pylist()] == fits
    for count, error in zip(counts, done[ERROR].to_pylist(), strict=True):
        assert error is None or error.startswith(f"prompt of {count} tokens ")
    assert sum(sizes) == sum(map(len, prompts)) and len(sizes) == 3 and max(sizes) < 170_000


def test_a_large_row_group_is_decoded_once_and_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows that are decoded: all of them once for all shards, not one beyond the last that is needed."""
    rows, width = 3000, 1000
    table = pa.table({"n": range(rows), "prompt": [f"{row:06d}" + "x" * width for row in range(rows)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, use_dictionary=False)
    file = pinned(tmp_path / "a.parquet")
    shards = cut_shards([file], 4096, 300_000)
    assert len(shards) > 9
    decoded: list[int] = []
    original = pq.ParquetFile.iter_batches

    def counted(self: pq.ParquetFile, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        for batch in original(self, *arguments, **options):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    monkeypatch.setattr("pipeline.input.shards.BATCH_BYTES", 100_000)
    for stream in (10**9, 1):  # whole columns at once, and page by page
        monkeypatch.setattr("pipeline.input.shards.STREAM_BYTES", stream)
        for left in (shards, shards[2:3], shards[:1] + shards[4:6]):
            decoded.clear()
            tables = list(read_groups(left, ["n", "prompt"], LOCAL))
            for shard, read in zip(left, tables, strict=True):
                assert read.equals(table.slice(shard.first_row, shard.rows))
            assert max(decoded) * width <= 100_000
            end = left[-1].first_row + left[-1].rows
            assert end <= sum(decoded) < end + max(decoded)


LARGE = '''
import sys
from pipeline.config.job import StorageConfig
from pipeline.input.schema import conform
from pipeline.input.files import list_files, read_footer
from pipeline.input.rows import to_ipc
from pipeline.input.shards import cut_shards, group_shards, read_groups


def peak() -> int:
    """MiB; not of getrusage, which begins with what the parent had."""
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

((url, (size, version)),) = list_files([sys.argv[1]], StorageConfig()).items()
file, schema = read_footer(url, size, version, StorageConfig())
before = peak()
shards = cut_shards([file], 4096, 64 * 2**20)
(task,) = group_shards(shards, [file], 50_000, 512 * 2**20)
row = characters = 0
for shard, table in zip(task, read_groups(task, schema.names, StorageConfig()), strict=True):
    table = conform(table, schema)
    assert len(to_ipc(table)) < 80 * 2**20
    for key, prompt in zip(table["key"].to_pylist(), table["prompt"], strict=True):
        text = prompt.as_py()
        assert key == row and text.startswith(f"{row % 500:06d} "), (key, row)
        row, characters = row + 1, characters + len(text)
print(row, characters, len(task), before, peak())
'''


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_a_row_group_of_more_than_two_gib(tmp_path: Path, compression: str) -> None:
    """45,000 prompts of 50,000 characters in one row group, read with less than 1 GiB, imports and all."""
    rows, width, repeat = 45_000, 50_000, 500
    piece = pa.array([f"{row:06d} " + "x" * (width - 7) for row in range(repeat)], pa.large_string())
    prompts = pa.chunked_array([piece] * (rows // repeat))  # 25 MB in memory
    path = tmp_path / "large.parquet"
    table = pa.table({"key": range(rows), "prompt": prompts})
    pq.write_table(table, path, row_group_size=rows, use_dictionary=False, compression=compression)
    (group,) = pinned(path).group_bytes
    assert group > 2**31
    ran = subprocess.run([sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=True)
    counted, characters, shards, before, peak = map(int, ran.stdout.split())
    print(f"{compression}: {group} bytes in {shards} shards; {before} MiB before, peak {peak}")
    assert (counted, characters) == (rows, rows * width)
    assert shards >= 32
    assert peak < 1024
