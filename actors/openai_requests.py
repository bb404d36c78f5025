"""Converts OpenAI's request bodies to prompts and sampling parameters. The error for an unsupported key names the key.

Sources: https://platform.openai.com/docs/api-reference/chat/create and .../completions/create. Keys that OpenAI does
not define are taken from vLLM's server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError, suggestion
from actors.engine.types import NEUTRAL, is_neutral

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, TEXT)
_SAME = (  # keys of sampling parameters that have the same name in `SamplingParams`
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),  # keys of vLLM's server
)
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_NO_EFFECT = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key")  # keys without effect
# key -> its accepted values, which change nothing; any other value is an error
_ONLY: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "function_call": ("none", "auto"),
}
_OF_CHAT = (  # keys that only a chat may have
    *("messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice"),
    *("parallel_tool_calls", "modalities", "function_call"),
)
_OF_TEXT = ("prompt", "suffix")  # keys that only a completion may have


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request body. The prompt's type and the output format have been checked; other values have not."""

    messages: Any  # the messages of a chat; None for a completion
    prompt: str | list[int] | None  # the prompt of a completion; None for a chat
    sampling: dict[str, Any]  # sampling parameters that the body sets, named as in `SamplingParams`
    output_format: OutputFormat | None = None


def read_request(url: str, body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request body. A key with the value null counts as missing.

    Raises a UserError that names the unknown, unsupported or wrong key.
    """
    if url not in ENDPOINTS:
        raise UserError(f"url {url!r} is not supported; known: {', '.join(ENDPOINTS)}")
    given = {name: value for name, value in body.items() if value is not None}
    foreign = _OF_TEXT if url == CHAT else _OF_CHAT
    known = {*_SAME, *_RENAMED, *_NO_EFFECT, *_ONLY, *_OF_CHAT, *_OF_TEXT, "logprobs"} - {*foreign}
    for name, value in given.items():
        if name not in known:
            raise UserError(f"body: {name} is not supported; {suggestion(name, sorted(known - {*_ONLY}))}")
        if name == "tools" and value != []:
            raise UserError("body: tools are not supported here: put them into a column that input.tools names")
        if name in _ONLY and not is_neutral(name, value, _ONLY):
            raise UserError(f"body: {name} = {value!r} is not supported: leave it out")
    if not isinstance(given.get("model", ""), str):
        raise UserError("body: model must be text")
    sampling = {name: given[name] for name in _SAME if name in given}
    for name, ours in _RENAMED.items():
        if name in given:
            if ours in sampling and sampling[ours] != given[name]:
                raise UserError("body: max_tokens and max_completion_tokens differ; give one")
            sampling[ours] = given[name]
    logprobs = _chat_logprobs(given) if url == CHAT else given.get("logprobs")
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    if url == TEXT:
        return CompletionRequest(None, _prompt(given.get("prompt")), sampling)
    if "messages" not in given:
        raise UserError("body: messages is missing")
    return CompletionRequest(given["messages"], None, sampling, _form(given.get("response_format", {})))


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    """Return how many of the likeliest tokens to report at each position; None: report no log-probabilities."""
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise UserError(f"body: logprobs = {wanted!r}: must be true or false in a chat")
    if not wanted and body.get("top_logprobs", 0) != 0:
        raise UserError("body: top_logprobs needs logprobs: true")
    return body.get("top_logprobs", 0) if wanted else None


def _form(given: Any) -> OutputFormat | None:
    """Return the checked output format that a `response_format` asks for; None for plain text."""
    kind = given.get("type", "text") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_schema", '{"type": "object"}')
    if kind != "json_schema":
        raise UserError("body: response_format.type must be text, json_object or json_schema")
    named = given.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise UserError("body: response_format.json_schema.schema must be an object")
    form = OutputFormat.of({"json_schema": named["schema"]})
    form.check()
    return form


def _prompt(prompt: Any) -> str | list[int]:
    if prompt is None:
        raise UserError("body: prompt is missing")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise UserError("body: prompt must be one text or one list of token ids: send one line or request for each prompt")
