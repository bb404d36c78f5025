"""Completion poll: the host asks which rows have ended, and reads the answer while the GPU runs the next step.

Some rows are watched, see `DeviceRows.is_watched`: the host must see each of their tokens, since a token may end such a
row in a way that the GPU cannot see, or its log-probabilities are wanted. The poll brings their tokens since the last
one; what lies behind the token that ends a row is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.gpu.pages import upload
from actors.engine.gpu.recent import Recent
from actors.engine.gpu.state import DeviceRows
from actors.engine.row import Row
from actors.engine.types import EngineStats, FinishReason


@dataclass
class _Poll:
    """Copies on the host, complete once the event `done` is (None without a GPU).

    Args:
        slots: Ticket -> slot of the rows in flight when the poll started.
        ended: bool [R + 1].
        counts: int64 [R + 1], tokens generated.
        watched: Rows, N of them.
        recent: Their last tokens; None without any.
    """

    slots: dict[int, int]
    ended: Tensor
    counts: Tensor
    watched: list[Row]
    recent: Recent | None
    done: torch.cuda.Event | None


class CompletionPoll:
    """At most one poll is in progress.

    counts: Ticket -> tokens of the rows that had not ended at the last one.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._poll: _Poll | None = None
        self._fetch_stream: torch.cuda.Stream | None = None

    def cancel(self) -> None:
        """Drop the poll in progress."""
        self._poll, self.counts = None, {}

    def start(self, state: DeviceRows, rows: Sequence[Row], slots: Mapping[int, int]) -> None:
        """Copy, behind the steps launched so far, which rows in flight have ended, and what watched rows have sampled.

        slots: ticket -> slot of the rows.
        """
        assert self._poll is None, "the last poll has not been read"
        ended, counts = (flags.to("cpu", non_blocking=True, copy=True) for flags in (state.ended, state.counts))
        watched = [row for row in rows if state.is_watched(row)]
        recent = None
        if watched:
            top = any(row.request.sampling.logprobs for row in watched)
            recent = state.recent([slots[row.ticket] for row in watched], top=top).to_host()
        done = None
        if state.ended.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._poll = _Poll(dict(slots), ended, counts, watched, recent, done)

    def finish(self, rows: Sequence[Row], state: DeviceRows) -> list[Row]:
        """Wait for the poll in progress; returns the rows in flight that had ended, with tokens and finish reason."""
        poll, self._poll = self._poll, None
        if poll is None:
            return []
        if poll.done is not None:
            poll.done.synchronize()
        flags, counts = poll.ended.tolist(), poll.counts.tolist()
        self.counts = {ticket: counts[slot] for ticket, slot in poll.slots.items() if not flags[slot]}
        if poll.recent is not None:
            slots = [poll.slots[row.ticket] for row in poll.watched]
            poll.recent.record(poll.watched, [counts[slot] for slot in slots])
            assert all(row.finish or not flags[slot] for row, slot in zip(poll.watched, slots, strict=True))
        watched = {row.ticket for row in poll.watched}
        ended = [
            row
            for row in rows
            if row.ticket in poll.slots and row.ticket not in watched and flags[poll.slots[row.ticket]]
        ]
        if ended:
            self._fetch(ended, state, poll)
        return [row for row in rows if row.finish is not None]

    def _fetch(self, rows: Sequence[Row], state: DeviceRows, poll: _Poll) -> None:
        """Copy the tokens of rows that have ended, which the GPU changes no more."""
        slots = [poll.slots[row.ticket] for row in rows]
        counts = poll.counts.tolist()
        longest = max(counts[slot] for slot in slots)
        with self._fetching(poll.done):
            index = upload(slots, state.tokens.device)
            tokens = state.tokens[index, :longest].to("cpu", non_blocking=True)
            logprobs = state.logprobs[index].to("cpu", non_blocking=True)
        for row, slot, sampled, logprob in zip(rows, slots, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens, row.logprob = sampled[: counts[slot]], logprob
            early = len(row.tokens) < row.request.sampling.min_new_tokens
            row.finish = FinishReason.STOP if row.tokens[-1] in row.stop_ids and not early else FinishReason.LENGTH

    @contextmanager
    def _fetching(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """A stream of its own behind the event `after`, waited for at the end; the compute stream goes on."""
        if after is None:
            yield
            return
        if self._fetch_stream is None:
            self._fetch_stream = torch.cuda.Stream()
        self._fetch_stream.wait_event(after)
        with torch.cuda.stream(self._fetch_stream):
            yield
        self._fetch_stream.synchronize()


def count_ended(rows: Sequence[Row], stats: EngineStats) -> None:
    """Add the tokens and steps of rows that have ended."""
    for row in rows:
        steps = len(row.tokens) - 1
        stats.decode_steps += steps
        stats.idle_row_steps += max(0, row.position - steps)
        stats.layer_steps += row.schedule.layer_steps(steps)
        stats.full_layer_steps += row.schedule.num_layers * steps
        stats.generated_tokens += len(row.tokens)
