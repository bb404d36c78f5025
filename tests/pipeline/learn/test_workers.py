"""Training in two processes is that of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from leaks import listening, loopback
from tiny_checkpoint import tiny_checkpoint
from tune_recipes import train_recipe
from worker_faults import killed, out_of_memory, sleep, user_error, wrong_value

from pipeline.cli.command import command
from pipeline.learn.tune.workers import run_processes
from pipeline.runtime.signals import Interrupted, interrupter, interruptible

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def test_two_processes_learn_as_one(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They leave neither handlers nor files nor output, and listen to this machine alone."""
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    alone = train_recipe(recipe, bf16=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ports: set[tuple[str, str]] = set()
    during: set[Any] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            ports.update(listening(os.getpid()))
            during.update(signal.getsignal(number) for number in SIGNALS)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        capfd.readouterr()
        both = train_recipe({**recipe, "output": "both", "workers": {"count": 2}}, bf16=False)
    finally:
        ended.set()
        watching.join()
    assert both["steps"] == alone["steps"] == 12
    # the same pairs in another order
    assert both["dev_loss"] == pytest.approx(alone["dev_loss"], rel=0.03)
    assert both["config"]["output"] == "both"
    assert during == set(before.values())
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert not list(temporary.iterdir())
    written = capfd.readouterr()
    assert not written.out and "dev set: step 12, eval_loss_1x" in written.err
    assert ports and not {address for _, address in ports if not loopback(address)}
    assert train_recipe({**recipe, "output": "both", "workers": {"count": 2}}, bf16=False) == both  # finished


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


@pytest.mark.parametrize(
    ("function", "code", "line"),
    [
        (wrong_value, 1, "skipdecode: failed: lines; traceback: "),
        (user_error, 2, "skipdecode: tune.yaml: data: too few rows"),
        (out_of_memory, 1, "skipdecode: failed: CUDA out of memory; lower batch_size; traceback: "),
        (killed, 1, "skipdecode: failed: worker 0 was ended by SIGKILL; traceback: "),
    ],
)
def test_a_worker_fails_as_a_training_in_one_process(
    function: Callable[..., None], code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, command(file="tune.yaml", out_of_memory="lower batch_size"):
        run_processes(2, function)
    written = capfd.readouterr().err.strip()
    assert ended.value.exit_code == code
    assert written.startswith(line) and len(written.splitlines()) == 1
    assert not [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
    if code == 1:
        log = Path(written.rpartition(" ")[2])
        assert function is not wrong_value or 'raise ValueError("two' in log.read_text()
        log.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_an_interrupt_ends_the_workers(
    number: signal.Signals | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a lost lease."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    workers: list[int] = []

    def interrupt(lost: Callable[[], None]) -> None:
        while len(list(tmp_path.glob("started-*"))) < 2:
            time.sleep(0.05)
        workers.extend(int(one.name.rpartition("-")[2]) for one in tmp_path.glob("started-*"))
        if number is None:
            lost()
        else:
            os.kill(os.getpid(), number)

    with interruptible():
        threading.Thread(target=interrupt, args=(interrupter(),), daemon=True).start()
        with pytest.raises(Interrupted):
            run_processes(2, sleep, tmp_path)
    assert len(workers) == 2 and not any(psutil.pid_exists(one) for one in workers)


@pytest.mark.slow
def test_after_a_process_died_the_same_training_goes_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "both"
    killed: list[int] = []

    def kill_one() -> None:
        while not (output / "_training/state.pt").exists():  # of step 20
            time.sleep(0.05)
        workers = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        killed.append(workers[0].pid)
        workers[0].kill()

    threading.Thread(target=kill_one, daemon=True).start()
    two = {**recipe, "output": str(output), "workers": {"count": 2}}
    settings = {"bf16": False, "max_steps": 100, "save_steps": 20}
    with pytest.raises(RuntimeError, match=r"worker \d was ended by SIGKILL|gloo|closed"):
        train_recipe(two, **settings)
    done = train_recipe(two, **settings)
    assert killed and done["steps"] == 100 and done["resumed_at_step"] >= 20


@pytest.mark.slow
def test_processes_end_with_the_one_that_launched_them(recipe: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "both"
    values = {**recipe, "output": str(output), "workers": {"count": 2}}
    (tmp_path / "tune.json").write_text(json.dumps({**values, "training": {**recipe["training"], "max_steps": 4000}}))
    launcher = subprocess.Popen([sys.executable, "-m", "pipeline", "tune", str(tmp_path / "tune.json")])
    while not (output / "_training/state.pt").exists():
        time.sleep(0.1)
        assert launcher.poll() is None
    workers = psutil.Process(launcher.pid).children()
    assert len(workers) >= 2
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
