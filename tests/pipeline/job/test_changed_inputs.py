"""Pinned input files that change or vanish: before a resume and in the middle of a run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from in_process import job_config, run_in_process

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.rows import read_shards
from pipeline.input.shards import cut_shards
from pipeline.run.ray_data import ShardSource
from pipeline.storage.folder import Folder, open_folder
from pipeline.storage.parquet import parquet_bytes

ROWS, SHARD_ROWS = 40, 10
SCHEMA = pa.schema([("prompt", pa.string())])


def parquet(prompt: str) -> bytes:
    table = pa.table({"prompt": [f"{prompt} {row}" for row in range(ROWS)]})
    return parquet_bytes(table, row_group_size=SHARD_ROWS)


OLD, NEW = parquet("alpha"), parquet("bravo")  # as many bytes


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Folder, StorageConfig]:
    """A folder with in.parquet."""
    storage: StorageConfig = request.getfixturevalue("s3") if request.param == "s3" else StorageConfig()
    url = f"s3://bucket/{uuid.uuid4().hex}" if request.param == "s3" else str(tmp_path)
    folder = open_folder(url, storage)
    folder.replace("in.parquet", OLD)
    return folder, storage


def tasks(place: tuple[Folder, StorageConfig]) -> list[Callable[[], Any]]:
    """The tasks of a job that has pinned the file: one a shard pair."""
    folder, storage = place
    ((url, (size, version)),) = list_files([f"{folder.url}/in.parquet"], storage).items()
    file, _ = read_footer(url, size, version, storage)
    read = partial(read_shards, schema=SCHEMA, storage=storage)
    shards = cut_shards([file], SHARD_ROWS, 2**30)
    return ShardSource(lambda some, files: read(files, some), shards, [file], 2 * SHARD_ROWS, 2**30).get_read_tasks(1)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("data", [NEW, OLD + b"x", b"", None], ids=["as long", "longer", "empty", "gone"])
def test_a_file_that_changes_during_a_run_is_never_mixed(
    place: tuple[Folder, StorageConfig], after: int, data: bytes | None
) -> None:
    """Before its first read task, between two shards of a task, between two tasks."""
    folder, _ = place
    blocks = chain.from_iterable(task() for task in tasks(place))
    assert len(list(islice(blocks, after))) == after
    if data is None:
        folder.remove("in.parquet")
    else:
        folder.replace("in.parquet", data)
    with pytest.raises(ValueError, match=r"in\.parquet: (changed|gone) since the job began; put the (old )?file back"):
        next(blocks)


def test_a_file_written_over_in_place_is_noticed(place: tuple[Folder, StorageConfig]) -> None:
    """Its inode stays, and a reader that has it open sees the new bytes."""
    folder, storage = place
    if storage.endpoint_url:
        pytest.skip("objects are replaced whole")
    blocks = iter(tasks(place)[0]())
    next(blocks)
    path = Path(folder.url) / "in.parquet"
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(NEW)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # at the least
    with pytest.raises(ValueError, match="changed since the job began"):
        next(blocks)


def test_another_input_path_for_an_output_is_named(tmp_path: Path, checkpoint: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(OLD)
    first, second = (job_config(tmp_path / f"{name}.parquet", tmp_path / "out", checkpoint) for name in ("a", "b"))
    run_in_process(first, limit=2)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(UserError) as refused:
        run_in_process(second, limit=2)
    assert str(refused.value) == (
        f"{tmp_path}/out: this output belongs to the input {tmp_path}/a.parquet, not to {tmp_path}/b.parquet; "
        "choose another output.path, or start again with --overwrite"
    )
