"""Defines `EngineSettings`, the argument of `Generator`. It can be pickled; this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.engine.build import check_choice
from actors.engine.errors import UserError
from actors.engine.model.weights import ITEM_BYTES
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import SCHEDULERS


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one model on one device, and of its answers. Use `dataclasses.replace` to change a copy.

    Args:
        checkpoint: Folder with config.json, safetensors and a tokenizer. In a job's plan: a source to fetch it from.
        speed_adapter: Folder (or source) of a speed adapter for this checkpoint. Its stored schedule replaces the
            checkpoint's. The adapter is merged into the weights while they load, unless the schedule runs every layer
            for every token.
        schedule: A schedule, or keys of a job's `schedule` section, which override the schedule of the checkpoint.
        unadapted: Accept a schedule that the checkpoint was not trained for; the answers may be ruined.
        sampling: Fields of `SamplingParams`.
        choices: Labels; every answer is one of them.
        output_format: Form of every answer: {"json_schema": schema}, {"regex": …} or {"grammar": …} (Lark). An answer
            that the length limit cuts off before its format is complete keeps its text and gets an error.
        reasoning: {"start": …, "end": …}, the delimiters of thinking (default <think> and </think>). Thinking becomes
            the answer's `reasoning`; choices or output_format apply only after it. None: the text includes thinking.
        strip: Remove white space from both ends of an answer that is free text.
        dtype: Data type of weights, activations and cache: float32, bfloat16 or float16.
        weights: "int8" rounds linear layers and head to 8 bits (needs a CPU and bfloat16). None: no rounding.
        device: auto, cpu, cuda or cuda:N; auto is cuda if torch sees a GPU.
        threads: torch threads on a CPU. None: the process's setting, but at most one thread for each usable CPU.
        cache_bytes: Bytes of KV cache for the rows in flight. 0 (only with vLLM): as many as vLLM's settings allow.
        max_batch: Maximum number of rows in flight.
        scheduler: lock_step (a batch runs until its last row ends) or refill (waiting rows take slots of ended rows).
        vllm: vLLM's engine arguments, see `actors.vllm.engine`; vLLM then runs the model. None: vLLM is not used.
        cumulative_logprob: Add a column with the sum of each answer's log-probabilities in nats, which takes time.
        row_logprobs: Whether a row may ask for log-probabilities if `sampling` does not. Only `answer` returns them.
        seed: Random seed. A row's random numbers depend only on this seed and the row's prompt.
        share_prefixes: Compute a prefix only once if several prompts of a call share it.
        prompt_column: Column of a batch that holds the prompts.

    Raises:
        UserError: A setting has no meaning, or two cannot be combined. The message is one line.
    """

    checkpoint: Any
    speed_adapter: Any = None
    schedule: Schedule | Mapping[str, Any] | None = None
    unadapted: bool = False
    sampling: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None
    output_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, str] | None = None
    strip: bool = True
    dtype: str = "bfloat16"
    weights: Literal["int8"] | None = None
    device: str = "auto"
    threads: int | None = None
    cache_bytes: int = 2**30
    max_batch: int = 64
    scheduler: str = "lock_step"
    vllm: Mapping[str, Any] | None = None
    cumulative_logprob: bool = False
    row_logprobs: bool = False
    seed: int = 0
    share_prefixes: bool = True
    prompt_column: str = "prompt"

    def __post_init__(self) -> None:
        check_choice("scheduler", self.scheduler, SCHEDULERS)
        check_choice("dtype", self.dtype, ITEM_BYTES)
        if self.weights is not None:
            check_choice("weights", self.weights, ("int8",))
            if self.dtype != "bfloat16":
                raise UserError("weights = 'int8' needs dtype = 'bfloat16'")
        constrained = self.choices is not None or self.output_format is not None
        if self.vllm is not None and self.reasoning is not None and constrained:
            raise UserError(
                "engine vllm cannot combine choices or output_format with reasoning: leave out reasoning, or use "
                "another engine"
            )
