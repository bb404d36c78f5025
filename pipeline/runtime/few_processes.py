"""A Ray that this process starts runs only the processes that a job needs.

Ray starts seven processes before the first worker; each of those in Python imports Ray and more. ray.init has no
settings for them; hence the private interfaces. A job needs GCS and raylet. With its metrics: the dashboard's agent,
which serves them; with Ray's own messages: the log monitor. Left out: the autoscaler, for nothing can be added to
such a Ray; the dashboard, which only reports usage; the agent for runtime environments, of which a job has none.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import parameter, ray_constants, services

from pipeline.runtime.replaced import Replaced, Replacement

STAND_IN = Path(__file__).with_name("agent_stand_in.py")
DASHBOARD_PORTS = "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"
ENVIRONMENT_PORTS = ("runtime_env_agent_port",)


@contextmanager
def few_processes(*, metrics: bool, logs: bool) -> Iterator[None]:
    """Put this around `ray.init` that starts a Ray. metrics: they are served; logs: workers' output is shown."""
    with Replaced(functools.partial(_replacements, metrics, logs))():
        yield


def _replacements(metrics: bool, logs: bool) -> list[Replacement]:
    start = services.start_ray_process

    def start_ray_process(command: list[str], process_type: str, *others: Any, **settings: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = without_agents(command, metrics=metrics)
        return start(command, process_type, *others, **settings)

    others: dict[str, Any] = {"no_monitor": True, "include_log_monitor": logs}
    parameters = functools.partial(parameter.RayParams, **others)
    return [
        (parameter, "RayParams", parameters),
        (services, "start_api_server", lambda *_, **settings: ("", None)),
        (services, "start_ray_process", start_ray_process),
    ]


def without_agents(command: Sequence[str], *, metrics: bool) -> list[str]:
    """A raylet's command with stand-ins for its agents; with metrics the dashboard's own stays."""
    values = dict(argument.removeprefix("--").split("=", 1) for argument in command if "=" in argument)
    stand_in = [sys.executable, "-I", "-S", str(STAND_IN), values["session_dir"], values["node_id"]]
    agents: dict[str, tuple[str, ...]] = {"--runtime_env_agent_command=": ENVIRONMENT_PORTS}
    if not metrics:
        agents["--dashboard_agent_command="] = DASHBOARD_PORTS
    changed = []
    for argument in command:
        option = argument.partition("=")[0] + "="
        if option in agents:
            argument = option + subprocess.list2cmdline([*stand_in, *agents[option]])
        changed.append(argument)
    return changed
