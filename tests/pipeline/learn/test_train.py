"""Training on rows in memory: what is saved, resumption after a kill, and the best step."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_adapter import random_adapter
from safetensors.torch import load_file, save_file
from small_training import Small
from tiny_checkpoint import tiny_checkpoint

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect, load_decoder, with_adapter
from actors.engine.model.speed_adapter import FILES, WEIGHTS, base_digest, merge
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.torch.divergence import Model, teacher_forced
from pipeline.config.adapt import AdapterConfig, LossConfig
from pipeline.learn.adapt.pairs import training_pairs
from pipeline.learn.train.adapters import started
from pipeline.learn.train.recipe import context_of
from pipeline.learn.train.trainer import Training


def test_a_checkpoint_is_trained_and_trained_further(small: Small, tmp_path: Path) -> None:
    record = small.train()
    assert record["steps"] == 12
    assert json.loads((small.output / "tune.json").read_text()) == record
    assert set(record["dev_loss"]) == {"eval_loss_1x", "eval_loss_2x", "eval_loss"}
    assert record["dev_loss"]["eval_loss"] < 4.5  # untrained: ln 300 = 5.7
    found = inspect(small.output)
    assert found.spec == ScheduleSpec(speedup=2.0, horizon=6) and found.num_layers == 4
    assert found.trained is not None and (found.trained.depths[-1], found.trained.prompt) == (2, ("full",))
    further = replace(small, start=small.output, output=tmp_path / "further", speedups=(2,))
    assert further.train(bf16=False)["dev_loss"]["eval_loss_2x"] < record["dev_loss"]["eval_loss_2x"]


def test_an_interrupted_run_resumes(small: Small) -> None:
    first = small.train(max_steps=6)
    assert (first["steps"], first["resumed_at_step"]) == (6, 0)
    second = small.train()
    assert (second["steps"], second["resumed_at_step"]) == (12, 6)
    other: list[Small] = [replace(small, texts=small.texts[1:]), replace(small, speedups=(1, 3))]
    for changed, settings in ((small, {"learning_rate": 0.02}), *((one, {}) for one in other)):
        with pytest.raises(UserError, match="holds a training with another recipe or other rows"):
            changed.train(**settings)
    state = small.output / "_training" / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"state.pt: damaged; to train from the beginning, remove .*/_training$"):
        small.train(max_steps=13)
    shutil.rmtree(state.parent)
    assert small.train(max_steps=1)["resumed_at_step"] == 0


SCRIPT = """
import sys
from pathlib import Path
from dataclasses import replace
sys.path[:0] = {path!r}
from small_training import Small
from pipeline.config.adapt import AdapterConfig
from pipeline.learn.train.trainer import Training

plain = Training._save

def saved(self, name):
    plain(self, name)
    if name == "state.pt":
        print("saved", flush=True)
        sys.stdin.read()  # until the process is killed

Training._save = saved
small = Small(Path({start!r}), Path({output!r}), {texts!r}, adapter=AdapterConfig(rank=2))
small.train(max_steps=6, save_steps=3, bf16=False, learning_rate=0.05)
"""


def test_a_training_whose_process_is_killed_ends_with_the_same_weights(small: Small, tmp_path: Path) -> None:
    """By SIGKILL, once step 3 of 6 is saved."""
    taught = replace(small, adapter=AdapterConfig(rank=2))
    settings: dict[str, Any] = {"max_steps": 6, "save_steps": 3, "bf16": False, "learning_rate": 0.05}
    whole = replace(taught, output=tmp_path / "whole")
    assert whole.train(**settings)["steps"] == 6
    values = {"start": str(small.start), "output": str(small.output), "texts": small.texts, "path": sys.path}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(**values)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (small.output / "tune.json").exists()
    assert taught.train(**settings)["resumed_at_step"] == 3
    resumed, expected = (load_file(folder / WEIGHTS) for folder in (small.output, whole.output))
    assert all(torch.equal(resumed[name], weight) for name, weight in expected.items())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to begin from, with words that the task's texts have."""
    return tiny_checkpoint(tmp_path_factory.mktemp("start"))


@pytest.fixture
def taught(small: Small, start: Path) -> Small:
    """The task from `start`, taught only by full depth."""
    return replace(small, start=start, loss=LossConfig())


def test_accumulated_micro_batches_are_one_batch(small: Small, tmp_path: Path) -> None:
    whole = small.train(max_steps=3, bf16=False, micro_batch_tokens=1000)
    cut = replace(small, output=tmp_path / "cut").train(max_steps=3, bf16=False, micro_batch_tokens=40)
    assert cut["dev_loss"] == pytest.approx(whole["dev_loss"], rel=2e-3)


def test_weights_are_saved_in_the_type_asked_for(small: Small, tmp_path: Path) -> None:
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        output = tmp_path / str(bf16)
        replace(small, output=output).train(max_steps=1, bf16=bf16)
        assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {dtype}
        assert json.loads((output / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_files_of_the_user_in_the_output_stay(small: Small) -> None:
    small.output.mkdir()
    (small.output / "notes.txt").write_text("mine")
    for name in ("config.json", "adapter_config.json"):
        (small.output / name).write_text("mine")
        with pytest.raises(UserError, match=r"holds a checkpoint or adapter, but no tune\.json"):
            small.train(max_steps=1)
        assert (small.output / name).read_text() == "mine"
        (small.output / name).unlink()
    small.train(max_steps=1)
    assert (small.output / "notes.txt").read_text() == "mine"


def test_a_speed_adapter_is_trained_above_1x_alone(taught: Small, start: Path) -> None:
    loss, adapter = LossConfig(teacher_top_k=1000), AdapterConfig(rank=4, targets=["q_proj", "down_proj"])
    adapted = replace(taught, loss=loss, adapter=adapter)
    before = load_file(start / "model.safetensors")
    record = adapted.train(learning_rate=0.05, bf16=False)
    assert all(torch.equal(weight, before[name]) for name, weight in load_file(start / "model.safetensors").items())
    assert set(record["dev_loss"]) == {"eval_loss_2x", "eval_loss"}  # of the speeds 1 and 2
    out = adapted.output
    assert {path.name for path in out.iterdir()} == {*FILES, "tune.json", "_training"}
    assert len({(out / name).stat().st_mode for name in FILES}) == 1  # other users read all or none
    found = with_adapter(inspect(start), out)
    assert found.adapter is not None and (found.adapter.rank, found.adapter.scale) == (4, 2.0)
    found.adapter.check_base(base_digest(start), "start")
    trained = load_file(out / WEIGHTS)
    assert {name.split(".")[-3] for name in trained} == {"q_proj", "down_proj"}
    assert found.trained is not None and found.trained.depths == found.schedule({}).depths

    # the loss is that of the merged weights, but for their rounding to bfloat16
    model = load_decoder(start, torch.float32, torch.device("cpu"))
    merge(model.model, found.adapter)
    base = load_decoder(start, torch.float32, torch.device("cpu"))
    _, dev = adapted.pairs()
    pairs = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in dev]
    lines = [Model(decoder, adapted.recipe().schedules["2x"]) for decoder in (model, base)]
    scores = teacher_forced(Model(base, ScheduleSpec().build(model.num_layers)), lines, pairs)
    loss_of, without = (score.kl.sum() / score.tokens.sum() for score in scores)
    assert loss_of == pytest.approx(record["dev_loss"]["eval_loss_2x"], rel=0.02)
    assert abs(loss_of - without) > 0.05 * without


def test_a_killed_adapter_training_ends_as_one_without_a_pause(
    taught: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = replace(taught, adapter=AdapterConfig(rank=2))
    settings: dict[str, Any] = {"max_steps": 6, "learning_rate": 0.05, "save_steps": 3, "bf16": False}
    whole = replace(taught, output=tmp_path / "whole")
    assert whole.train(**settings)["steps"] == 6

    step = Training._step

    def killed(self: Training) -> torch.Tensor:
        if self.step == 4:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            taught.train(**settings)
    assert taught.train(**settings)["resumed_at_step"] == 3
    resumed, expected = (load_file(folder / WEIGHTS) for folder in (taught.output, whole.output))
    # the teacher's pass after a pause has other rows in a batch, and other rounding; steps of 0.05 would show a loss
    assert all(
        torch.allclose(resumed[name].float(), one.float(), rtol=0.01, atol=0.002) for name, one in expected.items()
    )


def test_training_goes_on_from_a_speed_adapter(taught: Small, start: Path, tmp_path: Path) -> None:
    shape = AdapterConfig(rank=4, alpha=4, targets=["q_proj"])
    first = replace(taught, adapter=shape, spec=ScheduleSpec(horizon=5, prompt="first"))
    done = first.train(learning_rate=0.05, bf16=False)
    before = load_file(first.output / WEIGHTS)

    going_on = replace(first, adapter=AdapterConfig(start=str(first.output)), output=tmp_path / "second")
    record = going_on.train(max_steps=1, warmup_steps=0, bf16=False, learning_rate=1e-9)
    found = with_adapter(inspect(start), going_on.output)
    assert found.adapter is not None and (found.adapter.rank, found.adapter.scale) == (4, 1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in load_file(going_on.output / WEIGHTS).items())
    assert record["dev_loss"] == pytest.approx(done["dev_loss"], rel=0.01)  # but for the rounding to bfloat16

    other = tmp_path / "other"
    shutil.copytree(start, other)
    weight_file = other / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(weight_file).items()}, weight_file, {"format": "pt"})
    with pytest.raises(UserError, match=r"adapter.start: .*trained for a base with weights"):
        started(inspect(other), str(first.output))
    with pytest.raises(UserError, match=r"adapter.start: .*not a speed adapter"):
        started(inspect(start), str(start))


def test_an_adapter_to_go_on_from_that_has_changed_is_another_recipe(small: Small, start: Path, tmp_path: Path) -> None:
    first = random_adapter(start, tmp_path / "first", ScheduleSpec(speedup=2, horizon=5), rank=2)
    going_on = replace(small, start=start, adapter=AdapterConfig(start=str(first)))
    going_on.train(max_steps=1, warmup_steps=0)
    random_adapter(start, first, ScheduleSpec(speedup=2, horizon=5), rank=4)
    with pytest.raises(UserError, match="holds a training with another recipe or other rows"):
        going_on.train(max_steps=1, warmup_steps=0)


def test_distillation_brings_skipping_nearer_to_full_depth(taught: Small, tmp_path: Path) -> None:
    taught = replace(taught, speedups=(2,))
    first, last = (
        replace(taught, output=tmp_path / str(steps)).train(max_steps=steps, learning_rate=0.006)["dev_loss"]
        for steps in (1, 20)
    )
    assert last["eval_loss_2x"] < 0.7 * first["eval_loss_2x"]


def test_the_best_step_is_kept_and_harm_is_named(small: Small, taught: Small, start: Path, tmp_path: Path) -> None:
    """A training that ends worse than it began leaves its start; the dev set is read at each tenth of the steps."""
    wild = taught.train(max_steps=6, learning_rate=1.0, warmup_steps=0, bf16=False)
    assert ([one["step"] for one in wild["dev_losses"]], wild["kept_step"]) == ([*range(7)], 0)
    assert wild["dev_loss"] == {name: one for name, one in wild["dev_losses"][0].items() if name != "step"}
    assert [line.partition(":")[0] for line in wild["harmed"]] == [f"the training harmed {one}" for one in ("1x", "2x")]
    kept, before = (load_decoder(path, torch.float32, torch.device("cpu")).model for path in (taught.output, start))
    for (name, weight), other in zip(kept.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(weight, other), name
    lost, stopped, calm = (replace(small, output=tmp_path / name) for name in ("lost", "stopped", "calm"))
    record = lost.train(learning_rate=1e30, bf16=False)
    assert record["steps"] == 2  # of 12
    stopped_at, _, advice = record["harmed"][0].partition("; ")
    assert stopped_at == "the training stopped at step 2: its dev-set loss is nan"
    assert advice == "lower adapt.training.learning_rate"
    record = stopped.train(max_steps=200, eval_steps=4, learning_rate=1.0, early_stopping=2, warmup_steps=0)
    assert record["steps"] < 200
    record = calm.train(max_steps=20, eval_steps=100)
    assert [one["step"] for one in record["dev_losses"]] == list(range(0, 21, 2))
    assert (record["steps"], record["harmed"]) == (20, []) and record["kept_step"] > 0


def test_schedules_to_draw_from_may_differ_in_anything(small: Small) -> None:
    small = replace(small, further=({"prompt": "first"}, {"prompt": "first", "decay": "constant"}))
    names = {f"eval_loss_{name}" for name in ("1x", "2x", "2x prompt=first", "2x uniform")}
    assert set(small.train()["dev_loss"]) == {*names, "eval_loss"}
    trained = inspect(small.output).trained
    assert trained is not None and trained.prompt == ("full", "first")


def test_a_pair_ends_with_an_end_token_unless_its_answer_was_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": [5, 6], "response": [7], "ended": True},
        {"prompt": [5], "response": [7, 8], "ended": False},
        {"prompt": [5] * 9, "response": [7], "ended": True},
    ]
    assert training_pairs(rows, 2, 8) == [
        {"input_ids": [5, 6, 7, 2], "prompt_tokens": 2},
        {"input_ids": [5, 7, 8], "prompt_tokens": 1},
    ]
    assert "1 of 3 pairs are longer than 8 tokens and are left out" in caplog.text


def test_a_pair_has_room_in_the_context_of_the_model_and_of_its_teacher(start: Path, tmp_path: Path) -> None:
    shutil.copytree(start, tmp_path / "teacher")
    config = json.loads((start / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    found = inspect(start)
    assert context_of(found, None, None) == found.context_length > 32
    assert context_of(found, None, str(tmp_path / "teacher")) == 32


def test_a_training_announces_its_steps(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.runtime.announce.INTERVAL", 0.0)
    small.train(max_steps=2)
    lines = capsys.readouterr().err.splitlines()
    assert f"training {small.start} on 64 pairs, with a dev set of 8; output: {small.output}" in lines
    steps = [line for line in lines if line.startswith("training: ")]
    assert steps[0] == "training: 0 of 2 steps"
    for done, line in enumerate(steps[1:], 1):
        said = rf"training: {done} of 2 steps, [\d.]+ m?s a step, about [\d.]+ m?s left; loss \d\.\d{{3}}"
        assert re.fullmatch(said, line)
    assert len(steps) == 3
    assert "dev set with 2 schedules: 0 of 8 rows done" in lines
