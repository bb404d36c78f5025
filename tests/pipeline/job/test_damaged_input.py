"""Input files that lie or are damaged: the job fails with the file named; odd names of files stay in the data."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from part_builders import fake_answers, part_spec

from pipeline.commit.sink import PART, part_name
from pipeline.config.job import StorageConfig
from pipeline.generate.output import part_bytes, part_table
from pipeline.input.files import list_files, read_footer
from pipeline.input.shards import Shard, cut_shards, read_groups

LOCAL = StorageConfig()
ROWS = 500


def written(path: Path) -> pa.Table:
    draw = random.Random(1)
    table = pa.table({"prompt": [f"{draw.random()}" for _ in range(ROWS)]})
    pq.write_table(table, path, row_group_size=200, use_dictionary=False, compression="zstd")
    return table


def read(path: Path, shards: list[Shard]) -> list[str]:
    return [text for table in read_groups(shards, ["prompt"], LOCAL) for text in table["prompt"].to_pylist()]


def test_a_damaged_page_names_the_file(tmp_path: Path) -> None:
    """Never a traceback of some other kind; what is read although it is damaged has all its rows."""
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
        except OSError as error:
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
    for spec in (part_spec(), part_spec(id_column=None)):
        table = part_table(rows, fake_answers(3), spec, shard)
        assert table["id"].to_pylist() == (
            rows["id"].to_pylist() if spec.id_column else [f"{name}:{n}" for n in range(3)]
        )
        assert pq.read_table(pa.BufferReader(part_bytes(table, spec, shard))).num_rows == 3
    assert PART.fullmatch(part_name(shard.index))
