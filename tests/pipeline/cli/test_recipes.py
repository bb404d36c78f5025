"""Every recipe runs as its README says, with the demo's model in place of the one of `make real-model`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import boto3
import pyarrow.parquet as pq
import pytest
import torch
from in_process import answered_rows
from safetensors.torch import load_file
from shown_commands import ROOT, blocks, printed_lines, run_commands

from pipeline.config.job import JobConfig, StorageConfig
from pipeline.config.load import load_config

RECIPES = ROOT / "configs" / "recipes"
MODEL = ROOT / "work" / "real" / "model"
ELSEWHERE = {  # recipe -> the test that runs its programs, or checks its files
    "lakehouse": "tests/pipeline/cli/test_lakehouse.py",
    "ray_data": "tests/pipeline/job/test_ray_data.py",
    "slurm": "tests/infra/test_slurm.py",
    "spot": "tests/infra/test_kubernetes.py",
    "vllm": "tests/vllm_addon/test_published.py",
}
HERE = sorted({path.name for path in RECIPES.iterdir() if path.is_dir()} - set(ELSEWHERE))
OWN_MODEL = ("nightly", "hive")  # recipes with the demo's model
SAMPLED = "samples"  # a file's path decides samples too
END_OF_THINKING = "e"  # of the demo's model, which writes no </think>
SILENT = ("spot",)  # was never applied
VARYING = {  # what depends on the model or the day, and what replaces it
    r"(  answer: ).*": r"\1…",
    r"(labels: ).*": r"\1…",
    r"\d+( of \d+ right)": r"…\1",
    r"\d{4}-\d\d-\d\dT[\d:-]+Z": "…",
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder stands for a clone."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_model(clone: Path) -> None:
    """Put the demo's model where `make real-model` puts the real one."""
    model = shutil.copytree(ROOT / "configs" / "demo" / "checkpoint", clone / "work" / "real" / "model")
    (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }} {% endfor %}")


def check_columns(folder: Path) -> None:
    """The answers as columns are those as text."""
    answers = [row for row in answered_rows(folder / "extract") if row["error"] is None]
    columns = pq.read_table(folder / "extract.parquet").to_pylist()
    assert columns and columns == [{"id": row["id"], **json.loads(row["generated_text"])} for row in answers]


def check_second_job(folder: Path) -> None:
    """Only the rows with an error are answered again."""
    assert [row["id"] for row in answered_rows(folder / "failed") if row["error"]] == [2, 4]
    again = answered_rows(folder / "failed-again")
    assert [(row["id"], row["error"]) for row in again] == [(2, None), (4, None)]


def check_labels(folder: Path) -> None:
    """A row has a label after its thinking, or the limit has cut its thinking off."""
    rows = answered_rows(folder / "thinking")
    assert all(row["reasoning"] and END_OF_THINKING not in row["reasoning"] for row in rows)
    labelled = [row["generated_text"] for row in rows if row["error"] is None]
    assert len(labelled) > 8 and {*labelled} <= {"billing", "bug", "account", "shipping"}
    assert all("cut off" in row["error"] for row in rows if row["error"] is not None)


def check_merged(folder: Path) -> None:
    """The merged model is the base with other linear layers, without the record of the base's training."""
    base, merged = (load_file(Path(name) / "model.safetensors") for name in ("work/real/model", folder / "lora-model"))
    assert base.keys() == merged.keys()
    assert all(torch.equal(base[name], merged[name]) == ("_proj" not in name) for name in base)
    assert not (folder / "lora-model" / "skipdecode.json").exists()


WRITTEN = {  # recipe -> what its programs write
    "extract": check_columns,
    "failed": check_second_job,
    "lora": check_merged,
    "thinking": check_labels,
}


def commands(name: str, *changes: str) -> list[str]:
    """Those of a recipe's README, each `run` with changes."""
    added = "".join(f" --set {change}" for change in changes)
    return [line + added * line.startswith("skipdecode run") for line in blocks(f"configs/recipes/{name}/README.md")[0]]


def shown(name: str) -> list[str]:
    """The lines that a recipe's README says are printed."""
    return printed_lines(f"configs/recipes/{name}/README.md")


def masked(lines: list[str]) -> Counter[str]:
    """The lines without what varies, and how often each occurs."""
    text = "\n".join(lines)
    for pattern, instead in VARYING.items():
        text = re.sub(pattern, instead, text)
    return Counter(line.rstrip() for line in text.splitlines())


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", HERE)
def test_a_recipe_runs(
    name: str, clone: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """And prints what its README shows, with what varies masked."""
    with_model(clone)
    if name != "hive":
        thinking = [f"reasoning.end={END_OF_THINKING}"] * (name == "thinking")
        said = run_commands(commands(name, "max_error_rate=1", "shard_rows=64", *thinking))
    else:
        s3: StorageConfig = request.getfixturevalue("s3")
        make, upload, run = commands(name, f"storage.endpoint_url={s3.endpoint_url}")
        run_commands([make])
        source, target = Path(upload.split()[-2]), upload.split()[-1].removeprefix("s3://bucket/")
        for path in source.rglob("*.parquet"):
            boto3.client("s3", endpoint_url=s3.endpoint_url).upload_file(
                str(path), "bucket", f"{target}/{path.relative_to(source)}"
            )
        said = run_commands([run])
    printed = "".join(said) + capfd.readouterr().out
    assert masked(shown(name)) <= masked(printed.splitlines()), printed
    if name == "hive":
        assert "4 rows in " in printed
        return
    if name in WRITTEN:
        WRITTEN[name](clone / "work" / "recipes")
    for file in (RECIPES / name).glob("*.yaml"):
        config = load_config(JobConfig, file, [])
        parts = list(Path(config.output.path).rglob("part-*.parquet"))
        assert sum(pq.read_metadata(part).num_rows for part in parts) > 0, file


@pytest.mark.usefixtures("in_process")
def test_a_limit_stops_a_job_that_the_same_command_resumes(clone: Path) -> None:
    with_model(clone)
    changes = ("max_error_rate=1", "shard_rows=1")
    *limit, program, run, job = shlex.split(blocks("configs/recipes/summarise/README.md")[1][0])
    assert (limit[0], program) == ("timeout", "skipdecode")
    limited = [*limit, sys.executable, str(ROOT / "tests/pipeline/limited_run.py"), run, job]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "pipeline")])
    done = subprocess.run(
        [*limited, *(word for change in changes for word in ("--set", change))],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 4 and "interrupted (SIGTERM)" in done.stderr, done.stderr
    output = Path(load_config(JobConfig, clone / job, []).output.path)
    before = {part: part.stat().st_mtime_ns for part in output.glob("part-*.parquet")}
    assert 0 < len(before) < 3
    run_commands(commands("summarise", *changes))
    assert len(list(output.glob("part-*.parquet"))) == 3 and (output / "_SUCCESS").is_file()
    assert {part: part.stat().st_mtime_ns for part in before} == before


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="no model in work/real/model: make real-model")
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", [name for name in HERE if name not in (*OWN_MODEL, SAMPLED)])
def test_a_recipe_prints_what_its_readme_shows(name: str, clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (clone / "work" / "real").mkdir(parents=True)
    (clone / "work" / "real" / "model").symlink_to(MODEL)
    printed = "\n".join(run_commands(commands(name))) + capfd.readouterr().out
    assert set(shown(name)) <= set(printed.splitlines())


def test_recipes_are_small_and_listed() -> None:
    listed = (RECIPES / "README.md").read_text()
    for name in (*HERE, *ELSEWHERE):
        assert f"({name}/README.md)" in listed
        assert bool(shown(name)) == (name not in SILENT), name
        assert all(len(file.read_text().splitlines()) < 20 for file in (RECIPES / name).glob("*.yaml"))
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []
