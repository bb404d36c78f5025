"""Converts answers to response bodies of OpenAI's completion endpoints.

Sources: https://platform.openai.com/docs/api-reference/chat/object and .../completions/object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from actors.engine.constraints.output_format import KINDS as FORMATS
from actors.openai_requests import CHAT

REPLACEMENT = "\ufffd"


def response(
    url: str, answers: Sequence[Mapping[str, Any]], *, where: str = "", **named: Any
) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to one request. For the arguments see `completion_body`.

    where: text that names the request at the start of an error.
    """
    # not every answer with an error is a failure: a cut-off answer is a result
    failed = next((answer for answer in answers if answer["finish_reason"] == "error"), None)
    if failed is None:
        return 200, completion_body(url, answers, **named)
    # an invalid request has no prompt tokens, or its format fails while it is answered
    is_request = not failed["prompt_tokens"] or failed["error"].partition(": ")[0] in FORMATS
    status = 400 if is_request else 500
    return status, error_body(f"{where}{failed['error']}", status)


def completion_body(
    url: str,
    answers: Sequence[Mapping[str, Any]],
    *,
    key: str,
    created: int,
    model: str,
    job: str,
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
    """
    is_chat = url == CHAT
    prompt, completion = answers[0]["prompt_tokens"], sum(answer["generated_tokens"] for answer in answers)
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
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "system_fingerprint": job,
    }


def shown_logprobs(url: str, tokens: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Convert log-probabilities to the format of endpoint `url`."""
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
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


def _entry(token: Mapping[str, Any]) -> dict[str, Any]:
    # U+FFFD means that the token is only a part of a character, so its bytes are unknown
    spelled = None if REPLACEMENT in token["token"] else list(token["token"].encode())
    return {"token": token["token"], "logprob": token["logprob"], "bytes": spelled}


def error_body(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error response with an HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
