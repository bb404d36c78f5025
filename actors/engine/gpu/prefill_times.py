"""Seconds of the GPU in passes over prompts. The host only launches a pass, so events on the stream measure it."""

from __future__ import annotations

from collections import deque

import torch


class PrefillTimes:
    """Passes, each between two events. Events of completed passes are dropped at every new pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._began: torch.cuda.Event | None = None
        self._passes: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        """The work launched from here on is a pass."""
        if self.device.type == "cuda":
            self._began = self._mark()

    def end(self) -> None:
        """The pass ends with the work launched so far."""
        if self._began is not None:
            self._passes.append((self._began, self._mark()))
            self._began = None
        while self._passes and self._passes[0][1].query():
            self._add()

    def take(self) -> float | None:
        """Wait for all passes; returns their seconds since the last call, None without a GPU."""
        if self.device.type != "cuda":
            return None
        if self._passes:
            torch.cuda.synchronize(self.device)
        while self._passes:
            self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self) -> None:
        began, ended = self._passes.popleft()
        self._seconds += began.elapsed_time(ended) / 1000

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
