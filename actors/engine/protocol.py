"""The interface of `engine.Engine` and `gpu.engine.GpuEngine` to the scheduler and to `Generator`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from actors.engine.decoder import Decoder
from actors.engine.row import Row
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Completion, EngineStats, Request

Ended = list[tuple[int, Completion]]  # (ticket, completion) of rows that have ended


class EngineProtocol(Protocol):
    """Generates with one decoder and one schedule; single-threaded.

    Attributes:
        rows: Rows in flight, oldest first.
        stop_ids: Tokens of the model that end a row.
        cumulative_logprob: Whether completions carry their log-probability.
        token_bytes: Cache bytes of a token in one layer.
        grows: Whether rows allocate cache as they grow; then admission is an estimate, rows may be preempted, and all
            have the engine's schedule.
        stepped: Whether the last `admit` also made a step for the rows that were in flight.
        rounds_to_warm: Runs over the same rows after which nothing is compiled or captured any more.
    """

    decoder: Decoder
    schedule: Schedule
    stop_ids: frozenset[int]
    cumulative_logprob: bool
    stats: EngineStats
    rows: list[Row]
    token_bytes: int
    grows: bool
    stepped: bool
    rounds_to_warm: int

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Most cache bytes of a row at any time, in a batch with these as its longest prompt and most new tokens."""
        ...

    def shared_tokens(self, prefix: Sequence[int]) -> int:
        """First tokens of a prefix that the cache stores once for all rows in flight that begin with it."""
        ...

    def at(self, schedule: Schedule) -> EngineProtocol:
        """An engine of the same decoder under another schedule; only one of the two may have rows in flight."""
        ...

    def open(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """Allocate for at most `rows` rows in flight, none with a longer prompt or more new tokens than given."""
        ...

    def widen(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> bool:
        """With rows in flight: make slots for at most `rows` rows of such lengths, in the memory that is there.

        Returns whether there is enough; else nothing has changed.
        """
        ...

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """Run the prompts' pass and sample each row's first token; returns a ticket a request.

        Rows may be in flight: the admitted rows are the youngest. prefix: tokens with which all these prompts begin.
        """
        ...

    def step(self, *, last: bool = False) -> Ended:
        """Generate one token for every row in flight; returns the rows that have ended.

        last: no row will be admitted any more, so that layers which no row will run again may free their cache.
        """
        ...

    def retire(self) -> Ended:
        """Remove the rows that are known to have ended, without a step; returns them."""
        ...

    def close(self) -> None:
        """Drop the rows in flight; their counts are taken back."""
        ...

    def admission_estimate(self, requests: Sequence[Request], prefixes: Sequence[Sequence[int]] = ()) -> int:
        """How many of these requests, in their order, the cache has space for now.

        prefixes: Of each request, the beginning that it shares with others; (): none has one.
        """
        ...

    def first_pass(self, requests: Sequence[Request], prefix: Sequence[int]) -> int:
        """How many of these requests, in their order, share one pass; a step comes before the next pass."""
        ...

    def take_preempted(self) -> list[int]:
        """Tickets of rows preempted since the last call; they must be admitted again."""
        ...

    def cancel(self, tickets: Collection[int]) -> None:
        """Remove rows from flight, whatever they have generated; other rows go on unchanged."""
        ...

    def generated(self) -> Mapping[int, Sequence[int]]:
        """The tokens so far of the rows in flight, by ticket, as far as the host has them; none where it has not."""
        ...

    def release_memory(self) -> bool:
        """Free what is kept for the next `open`, after memory has run out.

        Returns whether the engine has reduced its own memory, so that the same rows may be tried again.
        """
        ...

    def used_cache_bytes(self) -> int:
        """Cache bytes that the rows in flight use now; may be called from any thread."""
        ...

    def take_stats(self) -> EngineStats:
        """Counts since the last call."""
        ...
