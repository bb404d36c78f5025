"""Both stages after a death, in this process: the rows that do not kill come out as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_folder import MemoryFolder
from part_builders import Commits, part_spec, shard_batch, shard_generator
from poison_stages import KILLER
from prompt_specs import spec_of

from actors.engine.engine import Engine
from pipeline.input.rows import from_ipc
from pipeline.prepare import prompts as prepares
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ADDED, ERROR, prepare_table
from pipeline.prepare.stage import prepare
from pipeline.runtime.quarantine import Quarantine

ROWS, POISON = 21, {4, 13}
GIVEN_UP = "the process died 2 times while it worked on this row alone"


class Death(BaseException):
    """The process is no more."""


def in_processes(call: Callable[[], Any]) -> Any:
    """What the call returns. Each death costs one process: one finds out, then three for each row that kills."""
    for _ in range(1 + len(POISON) * (1 + 2)):
        with suppress(Death):
            return call()
    return call()


@pytest.fixture
def spec(checkpoint: Path) -> PromptSpec:
    return spec_of(checkpoint)


def table() -> pa.Table:
    prompts: list[str | None] = [" ".join(["cheap"] * (1 + row % 4)) for row in range(ROWS)]
    prompts[8] = None
    for row in POISON:
        prompts[row] = f"food {KILLER}"
    return pa.table({"id": [f"row-{row}" for row in range(ROWS)], "prompt": prompts})


def test_prepare_gives_up_only_the_rows_that_kill(spec: PromptSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    want = prepare_table(table(), spec)
    tokenize = prepares.tokenize

    def deadly(checkpoint: Any, texts: Sequence[str], special_tokens: bool) -> Any:
        if any(KILLER in text for text in texts):
            raise Death
        return tokenize(checkpoint, texts, special_tokens)

    monkeypatch.setattr(prepares, "tokenize", deadly)
    quarantine = Quarantine(MemoryFolder(), "run", 2, "prepare")
    got = from_ipc(in_processes(lambda: prepare(shard_batch(3, table()), spec, quarantine))["rows"][0])
    assert got.schema == want.schema
    healthy = [row for row in range(ROWS) if row not in POISON]
    assert got.take(healthy).to_pylist() == want.take(healthy).to_pylist()
    for row in got.take(sorted(POISON)).to_pylist():
        assert [row[name] for name in ADDED if name != ERROR] == [[], *[None] * (len(ADDED) - 2)]
        assert row[ERROR] == GIVEN_UP
    assert quarantine.folder.names("_job/quarantine") == ["000003.prepare.json"]  # until the shard is committed


@pytest.mark.parametrize("samples", [1, 2])
def test_generate_gives_up_only_the_rows_that_kill(
    spec: PromptSpec, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    prepared = prepare_table(table(), spec)
    given = shard_batch(3, prepared)
    settings = {
        "checkpoint": str(checkpoint),
        "sampling": {"max_new_tokens": 8, "temperature": 1.0, "n": samples},
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_batch": 8,
    }
    part = part_spec(optional=("token_ids",))
    commits = Commits()
    shard_generator(settings, part, commits)(given)
    want = pq.read_table(io.BytesIO(commits.parts.pop(3)))
    deadly_ids = [prepared["__prompt_ids"][row].as_py() for row in sorted(POISON)]
    admit = Engine.admit

    def deadly(self: Engine, requests: Sequence[Any], prefix: Sequence[int] = ()) -> list[int]:
        if any(list(request.prompt_ids) in deadly_ids for request in requests):
            raise Death
        return admit(self, requests, prefix)

    monkeypatch.setattr(Engine, "admit", deadly)
    quarantine = Quarantine(MemoryFolder(), "run", 2, "generate")
    in_processes(lambda: shard_generator(settings, part, commits, quarantine=quarantine)(given))
    got = pq.read_table(io.BytesIO(commits.parts[3]))
    names = [f"row-{row}" for row in sorted(POISON)]
    healthy = [row for row in want.to_pylist() if row["id"] not in names]
    assert [row for row in got.to_pylist() if row["id"] not in names] == healthy
    bad = [row for row in got.to_pylist() if row["id"] in names]
    assert [row["id"] for row in bad] == names
    assert {row["error"] for row in bad} == {GIVEN_UP}
    assert quarantine.folder.names("_job/quarantine") == ["000003.generate.json"]  # until the part is committed
