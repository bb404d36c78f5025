from __future__ import annotations

import pytest
from models import MODELS, tiny_model

from actors.engine.decoder import Decoder


@pytest.fixture(scope="session", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(tiny_model(request.param))
