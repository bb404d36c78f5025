"""Training in two processes is that of one."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import tiny_checkpoint
from tune_recipes import copying_recipe, train_recipe

from pipeline.config.tune import TuneConfig
from pipeline.tune import workers


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return copying_recipe(tmp_path)


def rank_of_two(number: int, port: int, options: dict[str, Any]) -> None:
    """One of two workers, with the environment and the process group that Ray Train gives it."""
    import torch

    rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    workers.work(options)


def in_two_processes(config: TuneConfig, recorded: TuneConfig) -> None:
    """Stands for `train_in_workers`: both are forked from a process that has imported what they need."""
    resolved = workers.absolute(config)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.tune.train", "transformers.models.llama.modeling_llama"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {name: one.model_dump(exclude_unset=True) for name, one in (("config", resolved), ("recorded", recorded))}
    processes = [context.Process(target=rank_of_two, args=(number, port, options)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def check_two_workers(recipe: dict[str, Any]) -> None:
    alone = train_recipe(recipe, bf16=False)
    both = train_recipe({**recipe, "output": "both", "workers": {"count": 2}}, bf16=False)
    assert both["steps"] == alone["steps"] == 12
    # the same pairs in another order
    assert both["dev_loss"] == pytest.approx(alone["dev_loss"], rel=0.03)
    assert both["config"]["output"] == "both"
    assert train_recipe({**recipe, "output": "both", "workers": {"count": 2}}, bf16=False) == both  # finished


def test_two_processes_learn_as_one(recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "train_in_workers", in_two_processes)
    check_two_workers(recipe)


def test_two_processes_train_a_speed_adapter_as_one(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another adapter, whose path is relative, on distributions of the base, over two epochs."""
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "base")
    taught = {**recipe, "model": {"path": "base"}, "loss": {"references": 0, "distillation": 1}}
    schedule = {"speedups": [1.5, 2], "horizon": 5, "prompt": "first"}
    settings = {"bf16": False, "speeds_per_step": 2, "learning_rate": 0.05}
    first = {**taught, "adapter": {"rank": 4}, "schedule": schedule, "output": "first"}
    train_recipe(first, max_steps=2, **settings)
    second = {**taught, "adapter": {"start": "first"}, "schedule": schedule, "output": "alone"}
    epochs = {**settings, "max_steps": -1, "epochs": 2, "eval_steps": 4}
    alone = train_recipe(second, **epochs)
    monkeypatch.setattr(workers, "train_in_workers", in_two_processes)
    both = train_recipe({**second, "output": "both", "workers": {"count": 2}}, **epochs)
    assert both["steps"] == alone["steps"] == 8
    assert both["dev_loss"] == pytest.approx(alone["dev_loss"], rel=0.03)


@pytest.mark.slow
def test_two_workers_of_ray_train_learn_as_one(
    recipe: dict[str, Any], own_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train's own actors take longer than the training."""
    monkeypatch.chdir(tmp_path)
    check_two_workers(recipe)


def test_more_workers_than_cores_are_refused(recipe: dict[str, Any], own_ray: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers: 64 × 1 CPU asked for"):
        train_recipe({**recipe, "output": str(tmp_path / "many"), "workers": {"count": 64}}, batch_size=64)
