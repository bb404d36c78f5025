"""Every refusal of a job file is one line that names the file and the key; every key says its unit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import SamplingParams
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.forms import labels_given
from pipeline.config.input import InputConfig
from pipeline.config.job import JobConfig, ModelConfig, SamplingConfig, Section, StorageConfig
from pipeline.config.load import changed, load_config
from pipeline.input.files import list_files

JOB: dict[str, Any] = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "model"}}


def job_file(folder: Path, values: object = None) -> Path:
    path = folder / "job.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(JOB if values is None else values))
    return path


def merged(**sections: Any) -> dict[str, Any]:
    """The smallest job file with keys added to its sections."""
    both = {key: dict(value) for key, value in JOB.items()}
    for key, value in sections.items():
        both[key] = {**both.get(key, {}), **value} if isinstance(value, dict) else value
    return both


def refusal(path: Path, changes: list[str] | None = None, kind: type[Section] = JobConfig) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(kind, path, changes or [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_schedule_changes_are_the_keys_that_are_set(tmp_path: Path) -> None:
    path = job_file(tmp_path, merged(schedule={"depths": [4, 2], "keep_order": [0, 3, 2, 1], "prompt": "first"}))
    assert load_config(JobConfig, path).schedule.changes() == {
        "depths": (4, 2),
        "keep_order": (0, 3, 2, 1),
        "prompt": "first",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (merged(input={"path": []}), r"input\.path: "),
        (merged(input={"template": ""}), r"input\.template: string should have at least 1 character, not ''$"),
        (merged(output={"path": "${NO_SUCH}/a"}), r"output\.path: the environment variable \$\{NO_SUCH\} is not set"),
        (merged(output={"path": " "}), r"output\.path: is empty, not ' '$"),
        (merged(sampling={"stop": 5}), r"sampling\.stop: input should be a valid list, not 5$"),
        (merged(input={"prompt": "a", "template": "b"}), r"input: give prompt or template, not both$"),
        (merged(input={"chat_template_kwargs": {"a": 1}}), r"input: chat_template_kwargs is for chats: "),
        (merged(input={"examples": [{"user": "a"}]}), r"input\.examples\.0\.assistant is missing"),
        (merged(input={"sampling": {"temprature": "t"}}), r"input\.sampling: unknown parameter temprature; did you"),
        (merged(input={"sampling": {"temperature": 1}}), r"input\.sampling: temperature must name a column"),
        (merged(input={"sampling": {}}), r"input\.sampling: must name a struct column, or give columns as"),
        (merged(choices=["a", "a"]), r"choices: 'a' is repeated"),
        (merged(choices=[True, False]), r"choices: labels must be text, but True is not; put it in quotes"),
        (merged(choices=["a", "b"], sampling={"stop": "x"}), r"choices cannot be combined with sampling\.stop: "),
        (merged(input={"choices": "c"}, sampling={"ignore_eos": True}), r"choices .* sampling\.ignore_eos"),
        (merged(input={"too_long": "cut"}), r"input\.too_long: .*'error'.*'truncate_left'.*, not 'cut'"),
        (merged(input={"tools": "t"}), r"tools is for chats"),
        (merged(input={"format": "openai_batch", "prompt": "p"}), r"prompt .* format: openai_batch"),
        (merged(model=3, shard_rows="x"), r"model must be a section with .*keys model` \(and 1 more problem\)$"),
        (merged(output_format={"json_schema": {"not": {}}}), r"output_format: json_schema: .*not"),
        (merged(output_format="json"), r"output_format: must be \{json_schema: …\}, "),
        (merged(output_format={"json_schema": "no.json"}), r"output_format: no\.json: no such file"),
        (merged(output_format={"regex": "a"}, choices=["a", "b"]), r"give choices or output_format, not both"),
        (merged(output_format={"regex": "a"}, sampling={"stop": "x"}), r"output_format .* sampling\.stop"),
        (merged(input={"output_format": {"yaml": "c"}}), r"output_format: must be \{form: column\}"),
        ({**merged(), "input": "my.csv"}, r"input must be a section with keys of its own; see `skipdecode keys input`"),
        (merged(reasoning={"strat": "x"}), r"unknown key reasoning\.strat; did you mean start"),
        (merged(model={"weights": "int8", "dtype": "float32"}), r"model: weights: int8 .*dtype: float32"),
        (merged(model={"weights": "int8"}, actors={"gpus": 1}), r"model\.weights: int8 runs only on CPUs; "),
        (merged(sampling={"max_new_tokens": True}), r"sampling\.max_new_tokens: .*integer, not True"),
        (merged(sampling={"temperature": float("inf")}), r"sampling.temperature: input should be a finite number"),
        (merged(sampling={"n": 2}), r"sampling: n = 2: needs a temperature above 0"),
        (merged(sampling={"logprobs": 21}), r"sampling: logprobs = 21: must be 0 to 20"),
        (merged(sampling={"seed": 2**63}), r"sampling: seed must be below 2\^63$"),
        (merged(actors={"count": 2, "min": 1, "max": 2}), r"actors: give count, or min and max, not both$"),
        (merged(actors={"min": 1}), r"actors: set both min and max, or neither$"),
        (merged(actors={"min": 3, "max": 2}), r"actors: min = 3 lies above max = 2; lower min or raise max$"),
        (merged(shard_rows="many"), r"shard_rows: .*integer.*, not 'many'"),
        ("input: &a [*a]", r"an alias contains itself, or values are nested too deeply"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, values: object, message: str) -> None:
    path = job_file(tmp_path, values)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(JobConfig, path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["input.path", "output.path", "model.path", "input", "output", "model"])
def test_required_keys_are_named(tmp_path: Path, key: str) -> None:
    values = merged()
    *above, last = key.split(".")
    del (values[above[0]] if above else values)[last]
    path = job_file(tmp_path, values)
    assert refusal(path) == f"{path}: {key} is missing; give it a value"


def test_an_unknown_key_suggests_the_nearest(tmp_path: Path) -> None:
    path = job_file(tmp_path, merged(sampling={"max_tokens": 3}))
    assert refusal(path) == f"{path}: unknown key sampling.max_tokens; did you mean max_new_tokens?"
    path = job_file(tmp_path, merged(shardrows=3))
    assert refusal(path) == f"{path}: unknown key shardrows; did you mean shard_rows?"
    path = job_file(tmp_path, merged(storage={"zzz": 3}))
    assert (
        refusal(path) == f"{path}: unknown key storage.zzz; known: endpoint_url, region, retry_seconds, contact_seconds"
    )
    path = job_file(tmp_path)
    said = refusal(path, ["schedule.sped=2"])
    assert said == f"{path}: unknown key schedule.sped; did you mean speedup?"
    assert "did you mean sampling?" in refusal(path, ["samplin.top_k=2"])
    path = job_file(tmp_path, '? "\\N"\n: null\n')
    assert refusal(path).startswith(f"{path}: unknown key '\\x85'; known: ")
    path = job_file(tmp_path, {**JOB, "adapt": {"loss": {"teachr": "x"}}})
    assert refusal(path) == f"{path}: unknown key adapt.loss.teachr; did you mean teacher?"
    path = job_file(tmp_path, {**JOB, "input": {"paht": "in"}})  # before its consequences
    assert refusal(path) == f"{path}: unknown key input.paht; did you mean path? (and 1 more problem)"


def test_changes_are_values_of_yaml(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    changes = [
        "schedule.speedup=3",
        "sampling.temperature=0.5",
        "output.keep=[a, b]",
        "input.path=s3://bucket/x=1/*.parquet",
        "input.template={{ question }}",
        "model.engine=builtin",
        "shard_rows=null",
        "output.path=before",
        " output.path =elsewhere",
    ]
    config = load_config(JobConfig, path, changes)
    assert config.schedule.speedup == 3 and config.sampling.temperature == 0.5
    assert config.output.keep == ["a", "b"] and config.output.path == "elsewhere"
    assert config.input.path == ["s3://bucket/x=1/*.parquet"] and config.input.template == "{{ question }}"
    assert config.model.engine == "builtin" and config.shard_rows is None
    assert load_config(JobConfig, path).schedule.speedup is None


@pytest.mark.parametrize("key", fields(ScheduleSpec), ids=lambda key: key.name)
def test_a_job_and_a_stored_schedule_check_keys_alike(tmp_path: Path, key: Any) -> None:
    for value in ("x", True, [1, True], [], {}, 1.5, float("inf")):
        said = []
        for read in (
            partial(load_config, JobConfig, job_file(tmp_path, merged(schedule={key.name: value}))),
            partial(ScheduleSpec().overridden, {key.name: value}),
        ):
            try:
                read()
            except ValueError as error:
                said.append(str(error).removeprefix(f"{tmp_path}/job.yaml: schedule: "))
        is_right = (value == [] and "tuple" in key.type) or (value == 1.5 and "float" in key.type)
        assert len(said) == (0 if is_right else 2) and len(set(said)) < 2
        assert all(key.name in one for one in said)


def test_sampling_is_that_of_the_engine() -> None:
    """Neither can have a parameter, a default or a type that the other lacks."""
    engine = {one.name: one for one in fields(SamplingParams)}
    assert set(SamplingConfig.model_fields) == set(engine)
    for name, field in SamplingConfig.model_fields.items():
        if name == "seed":  # the job's own; in the engine it stands for a row's
            continue
        assert field.default == engine[name].default, name
        assert str(field.annotation).removeprefix("<class '").removesuffix("'>") == engine[name].type, name


def test_sampling_of_a_job_reaches_the_engine(tmp_path: Path) -> None:
    values = {"stop": "x", "stop_token_ids": [4], "n": 3, "temperature": 1, "logprobs": 0, "seed": 9}
    config = load_config(JobConfig, job_file(tmp_path, merged(sampling=values)))
    assert config.sampling.params() == SamplingParams(
        stop=("x",), stop_token_ids=(4,), n=3, temperature=1.0, logprobs=0, seed=None
    )
    assert load_config(JobConfig, job_file(tmp_path, merged(sampling={"stop": ["a", "b"]}))).sampling.stop == ("a", "b")


def test_a_prompt_is_one_of_three(tmp_path: Path) -> None:
    def given(**values: Any) -> InputConfig:
        return load_config(JobConfig, job_file(tmp_path, merged(input=values))).input

    assert given().prompt_column == "prompt" and given(prompt="q").prompt_column == "q" and not given().is_chat
    assert given(prompt="").prompt_column == ""  # the name that pandas gives the index in a CSV file
    assert given(template="x").prompt_column is None and given(messages="m").prompt_column is None
    shots = [{"user": "a", "assistant": "b"}]
    for chat in ({"messages": "m"}, {"system": "s"}, {"examples": shots}, {"chat": True, "template": "x"}):
        assert given(**chat, chat_template_kwargs={"enable_thinking": False}).is_chat
    path = job_file(tmp_path, merged(input={"examples": [{"usr": "a", "assistant": "b"}]}))
    assert refusal(path) == f"{path}: unknown key input.examples.0.usr; did you mean user? (and 1 more problem)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, text) for text in ("# Title: {{ q }}", "C# is brief # now", "Answer: yes or no", "2024-01-01")),
        ("Sum up.\n\n{{ q }}\n", "Sum up.\n\n{{ q }}"),
        ("'a # b'", "a # b"),
        ("'a' or 'b'", "'a' or 'b'"),
        ("Null", None),
    ],
)
def test_a_text_of_set_is_kept_as_it_is(tmp_path: Path, text: str, value: str | None) -> None:
    """YAML would drop a Markdown heading and line breaks without a word."""
    assert load_config(JobConfig, job_file(tmp_path), [f"input.system={text}"]).input.system == value


def test_a_section_without_keys_has_the_defaults(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"schedule": None, "sampling": None, "actors": None, "storage": None}
    assert load_config(JobConfig, job_file(tmp_path, {**JOB, **empty})) == JobConfig.model_validate(JOB)
    assert refusal(job_file(tmp_path, {**JOB, "input": None})).endswith("input.path is missing; give it a value")


def test_a_path_may_name_the_home_folder_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "labels.json").write_text('["a", "b"]')
    values = merged(
        input={"path": ["~/in", "~"]}, model={"path": "~/m~"}, adapt={"output": "./~/a", "adapter": {"start": "~/s"}}
    )
    job = load_config(JobConfig, job_file(tmp_path, values), ["output.path=$HOME/out", "choices=~/labels.json"])
    assert job.choices == load_config(JobConfig, job_file(tmp_path), ["choices=$HOME/labels.json"]).choices
    assert job.input.path == [f"{tmp_path}/in", str(tmp_path)]
    assert (job.output.path, job.model.path, job.choices) == (f"{tmp_path}/out", f"{tmp_path}/m~", ("a", "b"))
    assert job.adapt is not None and job.adapt.output == "./~/a"
    assert job.adapt.adapter.start == str(Path.home() / "s")


def test_changes_of_another_shape_are_refused(tmp_path: Path) -> None:
    for change in ("sampling.seed", "=3", ".seed=3", "sampling.=3", "sampling..seed=3"):
        assert refusal(job_file(tmp_path), [change]) == f"--set {change}: must look like section.key=value"
    path = job_file(tmp_path, merged(shard_rows=4))
    assert changed({"adapt": None}, ["adapt.rows=9"]) == {"adapt": {"rows": 9}}  # `adapt:` with nothing below it
    assert refusal(path, ["shard_rows.x=3"]) == "--set shard_rows.x=3: shard_rows is not a section"


def test_files_without_a_job_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file"
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    for text in ("input: [1, 2", "a: b: c", "- 1\n  x: {", "\t- a"):
        path = job_file(tmp_path, text)
        assert refusal(path).startswith(f"{path}: not valid YAML: ")
    for text in ("", "just words", "[1, 2]", "# nothing"):
        path = job_file(tmp_path, text)
        assert refusal(path) == f"{path}: must hold keys and values, such as `input:` and `output:`"
    path.write_bytes(b"\xff\xfe\xfa")
    assert refusal(path) == f"{path}: is not text in UTF-8; save it in this encoding"


STORAGE = StorageConfig()


@pytest.mark.parametrize(
    "look",
    [
        lambda path, _: list_files([path], STORAGE),
        lambda path, _: list_files([f"{path}/*.parquet"], STORAGE),
        lambda path, _: resolve_checkpoint(ModelConfig(path=path), STORAGE),
        lambda path, _: resolve_checkpoint(ModelConfig(path=f"{path}/x/y"), STORAGE),
        lambda path, model: resolve_checkpoint(ModelConfig(path=str(model), speed_adapter=path), STORAGE),
        lambda path, _: load_config(JobConfig, Path(path)),
        lambda path, _: labels_given(f"{path}.json"),
    ],
    ids=["input", "glob", "model", "folder", "adapter", "job file", "labels"],
)
def test_it_says_where(
    look: Callable[[str, Path], None], tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as here:
        look("none/a", checkpoint)
    assert "host" not in str(here.value)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    host = f" on host {socket.gethostname()} of the cluster"
    with pytest.raises(UserError) as there:
        look("none/a", checkpoint)
    said = str(there.value)
    assert f"{host} in {tmp_path}, which holds what `ray job submit --working-dir` uploaded" in said
    assert "\n" not in said
    with pytest.raises(UserError) as absolute:
        look("/none/a", checkpoint)
    assert f"{host}; give a path that every node can reach, or one below the folder" in str(absolute.value)
