"""Messages of a request as a prompt, as jobs write them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engine.errors import UserError
from pipeline.prepare.chat import Chat, read_messages
from pipeline.prepare.chat_template import render_chat


def render(tokenizer: Any, messages: Any, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, int]:
    """The prompt of a chat that offers tools, and how many control tokens are marked, see `ControlTokens.prompt`.

    Raises UserError for messages that are wrong or that the chat template refuses.
    """
    if tokenizer.chat_template is None:
        raise UserError("this model has no chat template; use /v1/completions")
    return render_chat(tokenizer, Chat(now=time.time()), read_messages(messages), tools)
