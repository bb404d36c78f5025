"""A job keeps to the products that its first actor on a type of machine has chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from in_process import answered_rows, run_in_process, run_interrupted

from actors.engine.cpu import choice, library
from actors.engine.errors import UserError
from pipeline.config.job import JobConfig
from pipeline.generate.product_records import ProductRecords
from pipeline.storage.folder import LocalFolder

ROWS = 12
both = pytest.mark.skipif(not library.multiplies(torch.bfloat16, torch.device("cpu")), reason="no kernel for products")


def config(tmp_path: Path, name: str, checkpoint: Path, **model: Any) -> JobConfig:
    pq.write_table(pa.table({"prompt": [f"alpha {row}" for row in range(ROWS)]}), tmp_path / "in.parquet")
    values: dict[str, Any] = {
        "input": {"path": str(tmp_path / "in.parquet")},
        "output": {"path": str(tmp_path / name), "token_ids": True},
        "model": {"path": str(checkpoint), **model},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 12},
        "actors": {"threads": 1},
        "shard_rows": 4,
    }
    return JobConfig.model_validate(values)


def measuring(product: str) -> Any:
    """A machine on which that product is the faster one."""
    seconds = {"kernels": 1.0, "library": 0.5 if product == "library" else 2.0}
    return mock.patch.object(choice, "measured", return_value=seconds)


@both
@pytest.mark.parametrize(("first", "other"), [("kernels", "library"), ("library", "kernels")])
def test_a_resumed_job_uses_the_same_products(
    tmp_path: Path, checkpoint: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, first: str, other: str
) -> None:
    """Though the machine's cache is gone, or another machine's, and a new measurement would choose the others."""
    job = config(tmp_path, "out", checkpoint)
    with measuring(first):
        run_interrupted(monkeypatch, job)
    [record] = (tmp_path / "out" / "_job").glob("products-*.json")
    assert json.loads(record.read_text())["product"] == first
    [cached] = (own_cache / "products").iterdir()
    cached.write_text(json.dumps({"product": other}))
    with measuring(other) as measured:
        assert 0 < run_in_process(job).fresh_rows < ROWS
    assert not measured.called and json.loads(record.read_text())["product"] == first
    undisturbed = config(tmp_path, "undisturbed", checkpoint, products=first)
    with measuring(other) as measured:
        run_in_process(undisturbed)
    assert not measured.called and answered_rows(tmp_path / "out") == answered_rows(tmp_path / "undisturbed")


def test_nothing_is_measured_in_float32(tmp_path: Path, checkpoint: Path, own_cache: Path) -> None:
    with mock.patch.object(choice, "measured", side_effect=AssertionError):
        run_in_process(config(tmp_path, "out", checkpoint, dtype="float32"))
    assert not list((tmp_path / "out" / "_job").glob("products-*"))


def test_a_named_product_makes_another_job(tmp_path: Path, checkpoint: Path, own_cache: Path) -> None:
    """The default is no part of the identity: a job planned before the key existed goes on."""
    result = run_in_process(config(tmp_path, "out", checkpoint))
    assert "products" not in result.manifest.identity["model"]
    with pytest.raises(UserError, match=r"model\.products"):
        run_in_process(config(tmp_path, "out", checkpoint, products="library"))


def test_of_two_actors_the_first_decides(tmp_path: Path) -> None:
    records = ProductRecords(LocalFolder(str(tmp_path), tmp_path))
    assert records.find("key") is None
    assert records.settle("key", b"one") == records.settle("key", b"two") == records.find("key") == b"one"
