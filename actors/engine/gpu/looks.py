"""How the host learns which rows have ended: it asks, and reads the answer while the device is at the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.engine.gpu.pages import upload
from actors.engine.gpu.state import DeviceRows
from actors.engine.row import Row
from actors.engine.types import FinishReason


@dataclass
class _Look:
    """What was asked: copies on the host that are whole once `done` is. slots: of the tickets that were in flight."""

    slots: dict[int, int]
    ended: Tensor
    counts: Tensor
    done: Any


class Looks:
    """At most one question is under way."""

    def __init__(self) -> None:
        self._look: _Look | None = None
        self._stream: Any = None

    def drop(self) -> None:
        """Forget what was asked."""
        self._look = None

    def ask(self, state: DeviceRows, slots: Mapping[int, int]) -> None:
        """Have the device tell, once it is there, which rows have ended. slots: of the tickets in flight."""
        ended, counts = (one.to("cpu", non_blocking=True) for one in (state.ended, state.counts))
        done = None
        if state.ended.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._look = _Look(dict(slots), ended, counts, done)

    def read(self, rows: Sequence[Row], state: DeviceRows) -> list[Row]:
        """Of the rows in flight those that had ended when the device was asked, with their tokens and why."""
        look, self._look = self._look, None
        if look is None:
            return []
        if look.done is not None:
            look.done.synchronize()
        told = look.ended.tolist()
        ended = [row for row in rows if row.ticket in look.slots and told[look.slots[row.ticket]]]
        if ended:
            self._fetch(ended, state, look)
        return ended

    def _fetch(self, rows: Sequence[Row], state: DeviceRows, look: _Look) -> None:
        """Tokens of rows that have ended, which the device does not change any more."""
        slots = [look.slots[row.ticket] for row in rows]
        counts = look.counts.tolist()
        with self._aside(look.done):
            index = upload(slots, state.tokens.device)
            told = [one[index].to("cpu", non_blocking=True) for one in (state.tokens, state.logprobs)]
        tokens, logprobs = (one.tolist() for one in told)
        for row, slot, drawn, logprob in zip(rows, slots, tokens, logprobs, strict=True):
            row.tokens, row.logprob = drawn[: counts[slot]], logprob
            early = len(row.tokens) < row.request.sampling.min_new_tokens
            row.finish = FinishReason.STOP if row.tokens[-1] in row.stop_ids and not early else FinishReason.LENGTH

    @contextmanager
    def _aside(self, after: Any) -> Iterator[None]:
        """On a stream of its own, behind `after`, which is waited for in the end: the steps go on."""
        if after is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
