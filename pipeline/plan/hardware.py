"""What planning needs to know of the hardware that a job's actors run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from actors.engine.machine import process_cpus, process_memory
from pipeline.config.job import ActorsConfig

Result = TypeVar("Result")


class Hardware:
    """Hardware of a job that runs in this process. Backends that start other processes override the methods."""

    @property
    def on_this_machine(self) -> bool:
        """Tell whether all actors share this machine's memory."""
        return True

    def node(self, actors: ActorsConfig) -> tuple[int, int, int]:
        """Return CPUs and bytes of memory of the smallest node that may hold actors, and the number of such nodes."""
        return process_cpus(), process_memory(), 1

    def call_isolated(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that may kill its process. Backends that call it in another process raise Died if it does."""
        return function(*arguments)

    def call_as_actor(self, actors: ActorsConfig, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function with an actor's resources. Backends that use another process raise Died if that dies."""
        return self.call_as_actors(actors, function, [arguments])[0]

    def call_as_actors(
        self, actors: ActorsConfig, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        """Call a function, as `call_as_actor` does, with each tuple of arguments; in parallel if resources suffice."""
        return [function(*arguments) for arguments in calls]
