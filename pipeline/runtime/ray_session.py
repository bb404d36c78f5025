"""The Ray that a job runs on: one of its own on this machine's loopback, or the cluster that it finds itself in."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray.data import DataContext

from actors.engine.errors import UserError, flat
from pipeline.config.job import ActorsConfig
from pipeline.runtime.loopback import LOOPBACK, on_loopback
from pipeline.runtime.signals import Interrupted, shielded

log = logging.getLogger(__name__)
SLOT_CPUS = 1.0  # the largest slot that a task beside the actors needs: repartition takes one CPU, whatever we say
OBJECT_STORE_BYTES = 2**30
_own = False  # whether the Ray that runs is one that we have started: nothing can be added to it


def is_own_ray() -> bool:
    """Whether the job runs on a Ray of our own on this machine, be it started yet or not."""
    return _own or not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))


def on_cluster() -> bool:
    """Whether the job's actors may run on other nodes than this one."""
    several = ray.is_initialized() and sum(bool(node["Alive"]) for node in ray.nodes()) > 1
    return several or bool(os.environ.get("RAY_ADDRESS"))


def actor_cpus(actors: ActorsConfig) -> float:
    """Logical CPUs that an actor takes: on CPU half a one, so that reads and writes always find a slot."""
    return actors.cpus if actors.cpus is not None else (1.0 if actors.gpus else 0.5)


@contextmanager
def planning_session() -> Iterator[None]:
    """A Ray to ask something of while a job is planned: the one that is up, or one for as long as this takes."""
    if ray.is_initialized():
        yield
        return
    try:
        _connect(verbose=False)
        yield
    finally:
        _disconnect()


@contextmanager
def ray_session(actors: ActorsConfig, verbose: bool) -> Iterator[None]:
    """A Ray of our own, or the cluster that RAY_ADDRESS names; ValueError if the actors can never be placed."""
    ours = _own or not ray.is_initialized()
    logging.getLogger("ray").setLevel(_level(verbose))
    if not ray.is_initialized():
        _connect(verbose)
    try:
        for handler in logging.getLogger("ray.data").handlers:
            if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
                # not those that whoever called us has put there; what ends the job is told by the job, in one line
                handler.setLevel(logging.INFO if verbose else logging.CRITICAL)
        context = DataContext.get_current()
        context.enable_progress_bars = verbose
        context.print_on_execution_start = verbose
        context.execution_no_progress_timeout_s = -1  # a slow shard is not a dead one
        context.raise_original_map_exception = True  # else an error's last line is that "UDF failed", not why
        check_placement(actors, ray.cluster_resources(), fixed=_own)
        yield
    finally:
        if ours:  # before whoever called us gives the lease back
            _disconnect()


def free_gpu_memory(actors: ActorsConfig) -> tuple[int, int]:
    """Bytes of a GPU that an actor may use, and all bytes of it. Actors that share a GPU share it evenly.

    Waits for a GPU where the cluster has yet to grow. UserError if there is none, or torch sees none.
    """
    with planning_session():
        check_placement(actors, ray.cluster_resources(), fixed=is_own_ray())
        log.info("reading the free memory of a GPU; actors.cache_bytes sets the cache without")
        # its process must end before the actors start: it holds memory of the GPU as long as it lives
        task = ray.remote(num_cpus=0, num_gpus=actors.gpus, max_calls=1)(_gpu_memory)
        free, total = ray.get(task.remote())
    if not total:
        raise UserError(
            "actors.gpus: Ray has GPUs, but torch sees none there: install a torch built for CUDA, or set gpus: 0"
        )
    return int(free * min(1.0, actors.gpus)), total


def _gpu_memory() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def _level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.ERROR


def _connect(verbose: bool) -> None:
    """To the cluster that RAY_ADDRESS names, or to a Ray of our own."""
    global _own
    logging.getLogger("ray").setLevel(_level(verbose))
    settings: dict[str, Any] = {"log_to_driver": verbose, "logging_level": _level(verbose)}
    own = not os.environ.get("RAY_ADDRESS")
    if own:
        settings |= {**LOOPBACK, "num_cpus": max(2, os.cpu_count() or 1), "object_store_memory": OBJECT_STORE_BYTES}
    on_sigterm = signal.getsignal(signal.SIGTERM)  # ray.init puts a handler of its own in its place
    loopback = on_loopback() if own else nullcontext()
    try:
        with _start_up(), nullcontext() if verbose else _held_back_stderr(), loopback:
            ray.init(**settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    except BaseException:
        _disconnect()
        raise
    _own = own


def _disconnect() -> None:
    global _own
    _own = False
    with shielded():
        ray.shutdown()


@contextmanager
def _start_up() -> Iterator[None]:
    """What Ray raises when it does not start is no error of Ray's own kind: RaySystemError; Interrupted on SIGTERM."""
    try:
        yield
    except SystemExit:  # Ray's own handler of SIGTERM
        raise Interrupted("SIGTERM") from None
    except Exception as error:
        if type(error) not in (Exception, RuntimeError):
            raise
        raise ray.exceptions.RaySystemError(f"Ray did not start: {flat(error)}") from error


@contextmanager
def _held_back_stderr() -> Iterator[None]:
    """Ray's C++ greets on file descriptor 2, whatever its log level; shown only if an error follows."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def check_placement(actors: ActorsConfig, resources: dict[str, float], *, fixed: bool) -> None:
    """ValueError if the least number of actors cannot be placed with a slot left for reads and writes.

    fixed: nothing can be added to `resources`; a cluster that may still grow only gets a warning.
    """
    least = actors.min or actors.most
    problems = []
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    if least * actor_cpus(actors) + SLOT_CPUS > cpus:
        problems.append(
            f"{least} actors of {actor_cpus(actors):g} CPUs leave no slot for reads and writes on {cpus:g} CPUs: "
            "lower actors.count or actors.cpus"
        )
    per_gpu = int(1 / actors.gpus) if 0 < actors.gpus < 1 else 0
    room = gpus * per_gpu if per_gpu else (gpus // actors.gpus if actors.gpus else least)
    if room < least:
        problems.append(
            f"{least} actors of {actors.gpus:g} GPUs do not fit on {gpus:g} GPUs: lower actors.count or actors.gpus"
        )
    if problems and fixed:
        raise UserError(f"actors: {problems[0]}")
    for problem in problems:
        log.warning("waiting for the cluster to grow: %s", problem)
