"""What a job will need is told before it loads, and what cannot fit is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from in_process import invoke, job_values

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect
from actors.engine.model.weights import ALLOWANCE, Need, StoredTensor, folder_tensors
from pipeline.config.job import ActorsConfig, ModelConfig
from pipeline.plan import memory
from pipeline.plan.memory import check_fits, describe

MODEL = ModelConfig(path="m")
NEED = Need(1_240_000_000, 2_480_000_000, 2**30)


@pytest.mark.parametrize(
    ("actors", "shown"),
    [({}, "1 actor"), ({"count": 2}, "2 actors"), ({"min": 1, "max": 8}, "1 to 8 actors")],
)
def test_the_need_is_one_line(actors: dict[str, Any], shown: str) -> None:
    assert describe(NEED, "bfloat16", ActorsConfig(**actors)) == (
        "model: 1,240.0 million parameters in bfloat16; 3.8 GiB per actor (weights 2.3 GiB, cache 1.0 GiB, working "
        f"memory 512 MiB), {shown}"
    )


def test_actors_that_fit_pass_and_one_byte_less_is_refused() -> None:
    total = 2_480_000_000 + 2**30 + ALLOWANCE
    check_fits(NEED, MODEL, ActorsConfig(count=2), 2 * total)
    check_fits(NEED, MODEL, ActorsConfig(min=1, max=9), total)
    with pytest.raises(
        ValueError, match=r"^actors: 2 x 3\.8 GiB .* lower actors\.count or actors\.cache_bytes"
    ) as caught:
        check_fits(NEED, MODEL, ActorsConfig(count=2), 2 * total - 1)
    check_fits(NEED, MODEL, ActorsConfig(gpus=1), 0)  # an actor on a GPU checks the memory there
    assert "\n" not in str(caught.value)


def test_a_job_that_cannot_fit_is_told_and_exits_2(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of this process have one
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    actors = {"count": 3, "cache_bytes": 10**14}
    job = job_values(
        tmp_path / "in.parquet", tmp_path / "out", checkpoint, actors=actors, sampling={"max_new_tokens": 64}
    )
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(memory.log, "level", logging.NOTSET)
    monkeypatch.setattr(memory.log, "handle", told.append)
    result = invoke(tmp_path, job)
    assert result.exit_code == 2
    assert "3 x 93132.8 GiB" in result.stderr and "lower actors.count" in result.stderr.splitlines()[-1]
    (line,) = told  # said without --verbose
    said = line.getMessage()
    assert "million parameters" in said and said.endswith("3 actors; refill, at most 64 rows in flight")
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_the_config_are_refused_before_a_model_is_loaded(
    checkpoint: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is compared once."""
    config, tensors = inspect(checkpoint).config, folder_tensors(checkpoint)
    name, (file, shape) = "model.layers.1.mlp.up_proj.weight", tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError) as caught:
        memory.check_weights(config, {**tensors, name: StoredTensor(file, (60, 32))}, "m")
    assert str(caught.value).startswith(f"{file}: {name} does not fit config.json ([60, 32], not {list(shape)}): ")
    memory.check_weights(config, tensors, "m")
    monkeypatch.setattr(memory, "check_tensors", None)
    memory.check_weights(config, tensors, "m")
