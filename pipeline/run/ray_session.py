"""Connects a job to Ray: to a running cluster, or to a local Ray that it starts on the loopback interface."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._raylet import (  # type: ignore[attr-defined]
    GCS_AUTOSCALER_STATE_NAMESPACE,
    GCS_AUTOSCALER_V2_ENABLED_KEY,
)
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import placement_group, remove_placement_group

from actors.engine.errors import UserError, flat
from actors.engine.machine import process_cpus, process_memory
from pipeline.config.job import ActorsConfig
from pipeline.runtime.announce import Timer, announce, announced
from pipeline.runtime.signals import Interrupted, shielded

log = logging.getLogger(__name__)
IDLE_SECONDS = 30  # time after which an idle worker of the local Ray ends
OBJECT_STORE_BYTES = 2**30
QUIET = "RAY_BACKEND_LOG_LEVEL"  # environment variable that the command line sets, unless --verbose is given
WAIT_POLL_SECONDS = 2.0
HEAD = Path(__file__).with_name("ray_head.py")
STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"  # seconds after which `ray job stop` kills a job
STOP_SECONDS = 3  # Ray's default
STOP_MARGIN_SECONDS = 25  # time for a job to end Ray's tasks and release its lease after `grace_seconds`
END_SECONDS = 30.0  # time limit for a local Ray to end
LOOPBACK = "127.0.0.1"
# environment variable; if its value is 0 when Ray is imported, Ray listens only on the loopback interface
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


_head: subprocess.Popen[str] | None = None  # process that runs the local Ray; None if there is no local Ray


def _set_levels(levels: dict[logging.Logger | logging.Handler, int], verbose: bool) -> None:
    """Lower the output of Ray, because the job reports errors itself. Store the previous levels in `levels`."""
    quiet: dict[logging.Logger | logging.Handler, int] = {logging.getLogger("ray"): logging.ERROR}
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
            quiet[handler] = logging.CRITICAL
    for target, level in quiet.items():
        levels.setdefault(target, target.level)
        target.setLevel(logging.INFO if verbose else level)


def is_own_ray() -> bool:
    """Return whether jobs run on a local Ray that this process has started or would start."""
    return _head is not None or not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))


def on_cluster() -> bool:
    """Return whether the job's actors may run on other nodes."""
    return bool(os.environ.get("RAY_ADDRESS")) or (ray.is_initialized() and len(_nodes()) > 1)


def warn_of_short_stop(grace_seconds: float) -> None:
    """In a submitted Ray job, log a warning if `ray job stop` kills this process before `grace_seconds` have passed."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return
    # the value is that of Ray's supervisor process, from which this process has inherited the environment
    given = os.environ.get(STOP_VARIABLE, str(STOP_SECONDS))
    try:
        seconds = int(given)
    except ValueError:
        raise UserError(f"{STOP_VARIABLE}: {given!r} is not a whole number of seconds; correct it") from None
    if seconds < grace_seconds:
        enough = math.ceil(grace_seconds) + STOP_MARGIN_SECONDS
        log.warning(
            "`ray job stop` leaves this job %d s, less than grace_seconds = %g: so that shards at work can finish, set "
            "%s=%d where Ray starts on the head node, or submit with "
            '--runtime-env-json \'{"env_vars": {"%s": "%d"}}\'',
            *(seconds, grace_seconds, STOP_VARIABLE, enough, STOP_VARIABLE, enough),
        )


def actor_cpus(actors: ActorsConfig) -> float:
    """Return an actor's CPUs: `actors.cpus`, else `actors.threads`, on a local Ray at most CPUs ÷ number of actors."""
    if actors.cpus is not None:
        return actors.cpus
    cpus = float(actors.threads or 1)
    if not is_own_ray():
        return cpus
    return min(cpus, math.floor(1e4 * process_cpus() / actors.most) / 1e4)  # rounded as Ray does


def smallest_node(actors: ActorsConfig) -> tuple[int, int, int]:
    """Wait until the actors fit. Return the CPU nodes' lowest CPU count, lowest memory (bytes), and number."""
    with ray_session(actors, verbose=False):
        nodes = [node for node in _nodes() if node.get("CPU")]
    return int(min(one["CPU"] for one in nodes)), int(min(one["memory"] for one in nodes)), len(nodes)


def check_metrics_port(port: int) -> None:
    """Raise UserError if a local Ray cannot serve metrics on this port."""
    if not is_own_ray():
        raise UserError("--metrics-port is only for a local Ray; each node of a cluster has its own port")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--metrics-port: {port} on 127.0.0.1 cannot be used: {flat(error)}; choose another") from None


@contextmanager
def connected(verbose: bool, metrics_port: int | None = None) -> Iterator[None]:
    """Connect to Ray during the `with` block: over the caller's connection, else to RAY_ADDRESS, else to a local Ray.

    Restore log levels and signal handlers afterwards.
    """
    levels: dict[logging.Logger | logging.Handler, int] = {}  # previous log levels
    undo = ExitStack()
    undo.callback(lambda: [one.setLevel(level) for one, level in levels.items()])
    try:
        _set_levels(levels, verbose)
        if not ray.is_initialized():
            with announced("starting Ray"):
                _open(undo, verbose, metrics_port)
        _set_levels(levels, verbose)  # set levels again, for handlers that Ray has added
        yield
    finally:
        with shielded():
            undo.close()


def _open(undo: ExitStack, verbose: bool, metrics_port: int | None) -> None:
    """Connect to the Ray in RAY_ADDRESS, or to a local Ray that this function starts. undo: gets what ends it."""
    global _head
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address and not address.startswith("ray://"):
        raise UserError(f"RAY_ADDRESS: {address} is no Ray address; set HOST:6379, or auto on a node")
    if re.fullmatch(r"[^/]+:\d+", address) and not _accepts(address):  # Ray would retry for 14 min
        raise UserError(f"RAY_ADDRESS: nothing answers at {address}; start Ray there, or unset RAY_ADDRESS")
    if not address:
        _head = _start_head(verbose, metrics_port)
        undo.callback(_end, _head)
        address = _address(_head)
        threading.Thread(target=_announce_death, args=(_head,), daemon=True).start()
    undo.callback(ray.shutdown)
    command: Any = sys.modules.get("skipdecode")  # None if another program has imported this package
    on_sigterm = signal.getsignal(signal.SIGTERM)  # ray.init replaces this handler
    try:
        with _quiet_start() if QUIET in os.environ else nullcontext():
            ray.init(
                address=address,
                log_to_driver=verbose,
                logging_level=logging.INFO if verbose else logging.ERROR,
                runtime_env=command.worker_environment() if command else None,
            )
    except SystemExit:  # raised by Ray's handler of SIGTERM
        raise Interrupted("SIGTERM") from None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


@contextmanager
def ray_session(actors: ActorsConfig, verbose: bool, metrics_port: int | None = None) -> Iterator[None]:
    """Connect as `connected` does, and wait until the actors fit. Raises UserError if they can never be placed."""
    if is_own_ray() and (problem := placement_problem(actors, [_this_machine()])):
        raise UserError(f"actors: {problem}")
    with connected(verbose, metrics_port):
        wait_for_nodes(actors)
        yield


def wait_for_nodes(actors: ActorsConfig) -> None:
    """Wait until the cluster has room for the minimum number of actors.

    Raises UserError if the cluster has not grown within `actors.wait_seconds`. Raises it at once if the cluster has
    neither a GPU that the actors need nor an autoscaler, unless the job sets `actors.wait_seconds`.
    """
    began, timer = time.monotonic(), Timer()
    problem = placement_problem(actors, _nodes())
    if not problem:
        return
    _check_growth(actors, problem)
    log.warning("waiting for the cluster to grow: %s", problem)
    bundle = {"CPU": actor_cpus(actors), **({"GPU": actors.gpus} if actors.gpus else {})}
    # the group makes an autoscaler add nodes; `request_resources` would replace the requests of other jobs
    group = placement_group([bundle] * (actors.min or actors.most))
    try:
        while problem:
            waited = time.monotonic() - began
            if waited > actors.wait_seconds:
                raise UserError(
                    f"actors: {problem}; the cluster has not grown in {actors.wait_seconds:g} s (actors.wait_seconds)"
                )
            if timer.is_due():
                seconds = f"{waited:.0f} of {actors.wait_seconds:g} s"
                announce(f"waiting for the cluster to grow, {seconds}: {problem}", "waiting")
            time.sleep(WAIT_POLL_SECONDS)
            problem = placement_problem(actors, _nodes())
            if problem:
                _check_growth(actors, problem)
    finally:
        with suppress(ray.exceptions.RayError):
            remove_placement_group(group)


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _this_machine() -> dict[str, float]:
    """Return the resources of the node that a local Ray would start."""
    manager: Any = get_accelerator_manager_for_resource("GPU")
    gpus, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
    return {"CPU": process_cpus(), "GPU": gpus if visible is None else min(gpus, len(visible))}


def _check_growth(actors: ActorsConfig, problem: str) -> None:
    """Raise UserError if actors need GPUs, but the cluster has neither a GPU nor an autoscaler that may add one."""
    if "wait_seconds" in actors.model_fields_set or not actors.gpus or any(node.get("GPU") for node in _nodes()):
        return
    if _internal_kv_get(GCS_AUTOSCALER_V2_ENABLED_KEY, namespace=GCS_AUTOSCALER_STATE_NAMESPACE) == b"1":
        return
    # after `ray start`, an autoscaler runs that adds no nodes: it gives each node a type of its own
    status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    if types and all(kind == f"node_{node}" for node, kind in types.items()):
        raise UserError(
            f"actors: {problem}; the cluster has neither a GPU nor an autoscaler: set actors.gpus: 0, or set "
            "actors.wait_seconds to wait for a node with a GPU"
        )


def placement_problem(actors: ActorsConfig, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return why no node has room for an actor, or all nodes together have none for the minimum number; "" if they do.

    nodes: the resources of each node. Tasks request no CPUs.
    """
    least, cpus, gpus = actors.min or actors.most, actor_cpus(actors), actors.gpus

    def problem(wanted: int, free_cpus: float, free_gpus: float, place: str) -> str:
        if wanted * cpus > free_cpus + 1e-6:
            remedy = "lower actors.count or actors.threads, or set actors.cpus"
            return f"{wanted} actors of {cpus:g} CPUs do not fit on {free_cpus:g} CPUs{place}: {remedy}"
        slots = (int(free_gpus) * int(1 / gpus) if gpus < 1 else free_gpus // gpus) if gpus else wanted
        if slots < wanted:
            remedy = "lower actors.count or actors.gpus"
            return f"{wanted} actors of {gpus:g} GPUs do not fit on {free_gpus:g} GPUs{place}: {remedy}"
        return ""

    each = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
    all_cpus, all_gpus = (sum(column) for column in zip((0.0, 0.0), *each, strict=True))
    # if no node has room for an actor, the error names the node with the most GPUs; if several have, the most CPUs
    alone = [problem(1, *node, " of any node") for node in sorted(each, key=lambda node: (node[1], node[0]))]
    return problem(least, all_cpus, all_gpus, "") or ("" if "" in alone else alone[-1])


def _start_head(verbose: bool, metrics_port: int | None) -> subprocess.Popen[str]:
    """Start a process that runs a local Ray until its standard input is closed, or the calling process ends."""
    if ray.util.get_node_ip_address() != LOOPBACK:
        raise RuntimeError(
            f"Ray was imported without {ON_LOOPBACK}=0, and would serve other machines; set it, or call ray.init first"
        )
    settings = {
        "address": "local",
        "include_dashboard": False,
        "log_to_driver": False,  # `_open` sets whether the job prints the output of workers
        "num_cpus": process_cpus(),
        "object_store_memory": min(OBJECT_STORE_BYTES, process_memory() // 4),
        "_node_ip_address": LOOPBACK,
        "_metrics_export_port": metrics_port,
        # Ray's default of 1 s is too short, because starting a worker takes 2 s of CPU time
        "_system_config": {"idle_worker_killing_time_threshold_ms": IDLE_SECONDS * 1000},
    }
    return subprocess.Popen(
        [sys.executable, "-P", str(HEAD), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if verbose else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _address(head: subprocess.Popen[str]) -> str:
    """Wait until a local Ray has started, and return its address. Raises RaySystemError if Ray does not start."""
    assert head.stdout is not None
    line = head.stdout.readline()
    values = json.loads(line) if line else {"error": "its process was killed"}
    if "AF_UNIX path" in values.get("error", ""):
        raise UserError("TMPDIR: the path of this folder is too long for Ray's sockets; set RAY_TMPDIR=/tmp")
    if "error" in values:
        raise ray.exceptions.RaySystemError(f"Ray did not start: {values['error']}")
    return str(values["address"])


def _announce_death(head: subprocess.Popen[str]) -> None:
    """Wait until the local Ray ends. If it died, print a message before Ray's C++ code silently ends this process."""
    if head.wait() != 0:
        announce(
            "the job's Ray has died: check this machine's memory and kernel log; run the same command again to resume"
        )


def _end(head: subprocess.Popen[str]) -> None:
    """End the local Ray and all of its processes."""
    global _head
    _head = None
    assert head.stdin is not None and head.stdout is not None
    head.stdin.close()
    try:
        head.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("processes of the local Ray have not ended; end them with: pkill -KILL -s %d", head.pid)
    head.stdout.close()


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        return True
    return False


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Drop the line in which Ray's C++ code names the log level that it has read from `QUIET`.

    Otherwise the line would stand between the lines of JSON that --log-json writes to standard error.
    """
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as dropped:
            os.dup2(dropped.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
