"""What all prompts of a job begin with is found in a few of its rows, and kept with the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import poison_stages
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess

from actors.engine.errors import UserError
from actors.engine.model.loading import load_tokenizer
from actors.engine.scheduler import SHORTEST_PREFIX, constant_prefix
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import Files, list_files
from pipeline.plan import shared_prefix
from pipeline.plan.hardware import Hardware
from pipeline.plan.manifest import Manifest, plan_job
from pipeline.plan.plan_files import load, save
from pipeline.run.ray_data import RayData
from pipeline.storage.folder import open_folder

RULES = "Name the place, its area and its food in one line."


def plan(
    folder: Path,
    checkpoint: Path,
    stored: Manifest | None = None,
    hardware: Hardware | None = None,
    files: Files | None = None,
    **sections: Any,
) -> Manifest:
    values = {"output": {"path": "out"}, "model": {"path": str(checkpoint)}, "shard_rows": 40, **sections}
    values["input"] = {"path": str(folder), "template": RULES + " {{ q }}", **sections.get("input", {})}
    config = JobConfig.model_validate(values)
    found = resolve_checkpoint(config.model, config.storage)
    return plan_job(config, found, found.checkpoint.schedule({}), None, stored, files, hardware=hardware)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        questions = [f"{row} {name}" for row in range(100)]
        pq.write_table(pa.table({"q": questions, "n": [None] * 99 + [1]}), folder / f"{name}.parquet")
    return folder


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.lists(st.integers(0, 1), min_size=1), max_size=6))
@settings(deadline=None)
def test_it_is_the_longest_that_leaves_each_a_token(common: list[int], rests: list[list[int]]) -> None:
    ids = [[*common, *rest] for rest in rests]
    prefix = constant_prefix(ids)
    assert all(one[: len(prefix)] == prefix and len(one) > len(prefix) for one in ids)
    assert not prefix or len(prefix) >= SHORTEST_PREFIX
    if len(ids) > 1:
        longer = [one[: max(len(prefix) + 1, SHORTEST_PREFIX)] for one in ids]
        room = all(len(one) > len(longer[0]) for one in ids)
        assert not (room and all(one == longer[0] for one in longer))
        assert prefix or len(common) < SHORTEST_PREFIX


def test_one_prompt_or_none_has_no_constant_part() -> None:
    assert constant_prefix([]) == [] and constant_prefix([list(range(50))]) == []
    assert constant_prefix([list(range(50))] * 2) == list(range(49))


def test_a_templates_beginning_is_found_and_pinned(inputs: Path, checkpoint: Path, tmp_path: Path) -> None:
    manifest = plan(inputs, checkpoint)
    whole = load_tokenizer(checkpoint)(RULES)["input_ids"][:-1]  # without <sep>
    assert list(manifest.batching.prefix[: len(whole)]) == whole and len(whole) >= SHORTEST_PREFIX
    assert len(manifest.batching.prefix) <= len(whole) + 1

    folder = open_folder(str(tmp_path / "out"), StorageConfig())
    save(folder, replace(manifest, batching=replace(manifest.batching, prefix=(1, 2, 3))))
    resumed = plan(inputs, checkpoint, load(folder))
    assert resumed.batching.prefix == (1, 2, 3) and resumed.fingerprint == manifest.fingerprint


def test_bad_rows_have_no_say_and_alone_no_prefix(inputs: Path, checkpoint: Path) -> None:
    """`n` is null but in the last row of each file; `q` has three letters in the first ten."""
    bad = {"template": RULES + " {{ 1 + n }}"}
    assert plan(inputs, checkpoint, input=bad, max_error_rate=1).batching.prefix == ()
    mixed = plan(inputs, checkpoint, input={"template": RULES + " {{ 1 // (q | length - 3) }} {{ q }}"})
    assert len(mixed.batching.prefix) >= len(load_tokenizer(checkpoint)(RULES)["input_ids"]) - 1


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_a_job_of_which_no_sampled_row_can_be_answered_is_refused(
    tmp_path: Path, inputs: Path, checkpoint: Path, shared_prefix: bool
) -> None:
    told = r"none of 32 sampled rows can be answered; the first error: .*max_error_rate: 1 runs the job all the same"
    bad = {"shared_prefix": shared_prefix, "input": {"template": "{{ 1 + n }}"}}
    with pytest.raises(UserError, match=told):
        plan(inputs, checkpoint, **bad)
    assert plan(inputs, checkpoint, files=list_files([str(inputs)], StorageConfig()), **bad).rows == 200  # incremental
    (inputs / "b.parquet").unlink()
    assert plan(inputs, checkpoint, **bad).rows == 100  # too few rows are sampled
    texts = {"p": [f"{row} " + "alpha " * 200 for row in range(100)]}
    for name in ("a", "b"):
        pq.write_table(pa.table(texts), tmp_path / "in" / f"{name}.parquet")
    with pytest.raises(UserError, match="leaves no room"):
        plan(inputs, checkpoint, input={"prompt": "p", "template": None}, shared_prefix=shared_prefix)


def test_only_the_first_rows_are_read(tmp_path: Path, checkpoint: Path) -> None:
    """A row group of many pages: what lies behind the first is damaged, and nobody notices."""
    path = tmp_path / "a.parquet"
    questions = [f"{row} " + "x" * 500 for row in range(4000)]
    pq.write_table(pa.table({"q": questions}), path, compression="none", use_dictionary=False, data_page_size=4096)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20_000] = b"\xff" * 20_000
    path.write_bytes(bytes(data))
    with pytest.raises((OSError, pa.ArrowException)):
        pq.read_table(path)
    template = RULES + " {{ q | truncate(9) }}"
    assert (
        len(plan(tmp_path, checkpoint, input={"template": template}, shard_rows=4000).batching.prefix)
        >= SHORTEST_PREFIX
    )


class IsolatedPlanning(InProcess):
    """Plans as `skipdecode run` does."""

    call_isolated = RayData.call_isolated  # type: ignore[assignment]


def test_a_sampled_row_that_kills_its_process_costs_the_prefix_and_not_the_driver(
    inputs: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = plan(inputs, checkpoint)
    assert plan(inputs, checkpoint, hardware=IsolatedPlanning()).batching.prefix == healthy.batching.prefix != ()
    monkeypatch.setattr(shared_prefix, "prompt_ids", poison_stages.deadly_prompt_ids)
    assert plan(inputs, checkpoint, hardware=IsolatedPlanning()).batching.prefix == ()
    assert "no shared prefix: the process that prepared the sampled rows died (killed by SIGKILL)" in caplog.text


def test_texts_that_begin_differently_are_not_tokenized(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"p": ["name[a] a longer text", None, "Name[b] a longer text"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(shared_prefix, "prompt_ids", lambda *_: pytest.fail("tokenized"))
    assert plan(tmp_path, checkpoint, input={"prompt": "p", "template": None}).batching.prefix == ()
