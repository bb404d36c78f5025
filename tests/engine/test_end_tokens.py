"""Tokens that end an answer come from all places that name one; ids that the tokenizer lacks are never sampled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint
from transformers import AutoModelForCausalLM

from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens, settings_not_followed
from actors.engine.model.tokenizer import load_tokenizer
from actors.generator import Generator
from actors.settings import EngineSettings


def copy_of(checkpoint: Path, folder: Path, **files: dict[str, Any]) -> Path:
    """The checkpoint with keys of JSON files changed; None removes a key."""
    shutil.copytree(checkpoint, folder)
    for name, changes in files.items():
        path = folder / f"{name}.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def ends(folder: Path) -> dict[int, list[str]]:
    return end_tokens(folder, load_tokenizer(folder), 300)


def test_a_generation_config_without_the_chats_end_token_does_not_hide_it(checkpoint: Path, tmp_path: Path) -> None:
    """All rows ran to their limit and wrote the next turns."""
    folder = copy_of(checkpoint, tmp_path / "a", generation_config={"eos_token_id": 0}, config={"eos_token_id": [5]})
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"  # of a template that writes no plain text
    for content in (parts, "{{ m.content }}"):
        written = f"<sep>{{% for m in messages %}}{content} <sep>\n{{% endfor %}}"
        (folder / "chat_template.jinja").write_text(written)
        found = ends(folder)
        assert found[3] == ["the chat template"]
    assert found == {
        0: ["generation_config.json"], 5: ["config.json"], 2: ["the tokenizer"], 3: ["the chat template"]
    }  # fmt: skip
    assert Generator(EngineSettings(str(folder), dtype="float32")).engine.stop_ids == set(found)


def test_a_checkpoint_that_names_one_token_everywhere_has_that_one(checkpoint: Path) -> None:
    assert ends(checkpoint) == {2: ["generation_config.json", "config.json", "the tokenizer"]}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }} and on<sep>{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}<s>{% endfor %}",
        "<sep>{{ messages | length }}",
    ],
)
def test_a_template_that_writes_no_token_behind_an_answer_names_none(
    checkpoint: Path, tmp_path: Path, template: str
) -> None:
    folder = copy_of(checkpoint, tmp_path / "a")
    (folder / "chat_template.jinja").write_text(template)
    assert set(ends(folder)) == {2}


@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_an_end_token_outside_the_vocabulary_is_refused_by_name(checkpoint: Path, tmp_path: Path, name: str) -> None:
    folder = copy_of(checkpoint, tmp_path / "a", **{name: {"eos_token_id": [2, 300]}})
    with pytest.raises(UserError, match=rf"{name}\.json: eos_token_id: 300 lies outside the vocabulary of 300$"):
        ends(folder)


def test_an_end_token_by_name_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_of(checkpoint, tmp_path / "a", generation_config={"eos_token_id": "</s>"})
    with pytest.raises(UserError, match=r"config\.json: eos_token_id is '</s>'; it must be a token's number"):
        ends(folder)


def test_what_a_generation_config_asks_for_and_a_job_does_not_follow_is_known(checkpoint: Path, tmp_path: Path) -> None:
    asked = {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "suppress_tokens": [5], "a_key_of_the_future": 1,
        "eos_token_id": 2, "pad_token_id": 0, "transformers_version": "5.0", "top_p": None,
    }  # fmt: skip
    folder = copy_of(checkpoint, tmp_path / "a", generation_config=asked)
    left = settings_not_followed(folder, {"temperature", "max_new_tokens"})
    assert left == {"top_k": 20, "suppress_tokens": [5], "a_key_of_the_future": 1}
    assert "do_sample" in settings_not_followed(folder, ())
    assert settings_not_followed(checkpoint, ()) == {}


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
        if extra:  # a token of the padding is among the end tokens
            model.generation_config.eos_token_id = [2, tokens + 1]
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
    plain, padded = (Generator(EngineSettings(str(folder), dtype=dtype, device="cpu", **how)) for folder in checkpoints)
    assert padded.engine.decoder.vocab_size == plain.engine.decoder.vocab_size == len(load_tokenizer(checkpoints[1]))
    expected, got = plain(batch), padded(batch)
    assert list(got["generated_text"]) == list(expected["generated_text"])
    assert list(got["generated_tokens"]) == list(expected["generated_tokens"])
    if "logprobs" in got:
        assert got["logprobs"].tolist() == expected["logprobs"].tolist()


def test_a_prompt_may_hold_tokens_of_the_padding(checkpoints: tuple[Path, Path]) -> None:
    sampling = {"repetition_penalty": 1.2, "max_new_tokens": 3}
    padded = Generator(EngineSettings(str(checkpoints[1]), dtype="float32", device="cpu", sampling=sampling))
    alone = padded({"prompt": [[5, 6]]})["generated_text"]
    got = padded({"prompt": [[5, 6], [5, padded.engine.decoder.vocab_size, 6]]})
    assert list(got["error"]) == [None, None] and got["generated_text"][0] == alone[0]
