"""Token ids that the tokenizer does not have, of a padded vocabulary, are never sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint
from transformers import AutoModelForCausalLM

from actors.engine.model.loading import load_tokenizer
from actors.generator import Generator

PADDING = 33


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same whose vocabulary is padded with tokens that would nearly always be the likeliest."""
    plain, padded = (tiny_checkpoint(tmp_path_factory.mktemp(name)) for name in ("plain", "padded"))
    for folder, extra in ((plain, 0), (padded, PADDING)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        tokens = model.config.vocab_size
        embeddings = torch.cat([model.get_input_embeddings().weight, 40 * torch.randn(extra, 32)])
        model.resize_token_embeddings(tokens + extra, mean_resizing=False)
        model.get_input_embeddings().weight.data = embeddings
        head = embeddings if request.param else torch.cat([model.lm_head.weight[:tokens], embeddings[tokens:]])
        model.lm_head.weight = torch.nn.Parameter(head)
        model.config.tie_word_embeddings = request.param
        model.save_pretrained(folder)
    return plain, padded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sampling": {"temperature": 1.0}},
        {"sampling": {"temperature": 1.0, "top_k": 5, "logprobs": 3, "repetition_penalty": 1.2}},
        {"output_format": {"regex": "[a-z ]{3,20}"}},
        {"choices": ["cheap", "food"]},
    ],
    ids=["greedy", "sampled", "narrowed", "regex", "choices"],
)
def test_answers_are_those_of_the_vocabulary_without_padding(
    checkpoints: tuple[Path, Path], dtype: str, how: dict[str, Any]
) -> None:
    batch = {"prompt": [f"a {row}" for row in range(12)]}
    plain, padded = (Generator(str(folder), dtype=dtype, device="cpu", **how) for folder in checkpoints)
    assert padded.engine.decoder.vocab_size == plain.engine.decoder.vocab_size == len(load_tokenizer(checkpoints[1]))
    expected, got = plain(batch), padded(batch)
    assert list(got["generated_text"]) == list(expected["generated_text"])
    assert list(got["generated_tokens"]) == list(expected["generated_tokens"])
    if "logprobs" in got:
        assert got["logprobs"].tolist() == expected["logprobs"].tolist()


def test_a_prompt_may_hold_tokens_of_the_padding(checkpoints: tuple[Path, Path]) -> None:
    sampling = {"repetition_penalty": 1.2, "max_new_tokens": 3}
    padded = Generator(str(checkpoints[1]), dtype="float32", device="cpu", sampling=sampling)
    alone = padded({"prompt": [[5, 6]]})["generated_text"]
    got = padded({"prompt": [[5, 6], [5, padded.engine.decoder.vocab_size, 6]]})
    assert list(got["error"]) == [None, None] and got["generated_text"][0] == alone[0]
