"""Finds how many CPUs and how much memory this process may use. A container or batch job may limit both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def process_cpus(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the number of CPUs that this process may use, given its CPU affinity and control groups (cgroups)."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _control_groups("cpu", groups, own):
        values = _text(folder / "cpu.max").split()  # cgroup version 2
        values = values or [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]  # version 1
        if all(value.isdigit() and int(value) for value in values):
            quota, period = map(int, values)
            count = min(count, quota / period)
    return max(1, int(count))


def process_memory(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return how many bytes of memory this process may use: the machine's, or a control group's lower limit."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in _control_groups("memory", groups, own):
        texts = (_text(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))  # versions 2 and 1
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)


def set_threads(threads: int | None) -> None:
    """Set the number of torch threads of this process. None: keep torch's default, but at most one thread per CPU."""
    import torch  # imported here because a job's driver counts CPUs before it needs torch

    torch.set_num_threads(threads or min(torch.get_num_threads(), process_cpus()))


def _control_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups for `controller` (cpu or memory), innermost first."""
    for line in _text(own).splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups  # in cgroup version 1, each controller has its own tree
        folder = top / inside.strip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _text(file: Path) -> str:
    """Return the text of `file`; "" if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
