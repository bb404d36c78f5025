from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from http_server import Running, running
from tiny_checkpoint import tiny_checkpoint

TEMPLATE = """{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer, chat template and schedule."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def served(chat_checkpoint: Path) -> Iterator[Running]:
    """The tiny model behind a real socket, in this process."""
    with running(chat_checkpoint) as server:
        yield server


@pytest.fixture(scope="session")
def http() -> Iterator[httpx2.Client]:
    """One client for all requests: a new one reads the certificates of this machine."""
    with httpx2.Client(timeout=600) as client:
        yield client


@pytest.fixture(scope="session")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
