"""Progress lines of a training: steps done, seconds a step, time left, loss."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerState

from pipeline.runtime.announce import Timer, announce


class StepProgress(TrainerCallback):
    """Announces the steps to do, the first step, and then from time to time how many are done.

    loss: of the latest step, nats per response token; set by the trainer.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self._timer = Timer()
        self._began = 0.0
        self._first = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps to do."""
        self._began, self._first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            announce(f"training: {state.global_step:,} of {state.max_steps:,} steps")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps done."""
        done = state.global_step - self._first
        if (self._timer.is_due() or done == 1) and state.is_world_process_zero:
            each = (time.monotonic() - self._began) / done
            left = duration(each * (state.max_steps - state.global_step))
            loss = "" if self.loss is None else f"; loss {float(self.loss):.3f}"
            announce(
                f"training: {state.global_step:,} of {state.max_steps:,} steps, {each:.2g} s a step, "
                f"about {left} left{loss}"
            )


def duration(seconds: float) -> str:
    """Such as `40 s`, `15 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
