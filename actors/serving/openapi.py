"""Schemas of request bodies, for the server's OpenAPI document."""

from __future__ import annotations

from typing import Any

_NUMBER, _COUNT, _FLAG, _TEXT = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_BOTH: dict[str, dict[str, Any]] = {
    "model": _TEXT,
    "max_tokens": {**_COUNT, "minimum": 0, "description": "most new tokens"},
    "temperature": {**_NUMBER, "minimum": 0, "description": "0 is greedy"},
    "top_p": {**_NUMBER, "maximum": 1},
    "top_k": {**_COUNT, "minimum": 0},
    "min_p": {**_NUMBER, "minimum": 0, "maximum": 1},
    "repetition_penalty": _NUMBER,
    "presence_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "frequency_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stop_token_ids": _IDS,
    "ignore_eos": _FLAG,
    "min_tokens": {**_COUNT, "minimum": 0},
    "n": {**_COUNT, "minimum": 1, "description": "answers to each prompt"},
    "seed": {**_COUNT, "minimum": 0},
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}, "additionalProperties": False},
    "speed": {**_NUMBER, "minimum": 1, "description": "nominal speed-up of this request's tokens"},
    "user": _TEXT,
}


def text_schema() -> dict[str, Any]:
    """Of a body for /v1/completions."""
    one: list[dict[str, Any]] = [_TEXT, _IDS]
    prompt = {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}]}
    echo = {**_FLAG, "description": "give the prompt back too; without logprobs"}
    own = {"prompt": prompt, "echo": echo, "logprobs": {**_COUNT, "minimum": 0}}
    return _object({**own, **_BOTH}, "prompt")


def chat_schema() -> dict[str, Any]:
    """Of a body for /v1/chat/completions."""
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"type": ["string", "null"]},
            "reasoning_content": _TEXT,
            "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "of an assistant"},
            "tool_call_id": {**_TEXT, "description": "of a tool's answer"},
        },
        "required": ["role"],
    }
    function = {
        "type": "object",
        "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
        "required": ["name"],
    }
    tool = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    }
    choice = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}
    form = {"type": "object", "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}}
    own = {
        "messages": {"type": "array", "items": message, "minItems": 1},
        "max_completion_tokens": {**_COUNT, "minimum": 1},
        "logprobs": _FLAG,
        "top_logprobs": {**_COUNT, "minimum": 0},
        "response_format": form,
        "tools": {"type": "array", "items": tool, "description": "functions that the answer may call"},
        "tool_choice": {**choice, "description": "which of them it must call"},
        "parallel_tool_calls": {"enum": [True]},
    }
    return _object({**own, **_BOTH}, "messages")


def _object(properties: dict[str, Any], required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
