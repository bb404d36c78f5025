"""Converts answers to response bodies of OpenAI's completion endpoints.

Sources: https://platform.openai.com/docs/api-reference/chat/object and .../completions/object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from actors.openai_requests import CHAT

REPLACEMENT = "\ufffd"


def completion_body(
    url: str,
    answers: Sequence[Mapping[str, Any]],
    *,
    key: str,
    created: int,
    model: str,
    job: str,
    prompt_tokens: int | None = None,
) -> dict[str, Any]:
    """Build the response body from the answers to one request.

    Args:
        url: the endpoint, one of `ENDPOINTS`.
        answers: at least one answer, with the fields of `Answer`. Thinking becomes `reasoning_content`, the name that
            the servers of DeepSeek and vLLM use.
        key: text that the ids in the body contain.
        created: seconds since 1970.
        model: name of the model.
        job: fingerprint of the job, or of this start of the server.
        prompt_tokens: number of tokens of all prompts; needed if there are several prompts.
    """
    is_chat = url == CHAT
    choices = []
    for answer in answers:
        text, index = answer["generated_text"], answer["sample_index"]
        content = {"role": "assistant", "content": text, "refusal": None} if is_chat else {"text": text}
        if answer.get("reasoning") is not None:
            content["reasoning_content"] = answer["reasoning"]
        finish = {
            "logprobs": shown_logprobs(url, answer.get("logprobs")),
            "finish_reason": answer["finish_reason"],
        }
        choices.append({"index": index, **({"message": content} if is_chat else content), **finish})
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(
            answers[0]["prompt_tokens"] if prompt_tokens is None else prompt_tokens,
            sum(answer["generated_tokens"] for answer in answers),
        ),
        "system_fingerprint": job,
    }


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Return OpenAI's `usage` object. prompt, completion: numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def shown_logprobs(url: str, tokens: Sequence[Mapping[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
    """Convert log-probabilities to the format of endpoint `url`. offset: number of characters before `tokens`."""
    if tokens is None:
        return None
    if url == CHAT:
        content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token["top"]]} for token in tokens]
        return {"content": content, "refusal": None}
    texts = [token["token"] for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in tokens],
        # reversed, so that the likeliest of several tokens with equal texts is kept: `top` begins with the likeliest
        "top_logprobs": [{one["token"]: one["logprob"] for one in reversed(token["top"])} for token in tokens],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def _entry(token: Mapping[str, Any]) -> dict[str, Any]:
    # U+FFFD means that the token is only a part of a character, so its bytes are unknown
    spelled = None if REPLACEMENT in token["token"] else list(token["token"].encode())
    return {"token": token["token"], "logprob": token["logprob"], "bytes": spelled}


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error response with an HTTP status. code: error code for programs."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
