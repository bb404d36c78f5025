"""An engine that answers without a model, put in the real one's place in Ray's worker processes.

Ray runs `worker_process_setup_hook` in every worker as it starts; all else of the pipeline stays as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.answers import Answer, Prompt, error_answer
from actors.engine.types import EngineStats
from actors.generator import Generator
from actors.settings import EngineSettings

TOKENS = [5, 6, 7, 8]
TEXT = "a cheap pub near the river"


@dataclass(frozen=True)
class StartingLine:
    """Where engines that have loaded wait in a folder for all others, so that a job's start-up is not compared."""

    folder: Path
    engines: int

    def wait(self) -> None:
        """AssertionError if the others do not come within two minutes."""
        (self.folder / str(os.getpid())).touch()
        end = time.monotonic() + 120
        while len(list(self.folder.iterdir())) < self.engines:
            assert time.monotonic() < end, "not all engines have started"
            time.sleep(0.05)


class FakeGenerator(Generator):
    """Answers every row with the same few tokens. seconds_a_row: sleep, as long as a GPU would be busy."""

    seconds_a_row = 0.0
    line: StartingLine | None = None

    def __init__(self, settings: EngineSettings) -> None:
        self.tokenizer = SimpleNamespace(decode=str)
        if self.line:
            self.line.wait()

    def begin(self, prompts: Sequence[Prompt], on_batch: Any = None, **_: Any) -> Any:
        """Nothing but the rows. texts: answers by row; a row without one gets its prompt's error."""
        call = SimpleNamespace(stats=EngineStats(batches=1, generated_tokens=len(TOKENS) * len(prompts)))
        return SimpleNamespace(prompts=prompts, on_batch=on_batch or (lambda rows: None), call=call, texts={})

    def run(self, work: Any) -> None:
        """Sleep."""
        time.sleep(self.seconds_a_row * len(work.prompts))
        work.texts = {row: TEXT for row, prompt in enumerate(work.prompts) if prompt.error is None}

    def finish(self, work: Any) -> list[Answer]:
        """The rows' answers, in their order."""
        same = {"sample_index": 0, "finish_reason": "stop", "mean_depth": 4.0, "error": None}
        same |= {"generated_tokens": len(TOKENS), "token_ids": TOKENS}
        none = dict.fromkeys(("cumulative_logprob", "logprobs", "choice_probability"))
        return [
            Answer(row=row, generated_text=work.texts[row], prompt_tokens=len(prompt.ids), **same, **none)
            if row in work.texts
            else error_answer(row, 0, prompt.error)
            for row, prompt in enumerate(work.prompts)
        ]

    def peak_memory_bytes(self) -> int:
        """No model, no memory."""
        return 0

    def device_name(self) -> str:
        """For the statistics."""
        return "fake"


def hook(seconds_a_row: float, line: StartingLine | None = None) -> Callable[[], None]:
    """A `worker_process_setup_hook` that puts the fake in place."""

    def put_in_place() -> None:
        import pipeline.answer.stage

        FakeGenerator.seconds_a_row, FakeGenerator.line = seconds_a_row, line
        pipeline.answer.stage.Generator = FakeGenerator  # type: ignore[misc]

    return put_in_place
