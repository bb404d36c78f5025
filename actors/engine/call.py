"""A call: requests that are answered together, and their completions."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.runs import Run
from actors.engine.shared_prefixes import Prompt
from actors.engine.types import Completion, EngineStats, Request

OnBatch = Callable[[Sequence[int]], None]


@dataclass(eq=False)
class Call:
    """Requests that are answered together; made by `CallScheduler.submit`.

    Args:
        prefixes: Of each request, the beginning that is computed once for all that share it.
        lengths: Tokens of each prompt.
        limits: Most new tokens of each.
        runs: That have not begun, the next one last.
        on_batch: See `CallScheduler.submit`, also for on_drain.
        completions: So far, by index of the request.
        stats: What the engine has counted for it, once all have ended.
        error: That ended it early.
    """

    requests: Sequence[Request]
    prefixes: Sequence[Prompt]
    lengths: Sequence[int]
    limits: Sequence[int]
    runs: list[Run]
    on_batch: OnBatch | None = None
    on_drain: Callable[[], None] | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    too_large: float = math.inf  # bytes of the smallest cache that ran out of memory: none as large is tried again
    passes: EngineStats = field(default_factory=EngineStats)  # what its passes over prompts have counted
    credited: EngineStats = field(default_factory=EngineStats)  # its counts up to the end of the last call

    def left(self, run: Run) -> list[int]:
        """The rows of a run that have not ended."""
        return [row for row in run.rows if row not in self.completions]

    def result(self) -> list[Completion]:
        """Completions of all requests, in their order. Raises the error that ended the call."""
        if self.error is not None:
            raise self.error
        return [self.completions[row] for row in range(len(self.requests))]


def shape_of(call: Call, rows: Sequence[int]) -> tuple[int, int]:
    """Longest prompt and most new tokens of these rows."""
    return max(call.lengths[row] for row in rows), max(call.limits[row] for row in rows)
