from __future__ import annotations

from collections.abc import Iterator

import pytest
from models import MODELS, tiny_model

from actors.engine import cache
from actors.engine.decoder import Decoder


@pytest.fixture(scope="module", autouse=True)
def caches_grow_often() -> Iterator[None]:
    """As they do behind the first 32 slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "GROWTH", 3)
        yield


@pytest.fixture(scope="session", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """As an actor on a CPU has it."""
    decoder = Decoder(tiny_model(request.param))
    decoder.prepare_for_cpu()
    return decoder
