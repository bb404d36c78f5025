"""The hardware of a job's actors, as planning needs to know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from actors.engine.machine import process_cpus, process_memory
from pipeline.config.job import ActorsConfig

Result = TypeVar("Result")


class Hardware:
    """This process: actor and calls run here. Backends with other processes override this class."""

    @property
    def on_this_machine(self) -> bool:
        """Tell whether all actors share this machine's memory."""
        return True

    def node(self, actors: ActorsConfig) -> tuple[int, int, int]:
        """Return CPUs and bytes of memory of the smallest node that may hold actors, and the number of such nodes."""
        return process_cpus(), process_memory(), 1

    def call_isolated(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that may kill its process. Raises Died if it did and the backend survives."""
        return function(*arguments)

    def call_as_actor(self, actors: ActorsConfig, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function once with the resources of an actor. Raises Died if its process dies, where possible."""
        return self.call_as_actors(actors, function, [arguments])[0]

    def call_as_actors(
        self, actors: ActorsConfig, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        """Call a function as `call_as_actor` for each of `calls`, in parallel if the resources suffice."""
        return [function(*arguments) for arguments in calls]
