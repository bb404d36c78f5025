"""What goes into the engine and what comes out. Plain values; knows neither torch nor models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a row ended: a stop token, a length limit (max_new_tokens or the context), or an error."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one row are drawn.

    max_new_tokens: tokens, the stop token counted. temperature: 0 is greedy. top_k: tokens, 0 is all.
    top_p: probability mass. Raises ValueError for values that mean nothing.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be 0 or above")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (all) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must lie in (0, 1]")


@dataclass(frozen=True)
class Request:
    """One row to answer.

    prompt_ids: token ids, at least one. key: 64-bit number from which all of the row's random numbers
    follow, so that they hang on neither its batch nor its place in it.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    key: int = 0


@dataclass(frozen=True)
class Completion:
    """One row's answer. token_ids ends with the stop token if that ended it; logprobs are in nats."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    cumulative_logprob: float


@dataclass
class EngineStats:
    """Counts over everything an engine has run since they were last taken."""

    batches: int = field(default=0, metadata={"unit": "batches"})
    prompt_tokens: int = field(default=0, metadata={"unit": "tokens"})
    padded_prompt_tokens: int = field(default=0, metadata={"unit": "tokens computed in prefill, padding included"})
    generated_tokens: int = field(default=0, metadata={"unit": "tokens"})
    decode_steps: int = field(default=0, metadata={"unit": "tokens that were an input to decode"})
    idle_row_steps: int = field(default=0, metadata={"unit": "decode steps of rows that had ended"})
    layer_steps: int = field(default=0, metadata={"unit": "layers run over decode steps"})
    full_layer_steps: int = field(default=0, metadata={"unit": "layers full depth would have run"})
    prefill_seconds: float = field(default=0.0, metadata={"unit": "s"})
    decode_seconds: float = field(default=0.0, metadata={"unit": "s"})
    cache_bytes: int = field(default=0, metadata={"unit": "bytes of the largest batch's cache"})
