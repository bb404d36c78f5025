"""A Generator on vLLM answers rows as one on the builtin engine does, features of a row included."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import torch
import vllm_cases as cases
from safetensors.torch import load_file, save_file

from actors.answers import Answer, Prompt
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.engine.model.tokenizer import difference
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import NOT_NUMBERS
from actors.generator import Generator
from actors.settings import EngineSettings
from actors.vllm.engine import _runs, check_options

TEXTS = [
    "name[Alimentum], area[city centre]",
    "name[The Eagle], food[French]",
    "name[Zizzi], priceRange[cheap]",
    "The Eagle serves",
    "a",
]
SCHEMA = {"type": "object", "properties": {"area": {"enum": ["city", "river"]}}, "required": ["area"]}
ROWS: dict[str, dict[str, Any]] = {  # fields of `Prompt`
    "free": {},
    "stop string": {"sampling": {"stop": ["a", "e"], "min_new_tokens": 3}},
    "stop token": {"sampling": {"stop_token_ids": list(range(30, 90)), "min_new_tokens": 2}},
    "penalties": {"sampling": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}},
    "all tokens": {"sampling": {"ignore_eos": True, "max_new_tokens": 30}},
    "one token": {"sampling": {"max_new_tokens": 1}},
    "likeliest": {"sampling": {"temperature": 0.7, "top_k": 1}},
    "labels": {"choices": ["French food", "French", "cheap", "centre"]},
    "schema": {"output_format": OutputFormat.of({"json_schema": SCHEMA}), "sampling": {"max_new_tokens": 60}},
    "regex": {"output_format": OutputFormat.of({"regex": "(name|food)[ab]{2,4}"})},
    "grammar": {"output_format": OutputFormat.of({"grammar": 'start: "Eagle" | "Zizzi" [ab]\nab: /[ab]+/ "."'})},
    "cut off": {"output_format": OutputFormat.of({"regex": "[ab]{40,}"})},
    "too long": {"ids": [5] * 250},
    "outside": {"sampling": {"stop_token_ids": [10**6]}},
}
SETTINGS: dict[str, Any] = {
    "schedule": {"speedup": 2, "horizon": 8},
    "unadapted": True,
    "sampling": {"max_new_tokens": 20},
    "dtype": "float32",
    "cache_bytes": 2**27,
    "max_batch": 4,
}
FULL = ScheduleSpec().build(cases.LAYERS)


def prompts(generator: Generator) -> list[Prompt]:
    """Each kind of row with each text."""
    texts = [generator.builder.prompt(text) for text in TEXTS]
    return [
        replace(prompt, row=row, **changes)
        for row, changes in enumerate(ROWS.values())
        for prompt in (texts if "ids" not in changes else texts[:1])
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer_config.json names a class that cuts texts otherwise than tokenizer.json."""
    made = cases.text_checkpoint(tmp_path_factory.mktemp("text"))
    cases.name_tokenizer(made, "GPT2Tokenizer")
    assert difference(made) is not None
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[Answer]]:
    """The builtin engine's answers, at 2x and at 1x."""
    generator = Generator(EngineSettings(str(folder), **SETTINGS, device="cpu"))
    rows = prompts(generator)
    return {"2x": generator.answer(rows), "1x": generator.at(FULL).answer(rows)}


@pytest.fixture(scope="module")
def generator(folder: Path, wanted: Any) -> Iterator[Generator]:
    made = Generator(EngineSettings(str(folder), **SETTINGS, vllm={"block_size": cases.BLOCK, "enforce_eager": True}))
    yield made
    made.engine.close()


@pytest.mark.parametrize("speed", ["2x", "1x"])
def test_every_kind_of_row_has_the_library_engines_answer(
    generator: Generator, wanted: dict[str, list[Answer]], speed: str
) -> None:
    chosen = generator if speed == "2x" else generator.at(FULL)
    chosen.take_stats()
    answers = chosen.answer(prompts(generator))
    for got, expected in zip(answers, wanted[speed], strict=True):
        if expected.choice_probability is not None:
            assert got.choice_probability == pytest.approx(expected.choice_probability, rel=1e-3)
        assert replace(got, choice_probability=None) == replace(expected, choice_probability=None)
    kinds = {answer.finish_reason for answer in answers}
    assert kinds == {"stop", "length", "error"}
    stats = chosen.take_stats()
    assert stats.generated_tokens == sum(answer.generated_tokens for answer in answers)
    mean = stats.layer_steps / stats.decode_steps
    assert mean == cases.LAYERS if speed == "1x" else mean < cases.LAYERS
    assert stats.decode_seconds > 0


def test_samples_follow_from_seed_and_row(generator: Generator) -> None:
    sampling = {"temperature": 0.9, "n": 3, "seed": 5}
    [first, second, *_] = [replace(prompt, row=3, sampling=sampling) for prompt in prompts(generator)]
    answers = generator.answer([first, second])
    assert [(answer.row, answer.sample_index) for answer in answers] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({answer.generated_text for answer in answers[:3]}) == 3
    assert [answer.token_ids for answer in generator.answer([second])] == [answer.token_ids for answer in answers[3:]]
    other = generator.answer([replace(first, sampling={**sampling, "seed": 6})])
    assert [answer.token_ids for answer in other] != [answer.token_ids for answer in answers[:3]]


def test_logprobs_are_those_of_the_model(generator: Generator) -> None:
    generator.builder.has_logprobs = True
    [prompt, *_] = [replace(one, sampling={"logprobs": 2, "max_new_tokens": 5}) for one in prompts(generator)]
    [answer] = generator.answer([prompt])
    assert answer.logprobs is not None
    assert [token["token_id"] for token in answer.logprobs] == answer.token_ids
    for token in answer.logprobs:  # greedy: each token is the likeliest one
        assert len(token["top"]) == 2
        assert token["top"][0]["token_id"] == token["token_id"]
        assert 0 > token["logprob"] == token["top"][0]["logprob"] > token["top"][1]["logprob"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sampling": {"temperature": 3}}, "temperature = 3: engine vllm allows at most 2"),
        (
            {"sampling": {"logprobs": 1}, "choices": ["French", "cheap"]},
            "engine vllm cannot combine log-probabilities with choices or output_format: leave one of them out",
        ),
    ],
)
def test_a_row_that_vllm_cannot_answer_is_an_error_and_costs_no_other(
    generator: Generator, changes: dict[str, Any], error: str
) -> None:
    generator.builder.has_logprobs = True
    [first, second, *_] = prompts(generator)
    answers = generator.answer([replace(first, **changes), second])
    assert [answer.error for answer in answers] == [error, None]
    assert answers[1].generated_text


def test_calls_share_steps_and_an_error_ends_all(generator: Generator) -> None:
    rows = prompts(generator)[:5]
    others = []
    first = generator.begin(rows, on_drain=lambda: others.append(generator.begin(rows)))
    generator.run(first)
    [second] = others
    in_flight = generator.engine.vllm.engine_core.engine_core.scheduler.running  # type: ignore[attr-defined]
    assert any(request.num_output_tokens for request in in_flight)  # begun in the first one's steps
    generator.run(second)
    assert generator.finish(first) == generator.finish(second)
    failing = generator.begin(rows)
    step, generator.engine.vllm.step = generator.engine.vllm.step, lambda: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        generator.run(failing)
    generator.engine.vllm.step = step  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        generator.finish(failing)
    first, queued = generator.begin(rows), generator.begin(rows, on_batch=lambda rows: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        generator.run(first)
    generator.run(queued)  # ends, although the call never began
    with pytest.raises(ZeroDivisionError):
        generator.finish(queued)
    assert [answer.error for answer in generator.answer(rows)] == [None] * 5


def test_a_row_that_vllm_ends_is_reported_once_and_ends_at_once_with_nan(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens before the NaN are kept, as those of a row with a stop string, which is reported at each step."""
    [prompt, *_] = prompts(generator)
    whole = {"max_new_tokens": 20, "ignore_eos": True}
    rows = [replace(prompt, row=row, sampling={**whole, **more}) for row, more in enumerate([{}, {"stop": ["@@"]}])]
    loaded = generator.engine.loaded  # type: ignore[attr-defined]
    take, step, tokens, reports = loaded._take_output, loaded.vllm.step, Counter[str](), Counter[str]()
    nan_at = 0

    def taken() -> Any:
        outputs = take()
        for one in outputs.outputs:
            tokens[one.request_id] += 1
            if tokens[one.request_id] == nan_at:
                one.num_nans_in_logits = 1
        return outputs

    def stepped() -> Any:
        outputs = step()
        reports.update(one.request_id for one in outputs)
        return outputs

    monkeypatch.setattr(loaded, "_take_output", taken)
    monkeypatch.setattr(loaded.vllm, "step", stepped)
    right = generator.answer(rows)
    assert [answer.generated_tokens for answer in right] == [20, 20]
    assert sorted(reports.values()) == [1, 20]
    tokens.clear()
    nan_at = 4
    for answer, full in zip(generator.answer(rows), right, strict=True):
        assert (answer.error, answer.token_ids) == (NOT_NUMBERS, full.token_ids[:3])
    assert max(tokens.values()) < 8


def test_logits_that_are_not_numbers_are_row_errors(tmp_path: Path) -> None:
    """As on the builtin engine; but vLLM's kernel on CPUs also reads NaN that a row has left in the cache."""
    weights = load_file(cases.text_checkpoint(tmp_path) / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rows = [Prompt([row % 7 + 40, 9 if row % 3 == 0 else 50], "x", row) for row in range(12)]
    wanted = Generator(EngineSettings(str(tmp_path), **SETTINGS, device="cpu")).answer(rows)
    found = Generator(EngineSettings(str(tmp_path), **SETTINGS, vllm={"block_size": cases.BLOCK}))
    try:
        answers = found.answer(rows)
    finally:
        found.engine.close()
    assert {answer.error for answer in wanted} == {None, NOT_NUMBERS}
    for answer, want in zip(answers, wanted, strict=True):
        assert answer.error == NOT_NUMBERS or answer == want


def test_an_engine_runs_all_falling_schedules_whose_layers_it_holds() -> None:
    full, first, shorter, constant, other = (
        ScheduleSpec(**changes).build(cases.LAYERS)
        for changes in (
            {"depths": (4, 2)},
            {"depths": (4, 2), "prompt": "first"},
            {"depths": (3, 2), "prompt": "first"},
            {"depths": (3,), "prompt": "first"},
            {"depths": (3,), "prompt": "first", "keep_order": "even"},
        )
    )
    assert _runs(full, first) and _runs(first, shorter) and _runs(constant, constant)
    assert not any(
        _runs(*pair)
        for pair in ((first, full), (shorter, first), (first, constant), (constant, first), (constant, other))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_paralel_size": 2}, "model.vllm: vLLM has no engine argument 'tensor_paralel_size'; "),
        ({"dtype": "half"}, "model.vllm: dtype is set by model.dtype; leave it out"),
        (
            {"additional_config": {"skipdecode": {"graphs": True, "self_check": False}}},
            "model.vllm: additional_config is set by",
        ),
    ],
)
def test_wrong_engine_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_options(options)
    assert str(refused.value).startswith(message)
    check_options({"additional_config": {"skipdecode": {"graphs": True}}})


def test_the_grammar_of_labels_ends_at_the_token_that_decides() -> None:
    trie = ChoiceTrie([[5, 6, 7], [5, 8], [5, 8, 9], [4]], [2, 3], "abcd")
    assert trie.lark(2).splitlines()[1:] == [
        "start: n0",
        "n0: (<[5]> n1 | <[4]>)",
        "n1: (<[6]> | <[8]> n2)",
        "n2: (<[3]> | <[9]>)?",
    ]


def test_vllm_runs_a_checkpoint_in_8_bits_that_the_own_engine_refuses(folder: Path, tmp_path: Path) -> None:
    """In compressed-tensors' format: int8 weights with a scale per output, inputs rounded per token."""
    stored = tmp_path / "int8"
    shutil.copytree(folder, stored)
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel"},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    weights = load_file(stored / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].float().abs().amax(dim=1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name].float() / scale).round().to(torch.int8)
    save_file(weights, stored / "model.safetensors", {"format": "pt"})

    settings = {**SETTINGS, "dtype": "bfloat16", "sampling": {"max_new_tokens": 1}}
    with pytest.raises(UserError, match=r"compressed-tensors.* run only in vLLM: set model\.engine: vllm"):
        Generator(EngineSettings(str(stored), **settings, device="cpu"))
    made = Generator(EngineSettings(str(stored), **settings, vllm={"block_size": cases.BLOCK, "enforce_eager": True}))
    try:
        answers = made.answer([replace(made.builder.prompt(text), row=row) for row, text in enumerate(TEXTS)])
    finally:
        made.engine.close()
    assert all(one.error is None and one.token_ids for one in answers) and len(answers) == len(TEXTS)
