"""Answers as bodies of OpenAI's completion endpoints.

Sources: https://platform.openai.com/docs/api-reference/chat/object and .../completions/object
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.openai_requests import CHAT

Decode = Callable[[int], str]  # a token's text
REPLACEMENT = "\ufffd"


def completion_body(
    url: str, answers: Sequence[Mapping[str, Any]], decode: Decode, *, key: str, created: int, model: str, job: str
) -> dict[str, Any]:
    """The body of a response.

    Args:
        url: the endpoint, one of `ENDPOINTS`.
        answers: to one request, at least one; fields of `Answer`, `logprobs` as in `TokenLogprob.to_dict`.
        decode: of the model's tokenizer, for log-probabilities.
        key: that ids are made of.
        created: seconds since 1970.
        model: its name.
        job: what the answers depend on besides the request, as text.
    """
    is_chat = url == CHAT
    choices = []
    for answer in answers:
        text, tokens = answer["generated_text"], answer.get("logprobs")
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
        shown = None if tokens is None else _chat_logprobs(tokens, decode) if is_chat else _logprobs(tokens, decode)
        choices.append(
            {
                "index": answer["sample_index"],
                **content,
                "logprobs": shown,
                "finish_reason": answer["finish_reason"],
            }
        )
    prompt, completion = answers[0]["prompt_tokens"], sum(answer["generated_tokens"] for answer in answers)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "system_fingerprint": job,
    }


def error_body(message: str, *, is_request: bool) -> dict[str, Any]:
    """The body of a refusal. is_request: the request is at fault, not the server."""
    kind = "invalid_request_error" if is_request else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _chat_logprobs(tokens: Sequence[Mapping[str, Any]], decode: Decode) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode(token)
        # a token may hold a part of a character, whose bytes its text does not show
        spelled = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelled}

    content = [
        {
            **entry(token["token_id"], token["logprob"]),
            "top_logprobs": [entry(other["token_id"], other["logprob"]) for other in token["top"]],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _logprobs(tokens: Sequence[Mapping[str, Any]], decode: Decode) -> dict[str, Any]:
    texts = [decode(token["token_id"]) for token in tokens]
    tops: list[dict[str, float]] = []
    for token in tokens:
        top: dict[str, float] = {}
        for other in token["top"]:
            top.setdefault(decode(other["token_id"]), other["logprob"])
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops,
        "text_offset": [sum(map(len, texts[:position])) for position in range(len(texts))],
    }
