"""Training in two processes is that of one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_checkpoint import tiny_checkpoint
from tune_recipes import copying_recipe, train_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return copying_recipe(tmp_path)


def check_two_workers(recipe: dict[str, Any], **where: str) -> None:
    alone = train_recipe(recipe, bf16=False)
    workers = {"count": 2, **where}
    both = train_recipe({**recipe, "output": "both", "workers": workers}, bf16=False)
    assert both["steps"] == alone["steps"] == 12
    # the same pairs in another order
    assert both["dev_loss"] == pytest.approx(alone["dev_loss"], rel=0.03)
    assert both["config"]["output"] == "both"
    assert train_recipe({**recipe, "output": "both", "workers": workers}, bf16=False) == both  # finished


def test_two_processes_learn_as_one(recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
    both = train_recipe({**second, "output": "both", "workers": {"count": 2}}, **epochs)
    assert both["steps"] == alone["steps"] == 8
    assert both["dev_loss"] == pytest.approx(alone["dev_loss"], rel=0.03)


@pytest.mark.slow
def test_after_a_process_died_the_same_training_goes_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "both"
    killed: list[int] = []

    def kill_one() -> None:
        while not (output / "_training/checkpoint-40").is_dir():  # that of step 20 is whole then
            time.sleep(0.05)
        workers = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        killed.append(workers[0].pid)
        workers[0].kill()

    threading.Thread(target=kill_one, daemon=True).start()
    two = {**recipe, "output": str(output), "workers": {"count": 2}}
    settings = {"bf16": False, "max_steps": 100, "save_steps": 20}
    with pytest.raises(RuntimeError, match=r"worker|Signal 9|gloo|closed"):
        train_recipe(two, **settings)
    done = train_recipe(two, **settings)
    assert killed and done["steps"] == 100 and done["resumed_at_step"] >= 20


@pytest.mark.slow
def test_processes_end_with_the_one_that_launched_them(recipe: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "both"
    values = {**recipe, "output": str(output), "workers": {"count": 2}}
    (tmp_path / "tune.json").write_text(json.dumps({**values, "training": {**recipe["training"], "max_steps": 4000}}))
    launcher = subprocess.Popen([sys.executable, "-m", "pipeline", "tune", str(tmp_path / "tune.json")])
    while not list(output.glob("_training/checkpoint-*")):
        time.sleep(0.1)
        assert launcher.poll() is None
    workers = psutil.Process(launcher.pid).children()
    assert len(workers) >= 2
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.slow
def test_two_workers_of_ray_train_learn_as_one(
    recipe: dict[str, Any], own_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train's own actors take longer than the training."""
    monkeypatch.chdir(tmp_path)
    check_two_workers(recipe, address="auto")


@pytest.mark.parametrize("where", [{}, {"address": "auto"}])
def test_more_workers_than_cores_are_refused(
    recipe: dict[str, Any], own_ray: None, tmp_path: Path, where: dict[str, str]
) -> None:
    many = {**recipe, "output": str(tmp_path / "many"), "workers": {"count": 64, **where}}
    with pytest.raises(ValueError, match="workers: 64 × 1 CPU asked for, and "):
        train_recipe(many, batch_size=64)
