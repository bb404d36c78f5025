"""Which rows are in flight together: lock-step batches, or slots that are refilled as rows end.

    lock step  admit a batch, step until its last row has ended, next batch. Rows of a batch share one depth.
    refill     as rows end, waiting rows take their slots, in groups: continuous batching at ragged depth. While the
               last rows of a run finish, those of the next run are admitted, where its slots fit the cache.

Requests come in calls. What runs together is a function of a call's requests and their answers alone, so that a retry
or a resumed job runs the same batches; unless calls may join: then the next call's rows take the slots that the last
rows of a call leave free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.engine.batching import plan_batches
from actors.engine.call import Call, OnBatch, shape_of
from actors.engine.engine import Engine
from actors.engine.flight import Flight
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.protocol import EngineProtocol
from actors.engine.runs import Run, merge, smaller
from actors.engine.shared_prefixes import Prompt, shared_prefixes
from actors.engine.types import SCHEDULERS, Completion, EngineStats, FinishReason, Request


def generate(
    engine: EngineProtocol,
    requests: Sequence[Request],
    *,
    budget_bytes: int,
    max_rows: int,
    prefix: Sequence[int] = (),
    share_prefixes: bool = True,
    scheduler: str = "lock_step",
    on_batch: OnBatch | None = None,
) -> list[Completion]:
    """Answer all requests; returns completions in their order. Arguments and errors as of `CallScheduler`."""
    calls = CallScheduler(
        engine, budget_bytes=budget_bytes, max_rows=max_rows, share_prefixes=share_prefixes, scheduler=scheduler
    )
    return calls.finish(calls.submit(requests, prefix, on_batch))


class CallScheduler:
    """Answers calls of requests, one after the other, or joined where one ends.

    Where memory runs out, the rows that have not ended run again: first without rows of another run, then unchanged if
    the engine could reduce its own memory, then with half as many in flight. A request that runs out of memory alone
    gets a completion with an error.

    Args:
        engine: Has no rows in flight; nobody else uses it while a call is answered.
        budget_bytes: Bytes of cache of the rows in flight.
        max_rows: Most rows in flight.
        share_prefixes: Whether longer beginnings that some prompts share are computed once too.
        scheduler: One of SCHEDULERS.
        joins_calls: Whether rows of a call may be in flight with the last ones of the call before. For engines whose
            results for a row do not depend on other rows, or need not be the same in each run.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        *,
        budget_bytes: int,
        max_rows: int,
        share_prefixes: bool = True,
        scheduler: str = "lock_step",
        joins_calls: bool = False,
    ) -> None:
        assert scheduler in SCHEDULERS
        self.engine, self.budget_bytes, self.max_rows = engine, budget_bytes, max_rows
        self.share_prefixes, self.refills = share_prefixes, scheduler == "refill"
        self.joins_calls = joins_calls and self.refills
        self._queue: deque[Call] = deque()  # submitted, not begun
        self._begun: list[Call] = []  # oldest first
        self._flight: Flight | None = None
        self._mark = EngineStats()  # the engine's counts when the last call ended
        if self.joins_calls and isinstance(engine, Engine):
            engine.reserved_bytes = budget_bytes  # so that the next call's cache fits the memory of this one's

    def submit(
        self,
        requests: Sequence[Request],
        prefix: Sequence[int] = (),
        on_batch: OnBatch | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> Call:
        """Queue requests; from any thread.

        Args:
            requests: The rows.
            prefix: Token ids with which most prompts begin; its keys and values are kept until another prefix comes.
            on_batch: Called, before memory is allocated for them, with the indices of all requests that may be in
                flight until its next call. A call with it joins no other.
            on_drain: Called when the last row has been admitted and rows of another call would find slots.

        Raises:
            UserError: A request that cannot be run.
        """
        engine = self.engine
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [request.new_tokens_limit(engine.decoder.context_length) for request in requests]
        prefixes = shared_prefixes([request.prompt_ids for request in requests], prefix, nested=self.share_prefixes)
        runs = self._plan(prefixes, lengths, limits)
        call = Call(requests, prefixes, lengths, limits, runs[::-1], on_batch, on_drain)
        if requests:
            self._queue.append(call)
        else:
            call.done.set()
        return call

    def finish(self, call: Call) -> list[Completion]:
        """Admit and step until a call's rows have ended; from one thread at a time. Returns its completions."""
        while not call.done.is_set():
            self._turn()
        return call.result()

    def _plan(self, prefixes: Sequence[Prompt], lengths: Sequence[int], limits: Sequence[int]) -> list[Run]:
        """The runs of a call, longest prompts first; rows with the same prefix follow each other."""
        engine, numbers = self.engine, dict[Prompt, int]()
        batches = plan_batches(
            lengths,
            limits,
            row_bytes=engine.row_bytes,
            budget_bytes=self.budget_bytes,
            max_rows=self.max_rows,
            groups=[numbers.setdefault(prefix, len(numbers)) for prefix in prefixes],
            shared=[engine.shared_tokens(prefix) for prefix in prefixes],
        )
        runs = [Run(batch, len(batch)) for batch in batches]
        if not self.refills:
            return runs
        if engine.grows:  # rows allocate cache as they grow: one run of all
            return [Run([row for run in runs for row in run.rows], self.max_rows)] if runs else []
        return merge(runs, lengths, limits, engine.row_bytes, self.budget_bytes)

    def _turn(self) -> None:
        """Open the next run, or admit rows, or make a step."""
        failed = False
        try:
            flight = self._flight or self._open()
            self._join(flight)
            rows = flight.next_rows()
            if rows:
                flight.settle(flight.admit(rows))
            else:
                last = not flight.waiting and not self._may_join(flight)
                flight.settle(self.engine.step(last=last))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                self._abandon(error)
                raise
            failed = True
        except BaseException as error:
            self._abandon(error)
            raise
        if failed:  # outside of the clause: the error's traceback holds tensors
            self._run_again()
        elif flight.left == 0:
            self.engine.close()
            self._flight = None
        for call in [call for call in self._begun if len(call.completions) == len(call.requests)]:
            self._end(call)

    def _open(self) -> Flight:
        """Open the engine for the next run."""
        while True:
            call = self._next_call()
            assert call is not None, "no call has rows left"
            self._begin(call)
            run = call.runs.pop()
            longest, most_new = shape_of(call, run.rows)
            if run.capacity == 1 or run.capacity * self.engine.row_bytes(longest, most_new) < call.too_large:
                break
            call.runs += smaller(run)[::-1]
        flight = self._flight = Flight(self.engine, run.capacity, (longest, most_new))
        flight.add(call, run)
        flight.report()  # before memory is allocated, which may kill the process
        self.engine.open(run.capacity, longest, most_new)
        return flight

    def _next_call(self) -> Call | None:
        """The oldest call that has rows to admit."""
        return next((call for call in self._begun if call.runs), self._queue[0] if self._queue else None)

    def _begin(self, call: Call) -> None:
        if call in self._begun:
            return
        if not self._begun:
            self._mark = replace(self.engine.stats)
        self._begun.append(call)
        self._queue.popleft()

    def _may_join(self, flight: Flight) -> bool:
        """Whether rows of another run may be admitted to these."""
        return self.refills and not flight.apart and (bool(flight.call.runs) or self._joins(flight.call))

    def _joins(self, call: Call) -> bool:
        """Whether a call may share steps with another."""
        return self.joins_calls and call.on_batch is None

    def _join(self, flight: Flight) -> None:
        """Once a run's last rows have been admitted and slots are free, let the next run's rows wait for them."""
        if flight.waiting or not flight.has_free_slots or not self._may_join(flight):
            return
        on_drain = flight.call.on_drain
        if not flight.call.runs and on_drain is not None:
            flight.call.on_drain = None  # once
            on_drain()
        call = self._next_call()
        if call is None or call.runs[-1].apart or (call is not flight.call and not self._joins(call)):
            return
        run = call.runs[-1]
        most, shape = self._widened(flight, shape_of(call, run.rows), call.too_large)
        if most < run.capacity or most <= len(self.engine.rows):
            return  # until rows in flight that need longer slots have ended
        if call.on_batch is not None:
            call.on_batch(sorted({*flight.rows_of(call), *run.rows[:most]}))
        if not self.engine.widen(most, *shape):
            return
        self._begin(call)
        call.runs.pop()
        flight.add(call, run)
        flight.capacity, flight.shape = most, shape
        self.engine.stats.batches += 1

    def _widened(self, flight: Flight, wanted: tuple[int, int], too_large: float) -> tuple[int, tuple[int, int]]:
        """Most rows in flight once rows of the shape `wanted` join those in flight, and the shape of all."""
        held = flight.shape_in_flight()
        shape = max(held[0], wanted[0]), max(held[1], wanted[1])
        if self.engine.grows:
            return self.max_rows, shape
        size = self.engine.row_bytes(*shape)
        most = min(self.max_rows, self.budget_bytes // size) if size else self.max_rows
        return (most if most * size < too_large else 0), shape

    def _run_again(self) -> None:
        """Put back the rows that have not ended, after memory has run out."""
        flight, self._flight = self._flight, None
        self.engine.close()
        reduced = self._free_after_failure()
        if flight is None:
            return
        for call, run in reversed(flight.members):
            left = call.left(run)
            if not left:
                continue
            longest, most_new = shape_of(call, run.rows)
            if flight.joined:
                call.runs.append(replace(run, rows=left, apart=True))
            elif reduced and not run.retried:
                call.runs.append(replace(run, rows=left, retried=True))
            elif len(run.rows) == 1:
                score = 0.0 if self.engine.cumulative_logprob else None
                error = alone_error(longest, most_new)
                call.completions[left[0]] = Completion((), FinishReason.ERROR, score, error=error)
            else:
                call.too_large = min(call.too_large, run.capacity * self.engine.row_bytes(longest, most_new))
                call.runs += smaller(replace(run, rows=left))[::-1]

    def _free_after_failure(self) -> bool:
        """Free memory; whether the engine has reduced its own, so that the same rows may run again."""
        self.engine.stats.out_of_memory += 1
        reduced = self.engine.release_memory()
        free_memory()
        return reduced

    def _abandon(self, error: BaseException) -> None:
        """End all calls whose rows are in flight."""
        self._flight = None
        self.engine.close()
        for call in self._begun:
            call.error = error
            call.done.set()
        self._begun = []

    def _end(self, call: Call) -> None:
        """Count what the engine did for a call that has ended, and leave to the others in flight what is theirs."""
        self._begun.remove(call)
        counted = self.engine.stats.minus(self._mark)
        for other in self._begun:
            so_far = self._of_rows(other).plus(other.passes)
            counted = counted.minus(so_far.minus(other.credited))
            other.credited = so_far
        call.stats = counted.plus(call.credited)
        self._mark = replace(self.engine.stats)
        call.done.set()

    def _of_rows(self, call: Call) -> EngineStats:
        """Tokens and steps of a call's rows so far."""
        tokens = [(row, len(done.token_ids)) for row, done in call.completions.items()]
        stats = EngineStats(generated_tokens=sum(count for _, count in tokens))
        if self._flight is not None and not self.engine.grows:  # else a row is counted once it has ended
            tokens += self._flight.tokens_of(call)
        for row, count in tokens:
            steps, schedule = max(count - 1, 0), call.requests[row].schedule or self.engine.schedule
            stats.decode_steps += steps
            stats.layer_steps += schedule.layer_steps(steps)
            stats.full_layer_steps += self.engine.schedule.num_layers * steps
        return stats
