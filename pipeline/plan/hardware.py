"""Describes the hardware that a job's actors run on, for planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from actors.engine.machine import process_cpus, process_memory
from pipeline.config.job import ActorsConfig

Result = TypeVar("Result")


class Hardware:
    """Hardware of a job that runs in this process. A subclass for jobs in other processes overrides the methods."""

    @property
    def on_this_machine(self) -> bool:
        """Whether all actors share this machine's memory."""
        return True

    def node(self, actors: ActorsConfig) -> tuple[int, int, int]:
        """Return CPUs and memory bytes of the smallest node that can run actors, and the number of such nodes."""
        return process_cpus(), process_memory(), 1

    def call_isolated(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that may kill its process. A subclass uses another process, whose death raises Died."""
        return function(*arguments)

    def call_as_actors(
        self, actors: ActorsConfig, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        """Call a function once for each tuple of arguments, with an actor's resources; in parallel if there are enough.

        A subclass uses other processes, whose death raises Died.
        """
        return [function(*arguments) for arguments in calls]
