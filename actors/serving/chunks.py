"""Parts of a streamed answer, as server-sent events.

Source: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.openai_answers import shown_calls, shown_logprobs, usage
from actors.openai_requests import CHAT
from actors.serving.texts import Part

DONE = b"data: [DONE]\n\n"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(values: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {_json(values)}\n\n".encode()


class Chunks:
    """The chunks of one call.

    Args:
        url: Its endpoint.
        key: That its id is made of.
        created: Seconds since 1970.
        model: Its name.
        usage: Whether the last chunk counts tokens; then all others have `usage` null.
    """

    def __init__(self, url: str, *, key: str, created: int, model: str, usage: bool) -> None:
        self._url, self._is_chat, self._key = url, url == CHAT, key
        self._frame: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{key}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        if usage:
            self._frame["usage"] = None
        self._head = f'data: {_json(self._frame)[:-1]},"choices":['  # of every event but the last

    def first(self, index: int) -> bytes:
        """The chunk before a chat's first text, with the role; nothing for a text."""
        if not self._is_chat:
            return b""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def part(
        self,
        index: int,
        part: Part,
        logprobs: Sequence[Mapping[str, Any]] | None,
        offset: int,
        done: Mapping[str, Any] | None,
    ) -> bytes:
        """A part of answer `index`.

        Args:
            index: Number of the answer.
            part: Its text and thinking.
            logprobs: Of its tokens; None: they are not asked for.
            offset: Characters of text before it.
            done: The answer, with its last part; see `completion_body`.
        """
        shown = shown_logprobs(self._url, logprobs, offset)
        thinking = {"reasoning_content": part.thinking} if part.thinking else {}
        finish = None if done is None else done["finish_reason"]
        if not self._is_chat:
            return self._event(index, {"text": part.text, **thinking}, shown, finish)
        delta: dict[str, Any] = {**({"content": part.text} if part.text else {}), **thinking}
        if done is not None and done["tool_calls"]:
            calls = shown_calls(done["tool_calls"], f"{self._key}-{index}")
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            finish = "tool_calls"
        return self._event(index, {"delta": delta}, shown, finish)

    def usage(self, prompt: int, completion: int) -> bytes:
        """The chunk that counts tokens."""
        return event({**self._frame, "choices": [], "usage": usage(prompt, completion)})

    def _event(self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return f"{self._head}{_json(choice)}]}}\n\n".encode()
