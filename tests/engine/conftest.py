from __future__ import annotations

import pytest
from tiny_models import MODELS, tiny_model

from actors.engine import scheduler
from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder


@pytest.fixture(scope="session")
def llama() -> Decoder:
    return Decoder(tiny_model("llama"))


@pytest.fixture(scope="session", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def decoder(family: str) -> Decoder:
    """As an actor on a CPU has it."""
    return fastest_decoder(tiny_model(family))


@pytest.fixture(scope="session")
def library(family: str) -> Decoder:
    """The same weights in the library's own layers, to hold `decoder` against."""
    return Decoder(tiny_model(family))


@pytest.fixture
def shared_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are enough to share a prefix."""
    monkeypatch.setattr(scheduler, "LEAST_SAVED", 1)
