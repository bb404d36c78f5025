"""Events to those who submitted rows, and the counts of what they got."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.engine.online.submissions import Event, Submission, Task
from actors.engine.protocol import EngineProtocol
from actors.engine.types import Completion, FinishReason, TokenLogprob

log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts since the loop began."""

    ended: int = field(default=0, metadata={"unit": "rows answered"})
    cancelled: int = field(default=0, metadata={"unit": "rows cancelled"})
    failed: int = field(default=0, metadata={"unit": "rows that could not be answered"})
    prompt_tokens: int = field(default=0, metadata={"unit": "tokens of admitted prompts"})
    generated_tokens: int = field(default=0, metadata={"unit": "tokens of rows answered"})
    layer_steps: int = field(default=0, metadata={"unit": "layers run over decode steps of rows answered"})
    full_layer_steps: int = field(default=0, metadata={"unit": "layers that full depth would have run"})
    out_of_memory: int = field(default=0, metadata={"unit": "times that memory ran out"})


class Delivery:
    """Sends events.

    Args:
        engine: Whose rows they are of.
        events_per_second: See `OnlineLoop`.
        cancel: Of a submission whose receiver fails.
    """

    def __init__(self, engine: EngineProtocol, events_per_second: float, cancel: Callable[[Submission], None]) -> None:
        self.totals = Totals()
        self._engine, self._events_per_second, self._cancel = engine, events_per_second, cancel
        self._send_at = 0.0  # when tokens of all rows in flight are sent again

    def end(self, task: Task, completion: Completion) -> None:
        """Send the rest of a row's tokens, with its answer."""
        self._count(task, completion)
        self._send(task, completion.token_ids, completion.logprobs, completion)

    def fail(self, tasks: Sequence[Task], error: str) -> None:
        """Send an error in place of answers."""
        for task in tasks:
            self.totals.failed += 1
            self._send(task, (), (), Completion((), FinishReason.ERROR, None, error=error))

    def stream(self, flying: Mapping[int, Task], now: float) -> None:
        """Send the tokens of the rows in flight whose time has come.

        Args:
            flying: By ticket.
            now: Seconds of `time.monotonic`.
        """
        is_time = now >= self._send_at
        tasks = {
            ticket: task for ticket, task in flying.items() if task.submission.streams and (is_time or not task.sent)
        }
        generated = self._engine.generated() if tasks else {}
        if generated and is_time:
            self._send_at = now + len(tasks) / self._events_per_second
        for row in self._engine.rows if generated else ():
            task, tokens = tasks.get(row.ticket), generated.get(row.ticket, ())
            if task is not None and len(tokens) > task.sent:
                self._send(task, tokens, row.logprobs, None)

    def _count(self, task: Task, completion: Completion) -> None:
        totals, steps = self.totals, len(completion.token_ids) - 1
        schedule = task.request.schedule or self._engine.schedule
        totals.ended += 1
        totals.generated_tokens += len(completion.token_ids)
        totals.layer_steps += schedule.layer_steps(steps)
        totals.full_layer_steps += schedule.num_layers * max(0, steps)

    def _send(
        self,
        task: Task,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        completion: Completion | None,
    ) -> None:
        """Send the tokens that `receive` has not got."""
        submission, first = task.submission, task.sent
        if submission.cancelled:
            return
        task.sent = max(first, len(tokens))
        try:
            submission.receive(Event(task.index, tuple(tokens[first:]), tuple((logprobs or ())[first:]), completion))
        except Exception:
            log.exception("a receiver failed; its rows are cancelled")
            self._cancel(submission)
