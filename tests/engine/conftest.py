from __future__ import annotations

import pytest
from models import tiny_model

from actors.engine.decoder import Decoder


@pytest.fixture(scope="session", params=["llama", "opt", "opt-post-norm"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(tiny_model(request.param))
