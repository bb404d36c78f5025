"""A process in a container, or in a batch system's job, counts the CPUs and the memory that it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import psutil
import pytest
import torch

from actors.engine import machine
from actors.engine.machine import process_cpus, process_memory, set_threads

HERE = len(os.sched_getaffinity(0))


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "groups" / "a" / "b").mkdir(parents=True)
    (tmp_path / "own").write_text("0::/a/b\n")
    return tmp_path / "groups"


def test_the_memory_is_the_least_of_the_machines_and_of_the_limits_of_control_groups(
    groups: Path, tmp_path: Path
) -> None:
    own, whole = tmp_path / "own", int(psutil.virtual_memory().total)
    assert process_memory(groups, tmp_path / "none") == whole
    assert process_memory(groups, own) == whole
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert process_memory(groups, own) == whole
    (groups / "a" / "memory.max").write_text("3000\n")
    assert process_memory(groups, own) == 3000
    (groups / "a" / "b" / "memory.max").write_text("2000\n")
    assert process_memory(groups, own) == 2000
    (groups / "memory" / "c").mkdir(parents=True)  # version 1
    (groups / "memory" / "c" / "memory.limit_in_bytes").write_text("1000\n")
    own.write_text("5:cpu:/a\n4:memory:/c\n")
    assert process_memory(groups, own) == 1000
    own.write_text("0::/\n")  # in a container its own group is the root
    (groups / "memory.max").write_text("500\n")
    assert process_memory(groups, own) == 500


@pytest.mark.parametrize(("quota", "cpus"), [("max", 64), ("400000", 4), ("150000", 1), ("20000", 1), ("6400001", 64)])
def test_a_quota_of_cpus_counts_in_whole_cpus(
    groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert process_cpus(groups, tmp_path / "own") == 64
    (groups / "a" / "cpu.max").write_text(f"{quota} 100000\n")  # of a group above its own
    assert process_cpus(groups, tmp_path / "own") == cpus
    (tmp_path / "own").write_text("7:cpu,cpuacct:/c\n3:memory:/a\n")  # version 1
    folder = groups / "cpu" / "c"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1" if quota == "max" else quota)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert process_cpus(groups, tmp_path / "own") == cpus


@pytest.mark.skipif(HERE < 2, reason="one CPU")
def test_the_affinity_of_a_process_counts() -> None:
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    code = f"{one}\nfrom actors.engine.machine import process_cpus\nprint(process_cpus())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


def test_torch_gets_no_more_threads_than_cpus_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(machine, "process_cpus", lambda: 2)
        set_threads(None)
        assert torch.get_num_threads() == 2
        set_threads(3)
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(machine, "process_cpus", lambda: 8)
        set_threads(None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_no_other_module_counts_cpus_or_memory() -> None:
    root = Path(machine.__file__).parents[2]
    files = [file for top in ("actors", "pipeline") for file in (root / top).rglob("*.py") if file.name != "machine.py"]
    counts = ("cpu_count", "sched_getaffinity", "virtual_memory")
    assert [file for file in files if any(name in file.read_text() for name in counts)] == []


def test_no_modules_of_actors_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("actors")
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()
