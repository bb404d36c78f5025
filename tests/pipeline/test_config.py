"""Every refusal of a job file is one line that names the file and the key; every key says its unit."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import config as configs
from pipeline.config import JobConfig, Section, TuneConfig, load_config

JOB: dict[str, Any] = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "model"}}
SECTIONS = [
    one for _, one in inspect.getmembers(configs, inspect.isclass) if issubclass(one, Section) and one is not Section
]


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


def test_three_keys_are_enough_and_the_rest_has_defaults(tmp_path: Path) -> None:
    config = load_config(JobConfig, job_file(tmp_path))
    assert config.input.path == ["in"] and config.input.too_long == "error"
    assert config.model.dtype == "bfloat16"
    assert config.schedule.changes() == {}
    assert config.sampling.model_dump() == {
        "max_new_tokens": 64,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
    }
    assert (config.actors.most, config.actors.gpus, config.shard_rows) == (1, 0, None)
    assert (config.shard_bytes, config.max_row_errors) == (64 * 2**20, 0.01)


def test_a_path_may_be_a_list(tmp_path: Path) -> None:
    assert load_config(JobConfig, job_file(tmp_path, merged(input={"path": ["a", "b"]}))).input.path == ["a", "b"]


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
        (merged(input={"path": None}), r"input\.path: "),
        (merged(input={"path": []}), r"input\.path: "),
        (merged(input={"path": 5}), r"input\.path: .*, not 5"),
        (merged(input={"prompt": "a", "template": "b"}), r"input: give prompt or template, not both$"),
        (merged(input={"too_long": "cut"}), r"input\.too_long: .*'error'.*'truncate_left'.*, not 'cut'"),
        (merged(output={"keep": "topic"}), r"output\.keep: .*list, not 'topic'"),
        (merged(model={"dtype": "fp8"}), r"model\.dtype: .*'bfloat16'.*, not 'fp8'"),
        (merged(schedule={"speedup": "fast"}), r"schedule\.speedup: .*number.*, not 'fast'"),
        (merged(schedule={"keep_order": "odd"}), r"schedule\.keep_order: .*, not 'odd'"),
        (merged(sampling={"max_new_tokens": 0}), r"sampling\.max_new_tokens: .*1, not 0"),
        (merged(sampling={"max_new_tokens": 1.5}), r"sampling\.max_new_tokens: .*, not 1\.5"),
        (merged(sampling={"temperature": -0.1}), r"sampling\.temperature: .*, not -0\.1"),
        (merged(sampling={"top_p": 0}), r"sampling\.top_p: .*, not 0"),
        (merged(sampling={"seed": 2**63}), r"sampling\.seed: .*, not 9223372036854775808"),
        (merged(actors={"count": 0}), r"actors\.count: .*, not 0"),
        (merged(actors={"count": 2, "min": 1, "max": 2}), r"actors: give count, or min and max, not both$"),
        (merged(actors={"count": 2, "max": 2}), r"actors: give count, or min and max, not both$"),
        (merged(actors={"min": 1}), r"actors: min and max go together$"),
        (merged(actors={"min": 3, "max": 2}), r"actors: min = 3 lies above max = 2$"),
        (merged(sampling=7), r"sampling: .*, not 7"),
        (merged(max_row_errors=2), r"max_row_errors: .*, not 2"),
        (merged(shard_rows="many"), r"shard_rows: .*integer.*, not 'many'"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
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
    assert refusal(path) == f"{path}: unknown key storage.zzz; known: endpoint_url, region, retries"
    path = job_file(tmp_path)
    said = refusal(path, ["schedule.sped=2"])
    assert said == f"{path}: unknown key schedule.sped; did you mean speedup?"
    assert "did you mean sampling?" in refusal(path, ["samplin.top_k=2"])


def test_a_typing_error_is_told_before_what_follows_from_it(tmp_path: Path) -> None:
    path = job_file(tmp_path, {**JOB, "input": {"paht": "in"}})
    assert refusal(path) == f"{path}: unknown key input.paht; did you mean path? (and 1 more)"


def test_unknown_keys_of_a_tune_file_too(tmp_path: Path) -> None:
    values = {"model": {"path": "m"}, "data": {"train": "a", "dev": "b", "promt": "c"}, "output": "o"}
    path = job_file(tmp_path, values)
    assert refusal(path, kind=TuneConfig) == f"{path}: unknown key data.promt; did you mean prompt?"


def test_changes_are_values_of_yaml(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    changes = [
        "schedule.speedup=3",
        "sampling.temperature=0.5",
        "output.keep=[a, b]",
        "input.path=s3://bucket/x=1/*.parquet",
        "input.template={{ question }}",
        "model.compile=true",
        "shard_rows=null",
        " output.path =elsewhere",
    ]
    config = load_config(JobConfig, path, changes)
    assert config.schedule.speedup == 3 and config.sampling.temperature == 0.5
    assert config.output.keep == ["a", "b"] and config.output.path == "elsewhere"
    assert config.input.path == ["s3://bucket/x=1/*.parquet"] and config.input.template == "{{ question }}"
    assert config.model.compile and config.shard_rows is None
    assert load_config(JobConfig, path).schedule.speedup is None


def test_the_last_change_wins(tmp_path: Path) -> None:
    config = load_config(JobConfig, job_file(tmp_path), ["sampling.seed=1", "sampling.seed=2"])
    assert config.sampling.seed == 2


@pytest.mark.parametrize("change", ["sampling.seed", "=3", ".seed=3", "sampling.=3", "sampling..seed=3"])
def test_changes_of_another_shape_are_refused(tmp_path: Path, change: str) -> None:
    assert refusal(job_file(tmp_path), [change]) == f"--set {change}: must look like section.key=value"


def test_a_change_below_a_value_is_refused(tmp_path: Path) -> None:
    path = job_file(tmp_path, merged(shard_rows=4))
    assert refusal(path, ["shard_rows.x=3"]) == "--set shard_rows.x=3: shard_rows is not a section"


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file"
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    for text in ("input: [1, 2", "a: b: c", "- 1\n  x: {", "\t- a"):
        path = job_file(tmp_path, text)
        assert refusal(path).startswith(f"{path}: not valid YAML: ")
    for text in ("", "just words", "[1, 2]", "# nothing"):
        path = job_file(tmp_path, text)
        assert refusal(path) == f"{path}: must hold keys and values, such as `input:` and `output:`"
    path.write_bytes(b"\xff\xfe\xfa")
    assert refusal(path).startswith(f"{path}: cannot be read: ")


def test_a_date_that_is_none_names_the_file(tmp_path: Path) -> None:
    """YAML takes 2024-13-01 for a date, and Python refuses it with an error of its own."""
    path = job_file(tmp_path, "input: {path: 2024-13-01}")
    assert str(path) in refusal(path)
    config = load_config(JobConfig, job_file(tmp_path), ["output.path=2024-13-01"])
    assert config.output.path == "2024-13-01"


KEYS = st.sampled_from(
    [*sorted({name for section in SECTIONS for name in section.model_fields}), "x", "speed", "pathh", ""]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("abc\n: {", max_size=6)
    | st.sampled_from(["first", "error"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.booleans())
@settings(deadline=None)
def test_whatever_the_file_holds_it_is_a_job_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, values: Any, complete: bool
) -> None:
    if complete and isinstance(values, dict):
        values = {**JOB, **values}
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(values))
    said = ""
    try:
        load_config(JobConfig, path)
    except ValueError as error:
        said = str(error)
    assert not said or (said.startswith(f"{path}: ") and "\n" not in said)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_says_what_it_is(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        below = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        assert below or (field.description or "").strip(), f"{section.__name__}.{name} has no description"
