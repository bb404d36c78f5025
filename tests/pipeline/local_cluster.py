"""A Ray cluster on this machine as `ray start` makes one: loopback dashboard, a token, more nodes on demand."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import requests
from cli_command import HANGING_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
OBJECT_STORE_BYTES = 200_000_000


class LocalCluster:
    """A head node from the start, further ones by `join`. All of its processes end with `close`.

    cpus: logical CPUs of the head node.
    """

    def __init__(self, cpus: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Unix sockets lie below it
        self.gcs, self.dashboard, client = free_ports(3)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.env = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # a job's `python` is this one
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": "45",  # as infra/ sets it: Ray's 3 s kill a driver that is stopping
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self.url = f"http://127.0.0.1:{self.dashboard}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        for is_last in (False, True):  # Ray gives up a start that takes more than 30 s: see `ray_head.start`
            self._start(
                cpus,
                *("--head", f"--port={self.gcs}", f"--ray-client-server-port={client}"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}", f"--temp-dir={self.folder}"),
            )
            wait_until(lambda: self._answers() or self.nodes[0].poll() is not None, every=0.2)
            if self.nodes[0].poll() is None:
                return
            said = Path(self.folder, "start-0.log").read_text()
            if is_last or "timed out during startup" not in said:
                self.close()
                raise AssertionError(f"the head node did not start: {said}")
            self.nodes.clear()

    def join(self, cpus: int) -> None:
        """One more node, with `cpus` logical CPUs; returns at once."""
        self._start(cpus, f"--address=127.0.0.1:{self.gcs}", f"--temp-dir={self.folder}/{len(self.nodes)}")

    def job(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`ray job ...` run from the repository's root against this cluster."""
        command, *rest = arguments
        return subprocess.run(
            [RAY, "job", command, "--address", self.url, *rest],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**self.env, **env},
            timeout=HANGING_SECONDS,
        )

    def asked(self, path: str) -> Any:
        """What the dashboard says of a job: what `ray job status` and `logs` print, without their processes."""
        reply = self._get(path, timeout=HANGING_SECONDS)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stop(self, name: str) -> None:
        """What `ray job stop` sends, without the seconds in which its process starts."""
        url, headers = f"{self.url}/api/jobs/{name}/stop", {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        assert requests.post(url, headers=headers, timeout=HANGING_SECONDS).json()["stopped"]

    def close(self) -> None:
        """Ends every process that was started here, and their children; removes the cluster's folder."""
        processes = [psutil.Process(node.pid) for node in self.nodes if node.poll() is None]
        family = [child for process in processes for child in process.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([*processes, *family], timeout=10)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for node in self.nodes:
            node.wait(timeout=HANGING_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, cpus: int, *options: str) -> None:
        log = Path(self.folder, f"start-{len(self.nodes)}.log")
        with log.open("wb") as out:
            node = subprocess.Popen(
                [
                    *(RAY, "start", "--block", f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
                    *("--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", *options),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        self.nodes.append(node)

    def _get(self, path: str, timeout: float) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        return requests.get(f"{self.url}/api/jobs/{path}", headers=headers, timeout=timeout)

    def _answers(self) -> bool:
        with suppress(requests.RequestException):
            return self._get("", timeout=5).status_code == 200
        return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
