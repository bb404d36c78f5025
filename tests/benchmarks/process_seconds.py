"""Processor seconds of a command and of every process that it starts, by what they do.

Ray's daemons leave the command's process tree; all of them inherit its environment, and are known by a variable there.
A process is read every 50 ms, so that its last moments, and processes that live shorter, are not counted.
"""

from __future__ import annotations

import os
import re
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

VARIABLE = "SKIPDECODE_MEASURED_RUN"
DAEMONS = {  # by a part of the command line
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "dashboard/agent.py": "dashboard's agent",
    "runtime_env/agent/main.py": "runtime environments' agent",
    "log_monitor.py": "log monitor",
    "monitor.py": "autoscaler's monitor",
    "pipeline.runtime.isolated": "isolated process that tokenizes a sample",
    "cc1plus": "compiler",
}
ROLES = {  # by a part of a worker's title
    "ShardGenerator": "actor",
    "ray::Coordinator": "coordinator",
    "(prepare)": "prepare",
    "Read": "read",
    "measure_agreement": "agreement",
}


@dataclass
class _Process:
    command: str
    seconds: float = 0.0
    roles: set[str] = field(default_factory=set)


class ProcessSeconds:
    """Call `poll` every 50 ms while the command runs with `environment`."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, VARIABLE: self.mark}
        self._known: dict[tuple[int, float], _Process | None] = {}  # None: not of this command

    def poll(self) -> None:
        """Read all processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                key = process.pid, process.create_time()
                if key not in self._known:
                    ours = process.environ().get(VARIABLE) == self.mark and process.pid != os.getpid()
                    self._known[key] = _Process("") if ours else None
                known = self._known[key]
                if known is None:
                    continue
                times = process.cpu_times()
                known.seconds = max(known.seconds, times.user + times.system)
                command = " ".join(process.cmdline())
                if command.startswith("ray::") and not command.startswith("ray::IDLE"):
                    named = {role for part, role in ROLES.items() if part in command}
                    known.roles |= named or {command.removeprefix("ray::").partition(".")[0].strip()}
                known.command = command or known.command

    def by_part(self) -> dict[str, tuple[int, float]]:
        """Processes, and seconds of user and system time, of each part, the largest first."""
        found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for process in filter(None, self._known.values()):
            part = _part(process)
            count, seconds = found[part]
            found[part] = count + 1, seconds + process.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _part(process: _Process) -> str:
    for name, part in DAEMONS.items():
        if name in process.command:
            return part
    if process.command.startswith("ray::") or "default_worker.py" in process.command:
        return f"worker: {', '.join(sorted(process.roles)) or 'idle'}"
    return "driver" if re.search(r"-m pipeline|skipdecode", process.command) else "others"
