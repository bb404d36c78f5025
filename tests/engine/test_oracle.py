"""The oracle by itself: a guess saves it passes and never changes its answer."""

from __future__ import annotations

import pytest
import torch
from engine_cases import SPECS, STOP, requests, thoroughly
from oracle import oracle_logits, oracle_logits_each, tokens_of
from tiny_models import LAYERS

from actors.engine.decoder import Decoder


@pytest.mark.parametrize(("family", "spec"), [("llama", 1), ("llama", 7), ("gemma3", 3)], indirect=["family"])
def test_a_guess_changes_no_token(library: Decoder, spec: int) -> None:
    """Right, half right, wrong from its first token, too long."""
    schedule = SPECS[spec].build(LAYERS)
    for row in requests(2, seed=21, sampled=True):
        tokens = tokens_of(library, schedule, row, STOP, [])
        half = [*tokens[: len(tokens) // 2], 3, 4]
        for guess in (tokens, half, [token + 1 for token in tokens], [*tokens, 7, 8]):
            assert tokens_of(library, schedule, row, STOP, guess) == tokens


@thoroughly
def test_one_pass_gives_the_logits_of_a_pass_per_token(library: Decoder) -> None:
    schedule = SPECS[3].build(LAYERS)
    prompt, response = [5, 9, 41, 7], [11, 60, 3, 88, 20]
    each = [oracle_logits(library, schedule, prompt, response[:end]) for end in range(len(response) + 1)]
    torch.testing.assert_close(
        oracle_logits_each(library, schedule, prompt, response), torch.stack(each), rtol=1e-4, atol=1e-4
    )
