"""Runs a one-node Ray in a process session of its own, so that signals to the job's process group do not reach Ray.

    python ray_head.py SETTINGS    # SETTINGS: arguments of ray.init as JSON; must be started as a session leader

Writes one line of JSON to standard output: Ray's address, or why Ray did not start. When the parent process ends for
any reason, or closes this process's standard input, Ray is shut down, and then all other processes of the session are
killed. This file imports nothing from this package, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
POLL_SECONDS = 0.5
SHUTDOWN_SECONDS = 5.0  # time for Ray to delete objects that it spilled to disk; then Ray's processes are killed
KILL_SECONDS = 20.0  # maximum time to kill the processes of the session


def main() -> None:
    """Start Ray in a child process, wait until the job or Ray ends, then kill all other processes of the session."""
    starter = os.getppid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ray_process = os.fork()
    if ray_process == 0:
        run_ray(json.loads(sys.argv[1]))
    while os.getppid() == starter and not ended(ray_process):
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            break
    died = ended(ray_process)
    if not died:
        os.kill(ray_process, signal.SIGTERM)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while not ended(ray_process) and time.monotonic() < deadline:
        time.sleep(0.02)
    kill_session()
    _, status = os.waitpid(ray_process, 0)
    sys.exit(int(died and status != 0))  # status 0: SIGTERM ended Ray's process, which is no failure


def run_ray(settings: dict[str, Any]) -> NoReturn:
    """Run Ray until SIGTERM, and exit with 0. Exit with 1 if Ray does not start, or a vital process of Ray dies."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's messages go to standard error
    try:
        import psutil
        import ray

        start(settings)
        address = ray.get_runtime_context().gcs_address
    except BaseException as error:
        print(json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}), file=out, flush=True)
        os._exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print(json.dumps({"address": address}), file=out, flush=True)
    vital = [process for process in psutil.Process().children() if process.name() in ("gcs_server", "raylet")]
    try:
        while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in vital):
            time.sleep(POLL_SECONDS)
        os._exit(1)
    finally:
        ray.shutdown()
        os._exit(0)


def start(settings: dict[str, Any]) -> None:
    """Start Ray. Try once more if Ray exceeds its fixed start-up limit of 30 s, as on a busy machine."""
    import psutil
    import ray

    try:
        ray.init(**settings)
    except Exception as first:
        if "timed out during startup" not in str(first):
            raise
        for process in psutil.Process().children(recursive=True):
            process.kill()
        try:
            ray.init(**settings)
        except Exception as second:
            raise RuntimeError(f"{first} The second start: {second}") from second


def ended(child: int) -> bool:
    """Return whether a child process has ended, without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_session() -> None:
    """Kill the other processes of this session, repeatedly until none is left or `KILL_SECONDS` have passed."""
    deadline = time.monotonic() + KILL_SECONDS
    while (others := processes_of_session()) and time.monotonic() < deadline:
        for process in others:
            with suppress(ProcessLookupError):  # the process has ended
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def processes_of_session() -> list[int]:
    """Return the ids of the other living processes of this session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # the process has ended
            continue
        if int(session) == os.getsid(0) and state not in "ZX" and int(name) != os.getpid():
            found.append(int(name))
    return found


if __name__ == "__main__":
    main()
