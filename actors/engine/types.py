"""Input and output types of the engine. This module imports no torch and no model code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from actors.engine.errors import UserError, suggestion

if TYPE_CHECKING:
    from actors.engine.constraints.constraint import Constraint
    from actors.engine.sampling.stopping import StopStrings
    from actors.engine.schedule.schedule import Schedule

EngineName = Literal["auto", "builtin", "vllm"]
SCHEDULERS = ("lock_step", "refill")


class FinishReason(StrEnum):
    """Why generation ended for a row: STOP (a stop token, a stop string, or a complete answer in the required format),
    LENGTH (`max_new_tokens` is reached or the context is full), or ERROR."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one row (one request). Names and meanings are as in vLLM and transformers.

    Raises:
        UserError: A value is outside its range.
    """

    max_new_tokens: int = 64  # maximum number of tokens in an answer, including the stop token
    min_new_tokens: int = 0  # minimum number of tokens in an answer
    temperature: float = 0.0  # sampling temperature; 0: greedy decoding
    top_k: int = 0  # top-k: sample only from this many likeliest tokens; 0: from all tokens
    top_p: float = 1.0  # top-p: sample only from the fewest likeliest tokens with this total probability
    min_p: float = 0.0  # min-p: sample only tokens with at least this fraction of the likeliest token's probability
    repetition_penalty: float = 1.0  # repetition penalty for tokens of the prompt and the answer; 1: none
    presence_penalty: float = 0.0  # penalty for each token that occurs in the answer; 0: none
    frequency_penalty: float = 0.0  # penalty for each occurrence of a token in the answer; 0: none
    stop: tuple[str, ...] = ()  # stop strings; the text is cut before the first one that occurs
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the row, in addition to the model's own stop tokens
    ignore_eos: bool = False  # whether to continue when the model generates one of its own stop tokens
    n: int = 1  # number of answers to the prompt
    # for each position, return log-probabilities of the sampled token and this many likeliest tokens; None: return none
    logprobs: int | None = None
    seed: int | None = None  # random seed of this row; None: use the job's seed

    def __post_init__(self) -> None:
        if self.top_k == -1:  # vLLM's other name for all tokens
            object.__setattr__(self, "top_k", 0)
        temperature_fits = self.temperature == 0 or LEAST <= self.temperature <= MOST
        ids_fit = all(0 <= token <= MOST_INTEGER for token in self.stop_token_ids)
        for name, fits, rule in (
            ("max_new_tokens", 1 <= self.max_new_tokens <= MOST_INTEGER, f"must be 1 to {MOST_INTEGER}"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "must be 0 to max_new_tokens"),
            ("temperature", temperature_fits, f"must be 0 (greedy), or {LEAST} to {MOST}"),
            ("top_k", 0 <= self.top_k <= MOST_INTEGER, f"must be 0 (all) to {MOST_INTEGER}"),
            ("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]"),
            ("repetition_penalty", LEAST <= self.repetition_penalty <= MOST, f"must be {LEAST} to {MOST}"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must lie in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must lie in [-2, 2]"),
            ("stop", all(self.stop), "must not hold an empty string"),
            ("stop_token_ids", ids_fit, f"must be 0 to {MOST_INTEGER}"),
            ("n", 1 <= self.n <= MOST_SAMPLES, f"must be 1 to {MOST_SAMPLES}"),
            ("n", self.n == 1 or self.temperature > 0, "needs a temperature above 0: greedy answers are all the same"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, f"must be 0 to {MOST_LOGPROBS}"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "must be 0 to 2**63 - 1"),
        ):
            if not fits:
                raise UserError(f"{name} = {getattr(self, name)!r}: {rule}")

    def merged(self, changes: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with a row's `changes`; values of None are ignored. Raise ValueError for a wrong value."""
        return replace(self, **{name: _checked(name, value) for name, value in effective(changes).items()})

    def all_stop_ids(self, model_stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a row: `stop_token_ids`, and `model_stop_ids` unless `ignore_eos` is set."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | model_stop_ids


# values of parameters of OpenAI's API and vLLM's server that change nothing; they are accepted and ignored
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "echo", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), (True,)),
    **dict.fromkeys(("bad_words", "functions"), ([],)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **{"priority": (0,), "logit_bias": ({},), "service_tier": ("auto", "default")},
}


def is_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> bool:
    """Return whether `value` is one of a parameter's neutral values. A truth value is no number."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral.get(name, ()))


def effective(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of `changes` without those that are None or `NEUTRAL`."""
    return {name: value for name, value in changes.items() if value is not None and not is_neutral(name, value)}


def check_compatible(name: str, params: SamplingParams) -> None:
    """Raise UserError if a parameter would end a constrained answer before it is complete, or prevent its end.

    name: the key that sets the answer's format: `choices` or `output_format`.
    """
    for conflicting in ("stop", "stop_token_ids", "min_new_tokens", "ignore_eos"):
        if getattr(params, conflicting):
            part = "label" if name == "choices" else "format"
            raise UserError(f"{name} cannot be combined with sampling.{conflicting}: the {part} alone ends the answer")


def _checked(name: str, value: Any) -> Any:
    """Convert a user's `value` to the type of parameter `name`. Raise ValueError if that is impossible."""
    kinds = {parameter.name: str(parameter.type) for parameter in fields(SamplingParams)}
    if name not in kinds:
        raise UserError(f"unknown key {name}; {suggestion(name, kinds)}")
    kind = kinds[name].removesuffix(" | None")
    wrong = ValueError(f"{name} = {value!r}: must be {_KINDS[kind]}")
    if kind.startswith("tuple"):
        many = [value] if isinstance(value, str) else value
        member = str if kind == "tuple[str, ...]" else int
        if not isinstance(many, Sequence) or not all(type(item) is member for item in many):
            raise wrong
        return tuple(many)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and number and value == value // 1:
        return int(value)
    if kind == "float" and number and abs(value) < 10**300:
        return float(value)
    raise wrong


LEAST, MOST = 0.01, 100.0  # range of temperature and repetition penalty; outside it, scaled logits may overflow
MOST_LOGPROBS = 20
MOST_SAMPLES = 1024
MOST_INTEGER = 2**31 - 1  # largest integer for parameters that go into int32 tensors
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a string or a list of strings",
    "tuple[int, ...]": "a list of whole numbers",
}


def row_key(seed: int, source: str, row: int, sample: int = 0) -> int:
    """Hash the job seed, input file, row number and sample index to a 64-bit key for the row's random numbers."""
    digest = hashlib.blake2b(f"{seed}\0{source}\0{row}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Request:
    """One row to answer."""

    prompt_ids: Sequence[int]  # the prompt's token ids, at least one
    sampling: SamplingParams = SamplingParams()
    key: int = 0  # 64-bit key that alone determines the row's random numbers
    ending: StopStrings | None = None  # the row's stop strings
    constraint: Constraint | None = None  # required format of the answer: a list of labels, or a grammar

    def new_tokens_limit(self, context_length: int) -> int:
        """Return the maximum number of new tokens: `max_new_tokens`, or the room left in the context if that is less.

        For a constraint with a maximum length (labels), return that length.

        Raises:
            UserError: The prompt is empty, the prompt fills the context, or the context has no room for the choices.
        """
        length = len(self.prompt_ids)
        if length == 0:
            raise UserError("the prompt is empty: give at least one token")
        left = context_length - length
        if left < 1:
            raise UserError(f"prompt of {length} tokens leaves no room in a context of {context_length}")
        most = None if self.constraint is None else self.constraint.most_tokens
        if most is not None:
            if most > left:
                raise UserError(
                    f"choices have up to {most} tokens, but the context has room for only {left}: shorten the prompt"
                )
            return most
        return min(self.sampling.max_new_tokens, left)


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token and the likeliest tokens at its position. Log-probabilities are in nats, before penalties and
    temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), likeliest first

    def to_dict(self, text: Callable[[int], str]) -> dict[str, Any]:
        """Return this token's entry in the output column `logprobs`. text: function from token id to text."""
        top = [{"token_id": token, "token": text(token), "logprob": logprob} for token, logprob in self.top]
        return {"token_id": self.token, "token": text(self.token), "logprob": self.logprob, "top": top}


NOT_NUMBERS = "logits are not numbers (NaN or infinite): the weights are damaged, or model.dtype overflows"


@dataclass(frozen=True)
class Completion:
    """One row's answer."""

    token_ids: tuple[int, ...]  # generated tokens, including the stop token; after an error, those before the error
    finish_reason: FinishReason
    # sum of the tokens' log-probabilities in nats, before penalties, temperature, top-k and top-p; None: not computed
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one entry per token; None unless `sampling.logprobs` is set
    choice: int | None = None  # index of the chosen label; None without choices
    # product of the tokens' probabilities among the allowed tokens, where labels part; None without choices. For labels
    # of one token this is the label's share of the probability of all labels
    choice_probability: float | None = None
    error: str | None = None  # why there is no answer, or why it does not complete its format; None: no error


@dataclass
class EngineStats:
    """Counts of the work that an engine has done since the last call of `Engine.take_stats`."""

    batches: int = field(default=0, metadata={"unit": "batches, or runs whose slots are refilled"})
    prompt_tokens: int = field(default=0, metadata={"unit": "tokens computed in prefill, without padding"})
    shared_prompt_tokens: int = field(default=0, metadata={"unit": "prompt tokens that another row's prefill computed"})
    padded_prompt_tokens: int = field(default=0, metadata={"unit": "tokens computed in prefill, with padding"})
    generated_tokens: int = field(default=0, metadata={"unit": "tokens"})
    decode_steps: int = field(default=0, metadata={"unit": "tokens that were inputs of decode steps"})
    layer_steps: int = field(default=0, metadata={"unit": "layers run, summed over decode steps"})
    full_layer_steps: int = field(default=0, metadata={"unit": "layers that full depth would have run"})
    prefill_seconds: float = field(default=0.0, metadata={"unit": "s"})
    decode_seconds: float = field(default=0.0, metadata={"unit": "s"})
    cache_bytes: int = field(default=0, metadata={"unit": "bytes of the largest batch's cache"})
    out_of_memory: int = field(default=0, metadata={"unit": "times that memory ran out"})

    def plus(self, other: EngineStats) -> EngineStats:
        """Return the sums of two objects' counts, but the maximum of `cache_bytes`."""
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return EngineStats(**{**sums, "cache_bytes": max(self.cache_bytes, other.cache_bytes)})

    def add_prompts(self, now: EngineStats, before: EngineStats) -> None:
        """Add the prefill counts of `now` minus those of `before`, two snapshots of one engine's statistics."""
        for name in ("prompt_tokens", "shared_prompt_tokens", "padded_prompt_tokens", "prefill_seconds"):
            setattr(self, name, getattr(self, name) + getattr(now, name) - getattr(before, name))

    def add_steps(self, schedule: Schedule, count: int) -> None:
        """Add a row's first `count` decode steps with `schedule`; for a negative count, subtract that many steps."""
        layers = schedule.layer_steps(abs(count))
        self.decode_steps += count
        self.layer_steps += layers if count > 0 else -layers
        self.full_layer_steps += schedule.num_layers * count
