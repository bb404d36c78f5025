"""The actor's class on its own: a batch of columns in, the same rows with answers out. No Ray anywhere."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, LAYERS, tiny_checkpoint

from actors.generator import Generator

PROMPTS = ["a", "name[Zizzi]", "The Eagle serves", "cheap food", "name[Alimentum], area[city centre]", "b c d e f", "a"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def generator(checkpoint: Path) -> Generator:
    return make(checkpoint)


@pytest.fixture(scope="module")
def sampled(checkpoint: Path) -> Generator:
    return make(checkpoint, sampling={"max_new_tokens": NEW_TOKENS, "temperature": 1.0}, max_batch=3)


def make(checkpoint: Path, **changes: Any) -> Generator:
    settings_: dict[str, Any] = {"dtype": "float32", "device": "cpu", "sampling": {"max_new_tokens": NEW_TOKENS}}
    return Generator(str(checkpoint), **{**settings_, **changes})


def column(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def answers(generator: Generator, prompts: list[str | None]) -> list[tuple[Any, ...]]:
    done = generator({"prompt": column(prompts)})
    names = ("generated_text", "finish_reason", "prompt_tokens", "generated_tokens", "error")
    return list(zip(*(done[name].tolist() for name in names), strict=True))


def test_answers_are_added_in_the_order_of_the_rows(generator: Generator) -> None:
    batch = {"id": np.arange(len(PROMPTS)), "prompt": column(list(PROMPTS))}
    done = generator(batch)
    assert list(done) == [
        "id",
        "prompt",
        "generated_text",
        "finish_reason",
        "prompt_tokens",
        "generated_tokens",
        "mean_depth",
        "error",
    ]
    assert done["id"] is batch["id"] and done["prompt"] is batch["prompt"]
    assert all(len(values) == len(PROMPTS) for values in done.values())
    assert done["prompt_tokens"].tolist() == [len(generator.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert all(1 <= count <= NEW_TOKENS for count in done["generated_tokens"])
    assert set(done["finish_reason"]) <= {"stop", "length"} and done["error"].tolist() == [None] * len(PROMPTS)
    assert all(1 <= depth < LAYERS for depth in done["mean_depth"])
    assert len(set(done["generated_text"])) > 3
    alone = [answers(generator, [prompt])[0] for prompt in PROMPTS]
    assert answers(generator, list(PROMPTS)) == alone


def test_a_bad_row_keeps_its_place(generator: Generator) -> None:
    prompts: list[str | None] = ["a", None, "cheap food", "", "b " * 100, "b c"]
    done = answers(generator, prompts)
    assert [done[row][1:] for row in (1, 3)] == [("error", 0, 0, "prompt is null or empty")] * 2
    assert done[1][0] is None
    assert done[4][1] == "error" and done[4][4].endswith(f"leaves no room in a context of {CONTEXT}")
    good = [row for row in range(6) if row not in (1, 3, 4)]
    assert [done[row] for row in good] == answers(generator, [prompts[row] for row in good])
    assert np.isnan(generator({"prompt": column([None])})["mean_depth"]).all()


def test_nothing_to_answer(generator: Generator) -> None:
    assert answers(generator, []) == []
    assert [row[4] for row in answers(generator, [None, None])] == ["prompt is null or empty"] * 2
    generator.take_stats()
    answers(generator, [None])
    assert generator.take_stats().generated_tokens == 0


def test_a_context_that_runs_out_ends_a_row(checkpoint: Path) -> None:
    prompt = ("a " * (CONTEXT - 5)).strip()
    generator = make(checkpoint, sampling={"max_new_tokens": 40})
    ((_, reason, prompt_tokens, generated, error),) = answers(generator, [prompt])
    assert error is None and prompt_tokens < CONTEXT
    assert prompt_tokens + generated <= CONTEXT
    assert reason == "stop" or prompt_tokens + generated == CONTEXT


@given(st.lists(st.integers(0, len(PROMPTS)), max_size=4), st.permutations(range(len(PROMPTS))))
@settings(max_examples=8, deadline=None)
def test_sampled_answers_do_not_hang_on_how_rows_are_cut(sampled: Generator, cuts: list[int], order: list[int]) -> None:
    whole = answers(sampled, list(PROMPTS))
    edges = [0, *sorted(cuts), len(PROMPTS)]
    found: list[tuple[Any, ...]] = []
    for first, end in itertools.pairwise(edges):
        found += answers(sampled, [PROMPTS[row] for row in order[first:end]])
    assert found == [whole[row] for row in order]


def test_sampled_answers_follow_the_seed(checkpoint: Path, sampled: Generator) -> None:
    other = make(checkpoint, sampling={"max_new_tokens": NEW_TOKENS, "temperature": 1.0}, max_batch=3, seed=1)
    assert answers(sampled, list(PROMPTS)) == answers(sampled, list(PROMPTS))
    assert answers(other, list(PROMPTS)) != answers(sampled, list(PROMPTS))


def test_a_row_that_does_not_fit_the_cache_is_a_row_error(checkpoint: Path, generator: Generator) -> None:
    long = "name[Alimentum], area[city centre]"
    lengths = [len(generator.tokenizer(prompt)["input_ids"]) for prompt in ("a", long)]
    small, large = (generator.engine.row_bytes(length, NEW_TOKENS) for length in lengths)
    assert small < large
    tight = make(checkpoint, cache_bytes=large - 1)
    done = answers(tight, ["a", long, "b"])
    assert done[1] == (
        None,
        "error",
        lengths[1],
        0,
        f"needs {large} bytes of cache, more than the budget of {large - 1}",
    )
    assert [done[0], done[2]] == answers(generator, ["a", "b"])
    assert tight.take_stats().cache_bytes <= large - 1
    assert answers(make(checkpoint, cache_bytes=large), [long]) == answers(generator, [long])


def test_a_jobs_schedule_goes_on_top_of_the_stored_one(checkpoint: Path, generator: Generator) -> None:
    full = make(checkpoint, schedule={"speedup": 1})
    assert full({"prompt": column(["a"])})["mean_depth"].tolist() == [float(LAYERS)]
    assert generator.schedule.speedup == 2 and len(generator.schedule.depths) == 6
    with pytest.raises(ValueError, match=r"^schedule: "):
        make(checkpoint, schedule={"max_depth": LAYERS + 1})
    with pytest.raises(ValueError, match="top_p = 0"):
        make(checkpoint, sampling={"top_p": 0})
    with pytest.raises(ValueError, match="no such checkpoint folder"):
        make(checkpoint / "none")


def test_statistics_are_of_what_was_answered(generator: Generator) -> None:
    generator.take_stats()
    done = generator({"prompt": column([*PROMPTS, None])})
    stats = generator.take_stats()
    assert stats.generated_tokens == done["generated_tokens"].sum()
    assert stats.prompt_tokens == done["prompt_tokens"].sum() <= stats.padded_prompt_tokens
    assert stats.decode_steps == sum(max(count - 1, 0) for count in done["generated_tokens"])
    depths = sum(
        (count - 1) * depth
        for count, depth in zip(done["generated_tokens"], done["mean_depth"], strict=True)
        if count > 1
    )
    assert stats.layer_steps == round(depths) and stats.full_layer_steps == LAYERS * stats.decode_steps
    assert generator.take_stats().generated_tokens == 0
    assert generator.peak_memory_bytes() > 0 and generator.device_name().startswith("cpu")


def test_another_prompt_column(checkpoint: Path, generator: Generator) -> None:
    done = make(checkpoint, prompt_column="question")({"question": column(["a"]), "prompt": column([None])})
    assert done["generated_text"].tolist() == [answers(generator, ["a"])[0][0]]


def test_imports_stay_light() -> None:
    """The engine runs where neither Ray nor Arrow is, the generator in anyone's map_batches."""
    code = """
import importlib, pkgutil, sys
import actors.engine
for module in pkgutil.iter_modules(actors.engine.__path__):
    importlib.import_module(f"actors.engine.{module.name}")
found = [name for name in ("ray", "pyarrow", "pipeline") if name in sys.modules]
assert not found, f"actors.engine imports {found}"
import actors.generator
found = [name for name in ("ray", "pipeline") if name in sys.modules]
assert not found, f"actors.generator imports {found}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
