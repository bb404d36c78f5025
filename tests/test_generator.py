"""The actor's class on its own: a batch of columns in, the same rows with answers out. No Ray anywhere."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import CONTEXT, LAYERS

from actors.answers import ANSWER_TYPES, Prompt
from actors.engine.errors import UserError
from actors.generator import Generator
from actors.settings import EngineSettings

PROMPTS = ["a", "name[Zizzi]", "The Eagle serves", "cheap food", "name[Alimentum], area[city centre]", "b c d e f", "a"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def generator(checkpoint: Path) -> Generator:
    return make(checkpoint)


@pytest.fixture(scope="module")
def sampled(checkpoint: Path) -> Generator:
    return make(checkpoint, sampling={"max_new_tokens": NEW_TOKENS, "temperature": 1.0}, max_batch=3)


def make(checkpoint: Path, **changes: Any) -> Generator:
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu", "sampling": {"max_new_tokens": NEW_TOKENS}}
    return Generator(EngineSettings(str(checkpoint), **how | changes))


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
    names = "id prompt sample_index generated_text finish_reason prompt_tokens generated_tokens mean_depth error"
    assert list(done) == names.split()
    assert done["id"].tolist() == batch["id"].tolist() and done["prompt"].tolist() == PROMPTS
    assert all(len(values) == len(PROMPTS) for values in done.values())
    assert done["prompt_tokens"].tolist() == [len(generator.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert all(1 <= count <= NEW_TOKENS for count in done["generated_tokens"])
    assert set(done["finish_reason"]) <= {"stop", "length"} and done["error"].tolist() == [None] * len(PROMPTS)
    assert all(1 <= depth < LAYERS for depth in done["mean_depth"])
    assert len(set(done["generated_text"])) > 3
    alone = [answers(generator, [prompt])[0] for prompt in PROMPTS]
    assert answers(generator, list(PROMPTS)) == alone


def test_a_bad_row_keeps_its_place(checkpoint: Path, generator: Generator) -> None:
    prompts: list[str | None] = ["a", None, "cheap food", "", "b " * 100, "b c"]
    done = answers(generator, prompts)
    assert [done[row][1:] for row in (1, 3)] == [("error", 0, 0, "prompt is null or empty")] * 2
    assert done[1][0] is None
    assert done[4][1] == "error" and done[4][4].endswith(f"leaves no room in a context of {CONTEXT}")
    good = [row for row in range(6) if row not in (1, 3, 4)]
    assert [done[row] for row in good] == answers(generator, [prompts[row] for row in good])
    assert generator({"prompt": column([None])})["mean_depth"].tolist() == [None]
    one_token = make(checkpoint, sampling={"max_new_tokens": 1})({"prompt": column(["a"])})  # without a decode step
    assert one_token["generated_tokens"].tolist() == [1] and one_token["mean_depth"].tolist() == [None]


def test_another_schedule_leaves_the_generator_unchanged(checkpoint: Path) -> None:
    generator = make(checkpoint, schedule={"speedup": 1.0})
    before = answers(generator, PROMPTS)
    faster = make(checkpoint, schedule={"speedup": 2.0})
    other = generator.at(faster.schedule, max_batch=2)
    assert answers(other, PROMPTS) == answers(faster, PROMPTS) != before
    assert other.engine.decoder is generator.engine.decoder
    assert (other.settings.max_batch, generator.settings.max_batch) == (2, 64)
    assert answers(generator, PROMPTS) == before


@pytest.mark.parametrize("frame", [False, True])
def test_tables_come_back_as_tables_with_types_that_do_not_hang_on_the_values(
    generator: Generator, frame: bool
) -> None:
    times = pa.array([1, None], pa.timestamp("ns", "UTC"))
    table = pa.table({"prompt": ["a", None], "at": times})
    done = generator(table.to_pandas() if frame else table)
    expected = generator({"prompt": column(["a", None])})
    assert done["at"].to_pylist() == times.to_pylist() and done.schema.field("at").type == times.type
    for name, kind in ANSWER_TYPES.items():
        assert (done.schema.field(name).type, done[name].to_pylist()) == (kind, expected[name].tolist())
    assert generator(table.slice(0, 1)).schema == generator(table.slice(1)).schema == generator(table.slice(2)).schema


def test_a_column_of_the_batch_is_never_replaced(generator: Generator) -> None:
    with pytest.raises(UserError, match="the batch has a column 'error', which is the name of an answer column"):
        generator({"prompt": column(["a"]), "error": column([None])})


def test_nothing_to_answer(generator: Generator) -> None:
    generator.take_stats()
    assert answers(generator, []) == []
    assert [row[4] for row in answers(generator, [None, None])] == ["prompt is null or empty"] * 2
    assert generator.take_stats().generated_tokens == 0


@given(st.lists(st.integers(0, len(PROMPTS)), max_size=4), st.permutations(range(len(PROMPTS))))
@settings(max_examples=8, deadline=None)
def test_sampled_answers_do_not_hang_on_how_rows_are_cut(sampled: Generator, cuts: list[int], order: list[int]) -> None:
    whole = answers(sampled, list(PROMPTS))
    edges = [0, *sorted(cuts), len(PROMPTS)]
    found: list[tuple[Any, ...]] = []
    for first, end in itertools.pairwise(edges):
        found += answers(sampled, [PROMPTS[row] for row in order[first:end]])
    assert found == [whole[row] for row in order]


def test_neither_the_scheduler_nor_unwanted_logprobs_change_an_answer(checkpoint: Path, sampled: Generator) -> None:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0}
    other = make(checkpoint, sampling=sampling, max_batch=3, scheduler="refill", cumulative_logprob=True)
    prompts = [*PROMPTS, None, *PROMPTS]
    assert answers(other, prompts) == answers(sampled, prompts)
    assert other.take_stats().batches < sampled.take_stats().batches
    (logprob,) = other({"prompt": column(["a"])})["cumulative_logprob"]
    assert logprob < 0 and "cumulative_logprob" not in sampled({"prompt": column(["a"])})


def test_a_row_that_does_not_fit_the_cache_is_a_row_error(checkpoint: Path, generator: Generator) -> None:
    long = "name[Alimentum], area[city centre]"
    lengths = [len(generator.tokenizer(prompt)["input_ids"]) for prompt in ("a", long)]
    small, large = (generator.engine.row_bytes(length, NEW_TOKENS) for length in lengths)
    assert small < large
    tight = make(checkpoint, cache_bytes=large - 1)
    done = answers(tight, ["a", long, "b"])
    reason = f"the row needs {large} bytes of KV cache, but the budget is {large - 1}: "
    assert done[1][:4] == (None, "error", lengths[1], 0) and done[1][4].startswith(reason)
    assert [done[0], done[2]] == answers(generator, ["a", "b"])
    assert tight.take_stats().cache_bytes <= large - 1
    assert answers(make(checkpoint, cache_bytes=large), [long]) == answers(generator, [long])


def test_a_jobs_schedule_goes_on_top_of_the_stored_one(checkpoint: Path, generator: Generator, tmp_path: Path) -> None:
    full = make(checkpoint, schedule={"speedup": 1})
    assert full({"prompt": column(["a"])})["mean_depth"].tolist() == [float(LAYERS)]
    assert generator.schedule.speedup == 2 and len(generator.schedule.depths) == 6
    with pytest.raises(ValueError, match=r"^schedule: "):
        make(checkpoint, schedule={"max_depth": LAYERS + 1})
    with pytest.raises(ValueError, match=r"not adapted to this schedule .*another keep_order.* or pass unadapted=True"):
        make(checkpoint, schedule={"keep_order": "early_exit"})
    assert make(checkpoint, schedule={"keep_order": "early_exit"}, unadapted=True).schedule.keep_order == (0, 1, 2, 3)
    with pytest.raises(UserError, match=r"^schedule: unknown key 'speed'; did you mean speedup"):
        make(checkpoint, schedule={"speed": 2})
    with pytest.raises(UserError, match=r"^schedule: speedup = '2': must be a finite number"):
        make(checkpoint, schedule={"speedup": "2"})
    with pytest.raises(ValueError, match="top_p = 0"):
        make(checkpoint, sampling={"top_p": 0})
    with pytest.raises(ValueError, match="no such checkpoint folder"):
        make(checkpoint / "none")
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"^{folder}: the tokenizer cannot be loaded: [A-Za-z]+: .+$"):
        make(folder)


def test_statistics_are_of_what_was_answered(generator: Generator) -> None:
    generator.take_stats()
    done = generator({"prompt": column([*PROMPTS, None])})
    stats = generator.take_stats()
    assert stats.generated_tokens == done["generated_tokens"].sum()
    twice = len(generator.tokenizer("a")["input_ids"])  # a prompt that comes twice is computed once
    assert stats.shared_prompt_tokens == twice
    assert stats.prompt_tokens == done["prompt_tokens"].sum() - twice <= stats.padded_prompt_tokens
    assert stats.decode_steps == sum(max(count - 1, 0) for count in done["generated_tokens"])
    depths = sum(
        (count - 1) * depth
        for count, depth in zip(done["generated_tokens"], done["mean_depth"], strict=True)
        if count > 1
    )
    assert stats.layer_steps == round(depths) and stats.full_layer_steps == LAYERS * stats.decode_steps
    assert generator.take_stats().generated_tokens == 0
    assert generator.peak_memory_bytes() > 0 and generator.device_name().startswith("cpu")


def whole_text(generator: Generator, prompt: str) -> str:
    text = answers(generator, [prompt])[0][0]
    assert isinstance(text, str) and len(text) > 6
    return text


def test_a_stop_string_cuts_the_text_wherever_the_tokens_lie(generator: Generator, checkpoint: Path) -> None:
    whole = whole_text(generator, "cheap food")
    for start in range(1, len(whole) - 3):
        stop = whole[start : start + 3]
        cut = make(checkpoint, sampling={"max_new_tokens": NEW_TOKENS, "stop": [stop, "never there"]})
        ((text, reason, _, count, _),) = answers(cut, ["cheap food"])
        assert text == whole[: whole.index(stop)].strip() and reason == "stop"
        assert count <= answers(generator, ["cheap food"])[0][3]


def test_a_special_token_may_be_a_stop_string(generator: Generator, checkpoint: Path) -> None:
    """It decodes to nothing, so no text holds it."""
    free = make(checkpoint, sampling={"max_new_tokens": 40, "ignore_eos": True, "temperature": 2.0})
    ended = make(
        checkpoint, sampling={"max_new_tokens": 40, "ignore_eos": True, "temperature": 2.0, "stop": ["</s>", "<sep>"]}
    )
    special = {1, 2, 3} - {ended.tokenizer.bos_token_id}
    rows = prompts(free, [f"a {row}" for row in range(40)])
    pairs = list(zip(free.answer(rows), ended.answer(rows), strict=True))
    assert any(special & set(whole.token_ids or ()) for whole, _ in pairs)
    for whole, cut in pairs:
        assert whole.token_ids is not None
        first = next((place for place, token in enumerate(whole.token_ids) if token in special), None)
        assert cut.token_ids == (whole.token_ids if first is None else whole.token_ids[: first + 1])


def prompts(generator: Generator, texts: list[str], **changes: Any) -> list[Prompt]:
    return [Prompt(generator.tokenizer(text)["input_ids"], "f", row, **changes) for row, text in enumerate(texts)]


def test_a_rows_own_parameters_go_on_top_of_the_jobs(generator: Generator, checkpoint: Path) -> None:
    (plain,) = generator.answer(prompts(generator, ["b c"]))
    second = plain.token_ids[1]
    own: list[dict[str, Any]] = [{}, {"max_new_tokens": 3}, {"stop_token_ids": [second]}]
    own += [{"stop_token_ids": [second], "min_new_tokens": 4}, {"temperature": 1.5, "n": 3}]
    own += [{"temperatur": 1.5}, {"n": 2}, {"logprobs": 2}, {"stop_token_ids": [10**6]}, {"top_p": 0.0}]
    [row] = prompts(generator, ["b c"])
    done = generator.answer([replace(row, row=number, sampling=sampling) for number, sampling in enumerate(own)])
    assert [one.row for one in done] == [0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9]
    assert [one.sample_index for one in done if one.row == 4] == [0, 1, 2]
    assert done[0].token_ids == plain.token_ids and done[1].token_ids == plain.token_ids[:3]
    assert done[2].token_ids == plain.token_ids[:2] and done[2].finish_reason == "stop"
    decoded = generator.tokenizer.decode(plain.token_ids[:1], skip_special_tokens=True)
    assert done[2].generated_text == decoded.strip()  # without the token that stopped it
    assert done[3].generated_tokens >= 4
    assert len({tuple(one.token_ids) for one in done[4:7]}) > 1
    errors = {one.row: one.error for one in done if one.error}
    assert errors == {
        5: "sampling: unknown key temperatur; did you mean temperature?",
        6: "sampling: n = 2: needs a temperature above 0: greedy answers are all the same",
        7: "sampling: logprobs needs an output column: set logprobs for the job too (0 is enough)",
        8: "sampling: stop_token_ids: token 1000000 lies outside the model's vocabulary of 300",
        9: "sampling: top_p = 0.0: must lie in (0, 1]",
    }


def test_seed_and_sample_give_each_answer_its_own_random_numbers(checkpoint: Path, sampled: Generator) -> None:
    def tokens(generator: Generator, **sampling: Any) -> list[Any]:
        return [one.token_ids for one in generator.answer(prompts(generator, ["a"], sampling=sampling))]

    four = tokens(sampled, n=4)
    assert tokens(sampled) == four[:1] and tokens(sampled, n=4, seed=0) == four
    other = make(checkpoint, sampling={"max_new_tokens": NEW_TOKENS, "temperature": 1.0}, seed=9)
    assert tokens(other, n=4) == tokens(sampled, n=4, seed=9) != four


def test_logprobs_are_told_for_every_token(checkpoint: Path) -> None:
    generator = make(checkpoint, sampling={"max_new_tokens": 6, "logprobs": 2}, cumulative_logprob=True)
    first, second = generator.answer(
        [prompts(generator, ["a"])[0], replace(prompts(generator, ["a"])[0], sampling={"logprobs": 0})]
    )
    assert first.logprobs is not None and second.logprobs is not None
    assert [one["token_id"] for one in first.logprobs] == first.token_ids == second.token_ids
    assert [len(one["top"]) for one in first.logprobs] == [2] * len(first.token_ids)
    assert all(one["top"][0] == {name: one[name] for name in one if name != "top"} for one in first.logprobs)  # greedy
    assert first.cumulative_logprob == pytest.approx(sum(one["logprob"] for one in first.logprobs))
    assert all(one["top"] == [] for one in second.logprobs)


def test_choices_of_the_job_and_of_a_row(checkpoint: Path) -> None:
    labels = ["cheap", "cheap food", "a pub", "river"]
    generator = make(checkpoint, choices=labels, sampling={"max_new_tokens": 1})
    done = generator({"prompt": column(PROMPTS)})
    assert set(done["generated_text"]) <= set(labels)
    assert all(0 < p <= 1 for p in done["choice_probability"])
    rows = prompts(generator, PROMPTS)
    rows[1] = replace(rows[1], choices=["yes", "no"])
    rows[2] = replace(rows[2], choices=["same", "same"])
    rows[3] = replace(rows[3], sampling={"stop": "x"})
    rows[4] = replace(rows[4], choices=[])
    got = generator.answer(rows)
    assert got[1].generated_text in ("yes", "no") and got[1].choice_probability is not None
    assert got[2].error == "choices: choices 0 and 1 have the same tokens (counted from 0)"
    assert got[3].error == "choices cannot be combined with sampling.stop: the label alone ends the answer"
    assert got[4].error == "choices: no choices (counted from 0)"
    assert got[5].generated_text == done["generated_text"][5]


def test_any_end_token_chooses_a_label_that_begins_another(checkpoint: Path, tmp_path: Path) -> None:
    """Gemma and Phi-3 end a turn in a chat with another token than the tokenizer's EOS."""
    labels, full = ["cheap", "cheap food"], {"speedup": 1}
    free, bound = make(checkpoint, schedule=full), make(checkpoint, schedule=full, choices=labels)
    short = free.tokenizer(labels[0], add_special_tokens=False)["input_ids"]
    rows = prompts(free, [f"a {row}" for row in range(20)])
    longer = [row for row, one in zip(rows, bound.answer(rows), strict=True) if one.generated_text == labels[1]]
    [after] = free.answer([replace(longer[0], ids=[*longer[0].ids, *short])])
    assert after.token_ids is not None and after.token_ids[0] not in free.engine.stop_ids
    folder = shutil.copytree(checkpoint, tmp_path / "two-ends")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], after.token_ids[0]]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    [ended] = make(folder, schedule=full, choices=labels).answer(longer[:1])
    assert (ended.generated_text, ended.finish_reason, ended.error) == (labels[0], "stop", None)


def test_white_space_is_kept_if_asked(checkpoint: Path, generator: Generator) -> None:
    kept = make(checkpoint, strip=False)
    texts = [one.generated_text or "" for one in kept.answer(prompts(kept, PROMPTS))]
    stripped = [one.generated_text for one in generator.answer(prompts(kept, PROMPTS))]
    assert [text.strip() for text in texts] == stripped and texts != stripped


CHAT = (
    "{% for one in messages %}{% if 'content' not in one %}{{ raise_exception('no content') }}{% endif %}"
    "{{ one['role'] }}: {{ one['content'] }} {% endfor %}assistant: "
)


def test_prompts_may_be_token_ids_or_messages(checkpoint: Path, generator: Generator) -> None:
    chatty = make(checkpoint)
    chatty.tokenizer.chat_template = CHAT
    chat = [{"role": "user", "content": "cheap food"}]
    ids = np.array(generator.tokenizer("a")["input_ids"])
    wrong = [[5, 10**6], [{"role": "user"}], [], [1.0, np.nan], 7, ["a"], " ", b"cheap food", [True, False]]
    deep = [{"role": "user", "content": json.loads("[" * 600 + "]" * 600)}]  # a RecursionError of `ControlTokens`
    done = chatty({"prompt": column([chat, ids, "a", *wrong, deep])})
    written = chatty.tokenizer("user: cheap food assistant: ", add_special_tokens=False)["input_ids"]
    assert done["generated_text"][0] == chatty.answer([Prompt(written, "", 0)])[0].generated_text
    assert done["generated_text"][1] == done["generated_text"][2] == answers(generator, ["a"])[0][0]
    assert done["error"][-1].startswith("prompt cannot be read: maximum recursion depth exceeded")
    assert done["error"][3:-1].tolist() == [
        "prompt: token 1000000 lies outside the model's vocabulary of 300",
        "prompt cannot be read: no content",
        "prompt is null or empty",
        "prompt cannot be read: cannot convert float NaN to integer",
        "prompt cannot be read: object of type 'int' has no len()",
        "prompt cannot be read: invalid literal for int() with base 10: 'a'",
        "prompt is null or empty",
        "prompt is bytes, not text: decode it",
        "prompt holds values that are not token ids",
    ]
    plain = generator({"prompt": column([chat])})["error"][0]  # without a template
    assert plain.startswith("prompt cannot be read: ") and "chat_template" in plain


def test_another_prompt_column(checkpoint: Path, generator: Generator) -> None:
    done = make(checkpoint, prompt_column="question")({"question": column(["a"]), "prompt": column([None])})
    assert done["generated_text"].tolist() == [answers(generator, ["a"])[0][0]]


def test_list_columns_are_kept_whatever_their_lengths(generator: Generator) -> None:
    """As plain lists, ragged or not; a list of prompts' token ids is such a column too."""
    ids = [generator.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    ragged = [[1] * row for row in range(len(PROMPTS))]
    equal = [[row, row] for row in range(len(PROMPTS))]
    messages = [[{"role": "user"}] * (1 + row % 2) for row in range(len(PROMPTS))]
    done = generator({"prompt": ids, "ragged": ragged, "equal": equal, "messages": messages, "id": range(len(PROMPTS))})
    assert done["ragged"].tolist() == ragged and done["messages"].tolist() == messages
    assert done["equal"].shape == (len(PROMPTS),) and done["equal"].tolist() == equal
    assert done["prompt"].tolist() == ids and done["id"].tolist() == list(range(len(PROMPTS)))
    assert done["generated_text"].tolist() == [answer[0] for answer in answers(generator, list(PROMPTS))]


def test_a_new_process_imports_little_prints_nothing_and_leaves_transformers_as_it_was(checkpoint: Path) -> None:
    """The engine runs where neither Ray nor Arrow is, the generator in anyone's map_batches. In a process of its own:
    other tests have imported more, and may have silenced the library."""
    code = f"""
import importlib, logging, pkgutil, sys
import actors.engine
for module in pkgutil.walk_packages(actors.engine.__path__, "actors.engine."):
    importlib.import_module(module.name)
found = [name for name in ("ray", "pyarrow", "pipeline") if name in sys.modules]
assert not found, f"actors.engine imports {{found}}"
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as library
def settings():
    level = logging.getLogger("transformers").level
    return library.is_progress_bar_enabled(), are_progress_bars_disabled(), level
before = settings()
from actors.generator import Generator
from actors.settings import EngineSettings
found = [name for name in ("ray", "pipeline") if name in sys.modules]
assert not found, f"actors.generator imports {{found}}"
Generator(EngineSettings({str(checkpoint)!r}, device="cpu"))
assert before == settings()
assert before[:2] == (True, False)
"""
    # the CLI sets it
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_column_is_named_with_those_that_exist(generator: Generator) -> None:
    with pytest.raises(ValueError, match=r"^prompt_column: no column 'prompt' in the batch, which has 'id', 'text'$"):
        generator({"id": column([1]), "text": column(["a"])})


def test_a_pool_that_leaves_no_cpu_is_a_warning(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a pool of Ray Data only, and while no rows have come."""
    free = {"CPU": 0.0}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(available_resources=lambda: free))
    monkeypatch.setattr("actors.generator.ROWS_SECONDS", 600.0)
    made: list[Generator] = []

    def waiting() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "_warn_without_rows" in thread.name]

    of_ray_data = {"__name__": "ray.data._internal.execution", "make": lambda: made.append(make(checkpoint))}
    exec("make()", of_ray_data)
    assert len(waiting()) == 1
    made[0]({"prompt": column(["a"])})
    for thread in waiting():
        thread.join()
    make(checkpoint)
    assert "CPUs" not in caplog.text and not waiting()
    monkeypatch.setattr("actors.generator.ROWS_SECONDS", 0.1)
    exec("make()", of_ray_data)
    for thread in waiting():
        thread.join()
    assert "no rows came in 0.1 s, and 0 CPUs of the cluster are free" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "dtype = 'fp8': must be one of float32, bfloat16, float16"),
        ({"weights": "int8"}, "weights = 'int8' needs dtype = 'bfloat16'"),
        ({"weights": "fp8", "dtype": "bfloat16"}, "weights = 'fp8': must be one of int8"),
        ({"device": "cuda:1"}, "device = 'cuda:1': this process sees 1 GPUs"),
        ({"device": "gpu"}, "device = 'gpu': must be auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device = 'meta': must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda"}, "256 MiB of 1.0 GiB are free: lower actors.cache_bytes"),
    ],
)
def test_the_engine_is_checked_before_a_model_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**28, 2**30))
    monkeypatch.setattr("actors.engine.build.load_decoder", None)
    with pytest.raises(UserError, match=re.escape(message)):
        make(checkpoint, **changes)


def test_the_second_gpu_is_the_current_one_while_rows_are_answered(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, events and kernels without a device belong to the current one."""
    entered: list[torch.device] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.remove(device)

    generator, seen = make(checkpoint), []
    monkeypatch.setattr("torch.cuda.device", guard)
    monkeypatch.setattr(generator, "device", torch.device("cuda:1"))
    monkeypatch.setattr(generator.calls, "finish", lambda call: seen.append(list(entered)))
    generator.answer([])
    assert seen == [[torch.device("cuda:1")]] and not entered
