"""Where the actors of a job will run, as far as planning asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from actors.engine.machine import process_cpus, process_memory
from pipeline.config.job import ActorsConfig

Result = TypeVar("Result")


class Hardware:
    """This process: an actor runs here, and so does every call. Backends with other processes override it."""

    @property
    def on_this_machine(self) -> bool:
        """Whether every actor shares this machine's memory."""
        return True

    def node(self, actors: ActorsConfig) -> tuple[int, int, int]:
        """Return CPUs and bytes of memory of the smallest node that may hold actors, and the number of such nodes."""
        return process_cpus(), process_memory(), 1

    def call_isolated(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that may kill its process. Raises Died then, where the backend survives it."""
        return function(*arguments)

    def call_as_actor(self, actors: ActorsConfig, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function once with the resources of an actor. Raises Died if its process dies, where possible."""
        return self.call_as_actors(actors, function, [arguments])[0]

    def call_as_actors(
        self, actors: ActorsConfig, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        """Call a function as `call_as_actor` for the arguments in `calls`, at the same time where there is space."""
        return [function(*arguments) for arguments in calls]
