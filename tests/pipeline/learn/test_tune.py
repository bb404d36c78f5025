"""Training follows the inference path: its logits are the oracle's, and skipped layers are not computed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from random_adapter import random_adapter
from safetensors.torch import load_file, save_file
from tiny_checkpoint import tiny_checkpoint
from tokenizers import normalizers
from tune_recipes import train_recipe

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect, load_decoder, with_adapter
from actors.engine.model.speed_adapter import FILES, WEIGHTS, base_digest, merge
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.torch.divergence import Model, teacher_forced
from pipeline.config.job import StorageConfig
from pipeline.config.tune import TuneConfig, TuneDataConfig
from pipeline.learn.rows import token_ids
from pipeline.learn.tune.plan import encode, plan_training, read_pairs
from pipeline.learn.tune.run import tune
from pipeline.learn.tune.trainer import Training
from pipeline.prepare.tokenizer import tokenize
from pipeline.storage.folder import open_folder


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_tune_then_tune_from_its_checkpoint(recipe: dict[str, Any], tmp_path: Path) -> None:
    record = train_recipe(recipe)
    assert record["steps"] == 12
    assert set(record["dev_loss"]) == {"eval_loss_1x", "eval_loss_2x", "eval_loss"}
    assert record["dev_loss"]["eval_loss"] < 4.5  # untrained: ln 300 = 5.7
    found = inspect(tmp_path / "out")
    assert found.spec is not None
    assert (found.spec.speedup, found.num_layers) == (2, 4)
    assert found.trained is not None and (found.trained.depths[-1], found.trained.prompt) == (2, ("full",))
    assert found.spec.horizon is not None and 3 <= found.spec.horizon <= 20
    further = {**recipe, "model": {"path": str(tmp_path / "out")}, "output": str(tmp_path / "further")}
    further["schedule"] = {"speedups": [2], "horizon": 5}
    assert train_recipe(further, bf16=False)["dev_loss"]["eval_loss_2x"] < record["dev_loss"]["eval_loss_2x"]
    spec = inspect(tmp_path / "further").spec
    assert spec is not None and spec.horizon == 5


def test_an_interrupted_run_resumes(recipe: dict[str, Any]) -> None:
    first = train_recipe(recipe, max_steps=6)
    assert (first["steps"], first["resumed_at_step"]) == (6, 0)
    second = train_recipe(recipe)
    assert (second["steps"], second["resumed_at_step"]) == (12, 6)
    with pytest.raises(ValueError, match="holds a training with another recipe"):
        train_recipe(recipe, learning_rate=0.02)
    state = Path(recipe["output"], "_training", "state.pt")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"state.pt: damaged; to train from the beginning, remove .*/_training$"):
        train_recipe(recipe, max_steps=13)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to begin from, with words that the recipe's data has."""
    return tiny_checkpoint(tmp_path_factory.mktemp("start"))


@pytest.fixture
def taught(recipe: dict[str, Any], start: Path) -> dict[str, Any]:
    """The recipe from `start`, taught only by full depth."""
    return {**recipe, "model": {"path": str(start)}, "loss": {"references": 0, "distillation": 1}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_accumulated_micro_batches_are_one_batch(recipe: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_steps": 3, "bf16": False}
    whole = train_recipe(recipe, micro_batch_tokens=1000, **settings)
    cut = train_recipe({**recipe, "output": str(tmp_path / "cut")}, micro_batch_tokens=40, **settings)
    assert cut["dev_loss"] == pytest.approx(whole["dev_loss"], rel=2e-3)


@pytest.mark.parametrize("data", ["in", "in/*.parquet", "s3://bucket/in"])
def test_a_finished_run_is_unchanged_until_a_file_changes(
    recipe: dict[str, Any], tmp_path: Path, s3: StorageConfig, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(s3.endpoint_url))
    data = data if "://" in data else str(tmp_path / data)
    folder, source = open_folder(data.removesuffix("/*.parquet"), s3), tmp_path / "train.parquet"
    folder.replace(source.name, source.read_bytes())
    recipe["data"] = {**recipe["data"], "train": data}
    train_recipe(recipe)
    record = tmp_path / "out" / "tune.json"
    written = record.stat().st_mtime_ns
    train_recipe(recipe)
    assert record.stat().st_mtime_ns == written
    pq.write_table(pq.read_table(source).slice(1), source)
    folder.replace(source.name, source.read_bytes())
    with pytest.raises(ValueError, match="another recipe or other input files"):
        train_recipe(recipe)
    shutil.rmtree(tmp_path / "out" / "_training")
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        train_recipe(recipe)


def test_keys_left_out_are_the_start_checkpoints(recipe: dict[str, Any], tmp_path: Path) -> None:
    train_recipe({**recipe, "schedule": {"speedups": [2], "keep_order": "even", "decay": "cosine"}})
    further = {**recipe, "model": {"path": str(tmp_path / "out")}, "output": str(tmp_path / "further")}
    train_recipe({**further, "schedule": {"speedups": [2], "decay": "linear"}}, max_steps=1)
    spec = inspect(tmp_path / "further").spec
    assert spec is not None and (spec.keep_order, spec.decay) == ("even", "linear")
    with pytest.raises(ValueError, match=r"output: .* and model.path .*/out overlap; choose another folder"):
        train_recipe({**further, "output": str(tmp_path / "out" / "further")})


def test_weights_are_saved_in_the_type_asked_for(recipe: dict[str, Any], tmp_path: Path) -> None:
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        output = tmp_path / str(bf16)
        train_recipe({**recipe, "output": str(output)}, max_steps=1, bf16=bf16)
        assert {tensor.dtype for tensor in weights(output).values()} == {dtype}
        assert json.loads((output / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_folder_of_the_user_is_refused_and_untouched(recipe: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "_training").mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json", "_training/recipe.json"):
        (out / name).write_text("mine")
    with pytest.raises(ValueError, match=r"output: .*out holds '_training' and no tune.json of an earlier run; choose"):
        train_recipe(recipe)
    for name in ("model.safetensors", "tokenizer.json", "_training/recipe.json"):
        assert (out / name).read_text() == "mine"


def test_a_file_of_the_user_stays_when_training_ends(recipe: dict[str, Any], tmp_path: Path) -> None:
    train_recipe(recipe, max_steps=6)
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    (out / "generation_config.json").unlink()
    listed = json.loads((out / "tune.json").read_text())
    listed["files"].remove("generation_config.json")
    (out / "tune.json").write_text(json.dumps(listed))
    (out / "generation_config.json").write_text("mine")
    with pytest.raises(ValueError, match=r"generation_config.json exists and tune.json does not list it; move it"):
        train_recipe(recipe)
    assert (out / "generation_config.json").read_text() == (out / "notes.txt").read_text() == "mine"
    (out / "generation_config.json").unlink()
    assert train_recipe(recipe)["steps"] == 12
    assert (out / "notes.txt").read_text() == "mine"


def test_a_speed_adapter_is_trained_above_1x_alone(taught: dict[str, Any], start: Path, tmp_path: Path) -> None:
    adapted = {**taught, "model": {"path": str(start)}, "adapter": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    adapted["loss"]["teacher_top_k"] = 1000
    before = weights(start)
    record = train_recipe(adapted, learning_rate=0.05, bf16=False)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(start).items())
    assert set(record["dev_loss"]) == {"eval_loss_2x", "eval_loss"}  # of the speeds 1 and 2
    out = tmp_path / "out"
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
    plan = plan_training(TuneConfig.model_validate(adapted))
    pairs = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in plan.dev]
    lines = [Model(decoder, plan.schedules["2x"]) for decoder in (model, base)]
    scores = teacher_forced(Model(base, ScheduleSpec().build(model.num_layers)), lines, pairs)
    loss, without = (score.kl.sum() / score.tokens.sum() for score in scores)
    assert loss == pytest.approx(record["dev_loss"]["eval_loss_2x"], rel=0.02)
    assert abs(loss - without) > 0.05 * without


def test_a_killed_adapter_training_ends_as_one_without_a_pause(
    taught: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught["adapter"] = {"rank": 2}
    settings = {"max_steps": 6, "learning_rate": 0.05, "save_steps": 3, "bf16": False, "warmup_steps": 0}
    assert train_recipe({**taught, "output": str(tmp_path / "whole")}, **settings)["steps"] == 6

    step = Training._step

    def killed(self: Training) -> torch.Tensor:
        if self.step == 4:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_recipe(taught, **settings)
    assert train_recipe(taught, **settings)["resumed_at_step"] == 3
    resumed, whole = (load_file(tmp_path / name / WEIGHTS) for name in ("out", "whole"))
    # the teacher's pass after a pause has other rows in a batch, and other rounding; steps of 0.05 would show a loss
    assert all(torch.allclose(resumed[name].float(), whole[name].float(), rtol=0.01, atol=0.002) for name in whole)


def test_training_goes_on_from_a_speed_adapter(taught: dict[str, Any], start: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "out", tmp_path / "second"
    shape = {"rank": 4, "alpha": 4, "targets": ["q_proj"]}
    schedule = {**taught["schedule"], "horizon": 5, "prompt": "first"}
    done = train_recipe({**taught, "adapter": shape, "schedule": schedule}, learning_rate=0.05, bf16=False)
    before = load_file(first / WEIGHTS)

    del schedule["prompt"]  # the adapter's own then
    going_on = {**taught, "adapter": {"start": str(first)}, "schedule": schedule, "output": str(second)}
    settings = {"max_steps": 1, "warmup_steps": 0, "bf16": False}
    record = train_recipe(going_on, learning_rate=1e-9, **settings)
    found = with_adapter(inspect(start), second)
    assert found.adapter is not None and (found.adapter.rank, found.adapter.scale) == (4, 1.0)
    assert found.spec is not None and found.spec.prompt == "first"
    assert all(torch.equal(weight, before[name]) for name, weight in load_file(second / WEIGHTS).items())
    assert record["dev_loss"] == pytest.approx(done["dev_loss"], rel=0.01)  # but for the rounding to bfloat16

    other = tmp_path / "other"
    shutil.copytree(start, other)
    weight_file = other / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(weight_file).items()}, weight_file, {"format": "pt"})
    bad = {**going_on, "model": {"path": str(other)}, "output": str(tmp_path / "third")}
    with pytest.raises(UserError, match=r"adapter.start: .*trained for a base with weights"):
        train_recipe(bad, **settings)
    with pytest.raises(UserError, match=r"adapter.start: .*not a speed adapter"):
        train_recipe({**going_on, "adapter": {"start": str(start)}, "output": str(tmp_path / "third")}, **settings)


@pytest.mark.parametrize("ended", ["finished", "killed"])
def test_an_adapter_to_go_on_from_that_has_changed_is_another_recipe(
    recipe: dict[str, Any], start: Path, tmp_path: Path, ended: str
) -> None:
    first = random_adapter(start, tmp_path / "first", ScheduleSpec(speedup=2, horizon=5), rank=2)
    going_on = {**recipe, "model": {"path": str(start)}, "adapter": {"start": str(first)}}
    going_on |= {"schedule": {"speedups": [2], "horizon": 5}}
    going_on["training"] |= {"max_steps": 1, "warmup_steps": 0}
    record = train_recipe(going_on)
    if ended == "killed":
        (tmp_path / "out" / "tune.json").write_text('{"files": ["_training"]}')
    else:
        assert train_recipe(going_on) == record
    random_adapter(start, first, ScheduleSpec(speedup=3, horizon=5), rank=2)
    with pytest.raises(UserError, match="holds a training with another recipe or other input files"):
        train_recipe(going_on)


def test_distillation_brings_skipping_nearer_to_full_depth(taught: dict[str, Any], tmp_path: Path) -> None:
    taught["schedule"] = {"speedups": [2]}
    first, last = (
        train_recipe({**taught, "output": str(tmp_path / str(steps))}, max_steps=steps, learning_rate=0.006)["dev_loss"]
        for steps in (1, 20)
    )
    assert last["eval_loss_2x"] < 0.7 * first["eval_loss_2x"]


def test_the_best_step_is_kept_and_harm_is_named(
    recipe: dict[str, Any], taught: dict[str, Any], start: Path, tmp_path: Path
) -> None:
    """A training that ends worse than it began leaves its start; the dev set is read at each tenth of the steps."""
    wild = train_recipe(taught, max_steps=6, learning_rate=1.0, warmup_steps=0, bf16=False)
    assert ([one["step"] for one in wild["dev_losses"]], wild["kept_step"]) == ([*range(7)], 0)
    assert wild["dev_loss"] == {name: one for name, one in wild["dev_losses"][0].items() if name != "step"}
    assert [line.partition(":")[0] for line in wild["harmed"]] == [f"the training harmed {one}" for one in ("1x", "2x")]
    kept, before = (load_decoder(path, torch.float32, torch.device("cpu")).model for path in (tmp_path / "out", start))
    for (name, weight), other in zip(kept.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(weight, other), name
    lost = train_recipe({**recipe, "output": recipe["output"] + "-lost"}, learning_rate=1e30, bf16=False)
    assert lost["steps"] == 2  # of 12
    assert lost["harmed"][0] == "the training stopped at step 2: its dev-set loss is nan; lower training.learning_rate"
    stopped = {**recipe, "output": recipe["output"] + "-stopped"}
    record = train_recipe(stopped, max_steps=200, eval_steps=4, learning_rate=1.0, early_stopping=2, warmup_steps=0)
    assert record["steps"] < 200
    calm = train_recipe({**recipe, "output": recipe["output"] + "-calm"}, max_steps=20, eval_steps=100)
    assert [one["step"] for one in calm["dev_losses"]] == list(range(0, 21, 2))
    assert (calm["steps"], calm["harmed"]) == (20, []) and calm["kept_step"] > 0


def test_token_ids_and_cut_off_responses(recipe: dict[str, Any], start: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(start)
    texts = ["Zizzi is cheap", "The Eagle is near"]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts = tokenizer(texts)["input_ids"]
    path = parquet(tmp_path / "ids.parquet", prompt=prompts, response=ids, ended=[True, False])
    data = TuneDataConfig.model_validate({"train": path, "dev": path, "ended": "ended"})
    rows = encode(tokenizer, read_pairs(data, [path], "response"), 256, 300)
    assert [row["input_ids"] for row in rows] == [
        [*prompts[0], *ids[0], tokenizer.eos_token_id],
        [*prompts[1], *ids[1]],
    ]
    plain = parquet(tmp_path / "plain.parquet", prompt=texts, response=texts)
    text = read_pairs(data.model_copy(update={"ended": None}), [plain], "response")
    assert encode(tokenizer, text, 256, 300)[0] == rows[0]
    with pytest.raises(ValueError, match=r"pair 0 has an empty prompt or response, or a token outside the .* of 5;"):
        encode(tokenizer, text, 256, 5)
    bare = load_tokenizer(start)  # this tokenizer gives a zero-width space no token
    bare.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    bare.add_bos_token = False
    for pair in (("\u200b", "a", True), ("a", "\u200b", False)):
        with pytest.raises(ValueError, match="pair 1 has an empty prompt or response"):
            encode(bare, [text[0], pair], 256, 300)
    tokenizer.eos_token = None  # the end tokens of `generation_config.json` are in the responses that `adapt` writes
    assert encode(tokenizer, [(*pair[:2], False) for pair in text], 256, 300)[1] == rows[1]
    with pytest.raises(ValueError, match="the tokenizer has no end-of-sequence token"):
        encode(tokenizer, text, 256, 300)
    columns = {"train_reference": "response", "dev_reference": "response", "ended": "ended"}
    train_recipe({**recipe, "model": {"path": str(start)}, "data": {"train": path, "dev": path, **columns}})


def test_a_prompt_has_the_tokens_that_a_job_gives_it(start: Path) -> None:
    texts = ["Zizzi", "<s>Zizzi", "<s><s> Zizzi", "<s>"]  # `<s>` is BOS; templated prompts begin with it
    expected = list(tokenize(str(start), texts, special_tokens=True))
    assert token_ids(load_tokenizer(start), [*texts, [0, 0, 5]]) == [*expected, [0, 0, 5]]
    assert [ids.count(load_tokenizer(start).bos_token_id) for ids in expected] == [1] * 4


def test_schedules_to_draw_from_may_differ_in_anything(recipe: dict[str, Any], tmp_path: Path) -> None:
    record = train_recipe({**recipe, "schedule": {"speedups": [1, 2], "also": [{"speedup": 2.0, "prompt": "first"}]}})
    names = {"eval_loss_1x", "eval_loss_2x", "eval_loss_speedup=2.0 prompt=first", "eval_loss"}
    assert set(record["dev_loss"]) == names
    trained = inspect(tmp_path / "out").trained
    assert trained is not None and trained.prompt == ("full", "first")


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({}, {"data": {"train": "none.parquet"}}, "none.parquet: no such file or folder"),
        ({}, {"data": {"prompt": "question"}}, r"bad.parquet: no column 'question'; it has prompt, reference"),
        ({}, {"data": {"max_tokens": 4}}, "every pair is longer than 4 tokens"),
        ({}, {"schedule": {"keep_order": [0, 1]}}, "keep_order has 2 entries for 4 layers"),
        ({"reference": ["a", None]}, {}, r"bad.parquet: row 1: reference is empty"),
        ({"prompt": ["a", " "]}, {}, r"bad.parquet: row 1: prompt is empty"),
        ({"reference": ["red", "yelow"]}, {"data": {"choices": ["red", "yellow"]}}, r"1: 'yelow' is not one of the 2"),
        ({}, {"adapter": {"targets": ["wq"]}}, r"no layer 'wq'; it has down_proj, .*v_proj"),
        ({}, {"adapter": {"start": "START", "rank": 8}}, "adapter.rank is set by adapter.start: leave it out"),
        ({}, {"loss": {"distillation": 1.0, "teacher": "START"}}, "START has another tokenizer"),
        ({}, {"loss": {"references": 0.0}}, "the loss has no terms"),
        ({}, {"schedule": {"default": 3}}, r"schedule.default: 3x would not be trained: add it to schedule.speedups"),
        ({}, {"data": {"dev": "ONE"}}, r"one.parquet: one pair is not enough for a dev set"),
        ({}, {"adapter": {}, "schedule": {"speedups": [1]}}, r"schedule.speedups: an adapter needs a speed above 1x"),
    ],
)
def test_bad_data_and_settings_are_one_line_before_training(
    recipe: dict[str, Any], start: Path, tmp_path: Path, columns: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = parquet(tmp_path / "bad.parquet", **{"prompt": ["a", "b"], "reference": ["a", "b"], **columns})
    one = parquet(tmp_path / "one.parquet", prompt=["red"], references=["red"])
    bad = {**recipe, "data": {**recipe["data"], "train": path}}
    for section, values in json.loads(json.dumps(changes).replace("START", str(start)).replace("ONE", one)).items():
        bad[section] = {**bad.get(section, {}), **values}
    with pytest.raises(ValueError, match=message.replace("START", str(start))) as caught:
        tune(TuneConfig.model_validate(bad))
    assert isinstance(caught.value, ValidationError) or "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_output_in_a_bucket_is_refused(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learn.tune.run.train", lambda *_: pytest.fail("trains into a local folder s3:"))
    with pytest.raises(ValueError, match=r"^output: s3://bucket/out is not local; name a local folder, and copy"):
        tune(TuneConfig.model_validate({**recipe, "output": "s3://bucket/out"}))


def test_a_training_announces_its_steps(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.runtime.announce.INTERVAL", 0.0)
    train_recipe(recipe, max_steps=2)
    lines = capsys.readouterr().err.splitlines()
    assert f"training {recipe['model']['path']} on 64 pairs, with a dev set of 16; output: {recipe['output']}" in lines
    steps = [line for line in lines if line.startswith("training: ")]
    assert steps[0] == "training: 0 of 2 steps"
    for done, line in enumerate(steps[1:], 1):
        said = rf"training: {done} of 2 steps, [\d.]+ m?s a step, about [\d.]+ m?s left; loss \d\.\d{{3}}"
        assert re.fullmatch(said, line)
    assert len(steps) == 3
    assert "dev set with 2 schedules: 0 of 16 rows done" in lines


def test_a_measured_order_is_stored_as_a_list_and_measured_once(
    recipe: dict[str, Any], tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_recipe(recipe, max_steps=2)
    further = {**recipe, "model": {"path": str(tmp_path / "out")}, "output": str(tmp_path / "further")}
    further["schedule"] = {"speedups": [2], "horizon": 5, "keep_order": "measured"}
    assert train_recipe(further, max_steps=2)["config"]["schedule"]["keep_order"] == "measured"
    spec = inspect(tmp_path / "further").spec
    assert spec is not None and sorted(spec.keep_order) == [0, 1, 2, 3]
    assert sorted(spec.keep_order[: spec.warmup]) == list(range(spec.warmup))
    assert "measuring the keep order on 32 answers" in capsys.readouterr().err
    again = {**further, "output": str(tmp_path / "again")}
    train_recipe(again, max_steps=2)
    assert inspect(tmp_path / "again").spec == spec
    assert ", read from " in capsys.readouterr().err
    again["schedule"]["warmup"] = 3
    train_recipe({**again, "output": str(tmp_path / "warm")}, max_steps=2)
    warm = inspect(tmp_path / "warm").spec
    assert warm is not None and (set(warm.keep_order[:3]), warm.warmup) == ({0, 1, 2}, 3)
