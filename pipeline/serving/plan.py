"""What is checked before anything starts: model, schedule, memory, key and port. No Ray, no weights."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import Any

from actors.engine.errors import UserError, flat
from actors.engine.machine import process_memory
from actors.engine.schedules.schedule import Schedule
from actors.serving.http import Limits
from actors.serving.model import ModelSettings
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.input import InputConfig
from pipeline.config.job import JobConfig, OutputConfig
from pipeline.config.serve import HttpConfig, ServeConfig
from pipeline.generate.settings import fetched, generator_settings
from pipeline.plan.manifest import plan_batching
from pipeline.plan.memory import Hardware, actor_need, check_fits, describe
from pipeline.prepare.thinking import marks_of_thinking

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ReplicaSettings:
    """A replica's settings, by a call on its node, which fetches the checkpoint and compares it with the plan."""

    name: str
    generator: dict[str, Any]
    max_waiting: int
    events_per_second: float

    def __call__(self) -> ModelSettings:
        return ModelSettings(self.name, fetched(self.generator), self.max_waiting, self.events_per_second)


@dataclass(frozen=True)
class PlannedServer:
    """A server ready to start.

    Args:
        described: Parameters and memory, one line.
    """

    config: ServeConfig
    settings: ReplicaSettings
    limits: Limits
    schedule: Schedule
    described: str


def plan_server(config: ServeConfig, *, on_this_machine: bool, hardware: Hardware | None = None) -> PlannedServer:
    """Check everything that can be checked without the weights. Raises UserError in one line.

    hardware: of the replicas; default this process.
    """
    if config.model.engine == "auto":  # the paged engine runs one speed, requests have their own
        config = config.model_copy(update={"model": config.model.with_library_engine()})
    limits = Limits(config.http.timeout_seconds, config.http.max_body_bytes, key_digest(config.http))
    checkpoint = resolve_checkpoint(config.model, config.storage)
    schedule = checkpoint.schedule(config.schedule.changes(), config.model, unadapted=config.schedule.unadapted)
    job = JobConfig.model_validate(
        {
            "input": InputConfig(path=["unused"]),
            "output": OutputConfig(path="unused"),
            "model": config.model,
            "sampling": config.sampling.model_dump(),
            "reasoning": config.reasoning,
            "actors": config.replicas.as_actors(),
            "storage": config.storage,
        }
    )
    batching = plan_batching(job, checkpoint, 1, hardware)
    generator = {
        **generator_settings(config.model, config.sampling, None),
        "checkpoint": checkpoint.pinned(),
        "speed_adapter": None if schedule.is_full_depth else checkpoint.pinned_adapter(),
        "schedule": config.schedule.changes(),
        "unadapted": config.schedule.unadapted,
        "reasoning": marks_of_thinking(job, checkpoint),
        "threads": batching.threads,
        "cache_bytes": batching.cache_bytes,
        "max_batch": config.replicas.max_batch,
    }
    actors = config.replicas.as_actors()
    need = actor_need(config.model, actors, checkpoint, batching)
    if on_this_machine:
        check_fits(need, config.model, actors, process_memory())
    settings = ReplicaSettings(
        config.served_name, generator, config.replicas.max_waiting, config.replicas.events_per_second
    )
    replicas = config.replicas.model_copy(update={"threads": batching.threads})
    config = config.model_copy(update={"replicas": replicas})
    return PlannedServer(config, settings, limits, schedule, describe(need, config.model.dtype, actors))


def key_digest(http: HttpConfig) -> str | None:
    """SHA-256 of the API key, which goes no further than this. Raises UserError if its variable is empty."""
    if http.api_key_env is None:
        return None
    key = os.environ.get(http.api_key_env, "").strip()
    if not key:
        raise UserError(f"http.api_key_env: the environment variable {http.api_key_env} is empty; put the key there")
    return hashlib.sha256(key.encode()).hexdigest()


def check_port(http: HttpConfig) -> None:
    """Raise UserError if nobody can listen there."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((http.host, http.port))
        except OSError as error:
            where = f"{http.host}:{http.port}"
            raise UserError(f"http.port: cannot listen on {where}: {flat(error.strerror)}; choose another") from None
