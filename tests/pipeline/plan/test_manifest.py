"""A job is the same job as long as nothing that can change an answer differs, and its files stay what they were."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess
from memory_folder import MemoryFolder
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.cli.app import app
from pipeline.config.job import ActorsConfig, JobConfig, StorageConfig
from pipeline.plan import inputs as inputs_module
from pipeline.plan import manifest as manifests
from pipeline.plan import plan_files
from pipeline.plan.batching import chosen_scheduler
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import Manifest, coverage_problems, difference, plan_job
from pipeline.plan.plan_files import INPUTS, JOB, PLAN, SCHEMA, load, save
from pipeline.run import ray_session
from pipeline.storage.folder import Folder, open_folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two files of 6 and 4 rows."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, rows in (("a", 6), ("b", 4)):
        pq.write_table(table(rows), folder / f"{name}.parquet")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_folder(str(tmp_path / "out"), StorageConfig())


def table(rows: int, **columns: Any) -> pa.Table:
    prompts = pa.array([f"prompt {row}" for row in range(rows)], pa.string())
    return pa.table({"id": list(range(rows)), "prompt": prompts, "topic": ["t"] * rows, **columns})


def job(inputs: Path | list[str], checkpoint: Path, **sections: Any) -> JobConfig:
    paths = inputs if isinstance(inputs, list) else str(inputs)
    return JobConfig.model_validate(
        {
            **{key: value for key, value in sections.items() if key not in ("input", "output", "model")},
            "input": {"path": paths, **sections.get("input", {})},
            "output": {"path": "out", **sections.get("output", {})},
            "model": {"path": str(checkpoint), **sections.get("model", {})},
        }
    )


def plan(config: JobConfig, limit: int | None = None, stored: Manifest | None = None) -> Manifest:
    resolved = resolve_checkpoint(config.model, config.storage)
    return plan_job(config, resolved, resolved.checkpoint.schedule(config.schedule.changes()), limit, stored)


def refusal(config: JobConfig, stored: Manifest | None = None) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        plan(config, stored=stored)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "actors", "limit", "shard_rows"),
    [
        (10, {}, None, 3),
        (10, {"count": 2}, None, 2),
        (10, {"min": 1, "max": 5}, None, 1),
        (10, {}, 5, 2),
        (10, {}, 100, 3),
        (5_000, {}, None, 256),
        (5_000, {"max_batch": 1024}, None, 1024),
        (40_000, {"count": 2}, None, 625),
        (300_000, {"count": 2}, None, 4096),
    ],
)
def test_an_actor_gets_4_shards_of_a_small_job_and_32_of_a_larger_one(
    tmp_path: Path, checkpoint: Path, rows: int, actors: dict[str, int], limit: int | None, shard_rows: int
) -> None:
    pq.write_table(table(rows), tmp_path / "a.parquet")
    manifest = plan(job(tmp_path / "a.parquet", checkpoint, actors=actors), limit)
    assert manifest.batching.shard_rows == shard_rows
    most = actors.get("max", actors.get("count", 1))
    assert len(manifest.shards) >= most
    assert all(shard.rows <= shard_rows for shard in manifest.shards)


@pytest.mark.parametrize(("engine", "gpus", "rows"), [("builtin", 1, 64), ("vllm", 0, 256), ("vllm", 1, 1024)])
def test_rows_in_flight_depend_on_engine_and_device(
    tmp_path: Path, checkpoint: Path, engine: str, gpus: int, rows: int
) -> None:
    config = job(tmp_path, checkpoint, model={"path": str(checkpoint), "engine": engine}, actors={"gpus": gpus})
    assert config.rows_in_flight == rows


@pytest.mark.parametrize(
    ("node", "actors", "threads", "cache"),
    [
        ((8, 2**30, 1), {"count": 2}, 4, 2**27),
        ((8, 2**30, 1), {"min": 1, "max": 3}, 2, 2**28 // 3),
        ((8, 2**40, 4), {"count": 6}, 4, 2**30),  # two of them on some nodes
        ((2, 2**40, 1), {"count": 5}, 1, 2**30),
        ((8, 2**30, 1), {"count": 2, "threads": 3}, 3, 2**27),
    ],
)
def test_threads_and_cache_are_those_of_the_nodes_and_not_of_the_drivers_machine(
    inputs: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: tuple[int, int, int],
    actors: dict[str, int],
    threads: int,
    cache: int,
) -> None:
    monkeypatch.setattr(InProcess, "node", lambda *_: node)
    batching = jobs.plan(job(inputs, checkpoint, actors=actors), None, InProcess()).manifest.batching
    assert (batching.threads, batching.cache_bytes) == (threads, cache)


def test_an_actor_asks_for_the_cpus_of_its_planned_threads(
    inputs: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "node", lambda *_: (8, 2**40, 2))
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: False)
    planned = jobs.plan(job(inputs, checkpoint, actors={"count": 4}), None, InProcess()).config.actors
    assert ray_session.actor_cpus(planned) == planned.threads == 4
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: True)
    for cpus, each in ((16, 4), (3, 0.75), (1, 0.25)):
        monkeypatch.setattr(ray_session, "process_cpus", lambda cpus=cpus: cpus)
        assert ray_session.actor_cpus(planned) == each
    monkeypatch.setattr(ray_session, "process_cpus", lambda: 2)
    assert 3 * ray_session.actor_cpus(ActorsConfig(count=3)) <= 2
    assert ray_session.actor_cpus(ActorsConfig(count=3, cpus=1.5, threads=2)) == 1.5


@pytest.mark.parametrize(
    ("keys", "scheduler"),
    [
        ({"schedule": {"speedup": 2, "horizon": 10}, "sampling": {"max_new_tokens": 30}}, "lock_step"),
        ({"schedule": {"speedup": 2, "horizon": 10}, "sampling": {"max_new_tokens": 31}}, "refill"),
        ({"schedule": {"horizon": 10}, "sampling": {"max_new_tokens": 9}, "actors": {"max_batch": 16}}, "refill"),
        (
            {"schedule": {"speedup": 2, "horizon": 10}, "sampling": {"max_new_tokens": 50, "ignore_eos": True}},
            "lock_step",
        ),
        ({"sampling": {"max_new_tokens": 50, "ignore_eos": True, "stop": ["."]}}, "refill"),
        ({"sampling": {"max_new_tokens": 50}}, "refill"),
        ({"sampling": {"max_new_tokens": 50, "ignore_eos": True, "stop_token_ids": [7]}}, "refill"),
        ({"sampling": {"max_new_tokens": 18}}, "lock_step"),  # the checkpoint's horizon is 6
        ({"sampling": {"max_new_tokens": 19}}, "refill"),
        ({"sampling": {"max_new_tokens": 50}, "choices": ["a", "b"]}, "lock_step"),
        ({"sampling": {"max_new_tokens": 50}, "actors": {"scheduler": "lock_step"}}, "lock_step"),
    ],
)
def test_the_plan_chooses_a_scheduler(inputs: Path, checkpoint: Path, keys: dict[str, Any], scheduler: str) -> None:
    first = plan(job(inputs, checkpoint, **keys))
    assert first.batching.scheduler == scheduler
    again = plan(job(inputs, checkpoint, **{**keys, "actors": {}}), stored=first)
    assert again.batching.scheduler == scheduler


def test_labels_of_each_row_take_the_scheduler_of_labels(inputs: Path, checkpoint: Path) -> None:
    config = job(inputs, checkpoint, input={"choices": "labels"}, sampling={"max_new_tokens": 50})
    assert chosen_scheduler(config, resolve_checkpoint(config.model, config.storage).checkpoint) == "lock_step"


def test_a_plan_survives_its_files(inputs: Path, checkpoint: Path, folder: Folder) -> None:
    assert load(folder) is None
    manifest = plan(job(inputs, checkpoint, shard_rows=4, schedule={"speedup": 2}), 9)
    save(folder, manifest)
    assert folder.names("_job") == [Path(name).name for name in (INPUTS, JOB, PLAN, SCHEMA)]
    assert load(folder) == manifest
    assert plan(job(inputs, checkpoint, shard_rows=4, schedule={"speedup": 2}), 9, load(folder)) == manifest


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"format": 0}', b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_plan_that_cannot_be_read_is_named(inputs: Path, checkpoint: Path, folder: Folder, text: bytes) -> None:
    save(folder, plan(job(inputs, checkpoint)))
    folder.replace(JOB, text)
    with pytest.raises(UserError, match=r"(damaged|plan has format).*start again with --overwrite") as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder.url}/{JOB}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "constant", "says"),
    [(plan_files, "FORMAT", "plan has format"), (manifests, "ANSWERS_VERSION", "answers have version")],
)
def test_an_output_of_another_version_is_refused_and_both_are_named(
    tmp_path: Path, inputs: Path, checkpoint: Path, module: ModuleType, constant: str, says: str
) -> None:
    config, known = job(inputs, checkpoint, output={"path": str(tmp_path / "out")}), getattr(module, constant)
    file, out = tmp_path / "job.yaml", open_folder(config.output.path, StorageConfig())
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", include={"input", "output", "model"})))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, constant, known - 1)
        save(out, plan(config))
    for command in (["run", str(file)], ["report", out.url], ["report", out.url, "--verify"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and "\n" not in done.stderr.strip(), done.output
        assert f"{says} {known - 1}, but this version of skipdecode reads {known};" in done.stderr


@pytest.mark.parametrize("name", [INPUTS, PLAN, SCHEMA])
def test_a_plan_of_which_a_part_is_gone_is_named(inputs: Path, checkpoint: Path, folder: Folder, name: str) -> None:
    save(folder, plan(job(inputs, checkpoint)))
    folder.remove(name)
    with pytest.raises(UserError, match=rf"^{folder.url}/{name}: missing; .*start again with --overwrite$"):
        load(folder)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_flipped_bit_of_a_plan_is_refused(saved_plan: dict[str, bytes], data: st.DataObject) -> None:
    """A shard that begins at another row would lose rows and repeat others, and nothing would notice."""
    folder = MemoryFolder(dict(saved_plan))
    assert load(folder) is not None
    name = data.draw(st.sampled_from([JOB, PLAN, INPUTS, SCHEMA]))
    text = bytearray(folder.read(name))
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    folder.replace(name, bytes(text))
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith(f"root/{name}: ") and message.isprintable() and "--overwrite" in message


@pytest.fixture
def saved_plan(inputs: Path, checkpoint: Path) -> dict[str, bytes]:
    """Files of a saved plan."""
    folder = MemoryFolder()
    save(folder, plan(job(inputs, checkpoint, shard_rows=2)))
    return folder.files


def test_shards_cover_each_file_once(inputs: Path, checkpoint: Path) -> None:
    for limit in (None, 1, 7, 99):
        manifest = plan(job(inputs, checkpoint, shard_rows=2), limit)
        assert coverage_problems(manifest) == []
    manifest = plan(job(inputs, checkpoint, shard_rows=2))
    shards = manifest.shards
    for wrong in (
        shards[:-1],
        shards[1:],
        [*shards[:1], replace(shards[1], first_row=1), *shards[2:]],
        [*shards[:2], replace(shards[2], rows=1), *shards[3:]],
        [*shards[:4], replace(shards[4], rows=3)],
        [replace(shards[0], url="elsewhere"), *shards[1:]],
        [*shards, shards[-1]],
    ):
        assert coverage_problems(replace(manifest, shards=wrong))
    assert coverage_problems(replace(plan(job(inputs, checkpoint, shard_rows=2), 7), shards=shards[:3]))


def test_the_package_version_is_not_part_of_the_job(
    inputs: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch release finishes the jobs of the release before; code that answers otherwise raises ANSWERS_VERSION."""
    config = job(inputs, checkpoint)
    stored = plan(config)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert plan(config, stored=stored).fingerprint == stored.fingerprint
    monkeypatch.setattr(manifests, "ANSWERS_VERSION", manifests.ANSWERS_VERSION + 1)
    assert difference(stored.identity, plan(config, stored=stored).identity) == ["answers_version"]


@pytest.mark.parametrize(
    "sections",
    [
        {"actors": {"count": 3, "cpus": 2, "threads": 2, "max_batch": 5, "cache_bytes": 1000, "scheduler": "refill"}},
        {"actors": {"min": 1, "max": 4, "gpus": 1}},
        {"storage": {"region": "eu-west-1", "retry_seconds": 2}},
        {"output": {"path": "elsewhere"}},
        {"max_error_rate": 0.5, "attempts": 1},
        {"schedule": {"unadapted": True}},
        {"shard_rows": 3},
        {"adapt": {"rows": 10, "held_out": 2}},
    ],
)
def test_where_and_how_fast_is_not_what(inputs: Path, checkpoint: Path, sections: dict[str, Any]) -> None:
    """Sections that a job may be finished with, although it began with others."""
    plain = plan(job(inputs, checkpoint))
    other = plan(job(inputs, checkpoint, **sections), stored=plain)
    assert other.fingerprint == plain.fingerprint and difference(plain.identity, other.identity) == []


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"sampling": {"seed": 1}}, ["sampling.seed"]),
        ({"sampling": {"max_new_tokens": 9, "top_k": 3}}, ["sampling.max_new_tokens", "sampling.top_k"]),
        ({"input": {"template": "{{ prompt }}!"}}, ["input.template"]),
        ({"input": {"template": "{{ prompt | tojson }}"}}, ["input.template"]),
        ({"input": {"too_long": "truncate_left"}}, ["input.too_long"]),
        ({"input": {"special_tokens": "text"}}, ["input.special_tokens"]),
        ({"output": {"keep": ["topic"]}}, ["output.keep"]),
        ({"model": {"dtype": "float32"}}, ["model.dtype"]),
        ({"model": {"weights": "int8"}}, ["model.weights"]),
        ({"schedule": {"speedup": 1}}, ["schedule.depths", "schedule.speedup"]),
        ({"choices": ["a", "b"]}, ["choices"]),
        ({"shard_rows": 2}, ["shard_rows"]),
        ({"shard_bytes": 1000}, ["shard_bytes"]),
        ({"shared_prefix": False}, ["shared_prefix"]),
        ({"schedule": {"prompt": "first"}}, ["schedule.prompt"]),
    ],
)
def test_what_changes_answers_is_named(
    inputs: Path, checkpoint: Path, sections: dict[str, Any], names: list[str]
) -> None:
    plain, other = plan(job(inputs, checkpoint)), plan(job(inputs, checkpoint, **sections))
    assert other.fingerprint != plain.fingerprint
    assert difference(plain.identity, other.identity) == names
    assert difference(other.identity, plain.identity) == names


def test_limit_checkpoint_and_input_files_are_part_of_the_job(inputs: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = job(inputs, checkpoint, shard_rows=4)
    plain = plan(config)
    assert plan(config).fingerprint == plain.fingerprint
    assert difference(plain.identity, plan(config, 5).identity) == ["limit"]

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert plan(job(inputs, copy, shard_rows=4)).fingerprint == plain.fingerprint
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    assert difference(plain.identity, plan(job(inputs, copy, shard_rows=4)).identity) == ["model.files.tokenizer.json"]
    (copy / "extra.json").write_text("{}")
    (copy / "README.md").write_text("no part of the model")
    assert difference(plain.identity, plan(job(inputs, copy, shard_rows=4)).identity) == [
        "model.files.extra.json",
        "model.files.tokenizer.json",
    ]

    pq.write_table(table(5), inputs / "b.parquet")
    changed = plan(config)
    assert changed.fingerprint != plain.fingerprint
    assert difference(plain.identity, changed.identity) == ["input.files"]


def test_pinned_files_that_changed_or_went_are_refused(inputs: Path, checkpoint: Path) -> None:
    config = job(inputs, checkpoint)
    stored = plan(config)
    path = inputs / "b.parquet"
    data, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    assert plan(config, stored=stored) == stored

    path.write_bytes(data)
    os.utime(path, ns=times)
    assert plan(config, stored=stored) == stored
    path.write_bytes(data + b"x")
    os.utime(path, ns=times)
    said = refusal(config, stored)
    assert said.startswith(f"{path}: changed since the job began ({len(data)} bytes then, {len(data) + 1} now)")
    path.unlink()
    assert refusal(config, stored).startswith(f"{path}: gone since the job began")


def test_a_file_uploaded_again_with_the_same_bytes_is_unchanged(
    inputs: Path, checkpoint: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(inputs, checkpoint)
    save(folder, plan(config))
    stored = load(folder)
    assert stored is not None
    path = inputs / "b.parquet"
    data = path.read_bytes()
    os.utime(path, ns=(1, 1))
    again = plan(config, stored=stored)
    assert again.fingerprint == stored.fingerprint and again.shards == stored.shards
    assert [file.version for file in again.files] == [stored.files[0].version, "1"]  # as the read tasks find it
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    assert refusal(config, stored).startswith(f"{path}: changed since the job began (same size, other content)")
    path.write_bytes(data)
    monkeypatch.setattr(inputs_module, "DIGEST_BYTES", len(data))  # too much to hash: the time alone decides
    stored = plan(config)
    assert [file.digest for file in stored.files] == ["", ""]
    os.utime(path, ns=(1, 1))
    assert refusal(config, stored).startswith(f"{path}: changed since the job began (same size, no digest")


def test_newer_files_are_left_for_another_run(inputs: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = job(inputs, checkpoint)
    stored = plan(config)
    pq.write_table(table(3), inputs / "0.parquet")
    with caplog.at_level(logging.WARNING):
        assert plan(config, stored=stored) == stored
    assert (
        f"1 input files are newer than the job, and are not part of the job; the first is {inputs}/0.parquet"
        in caplog.text
    )


def test_a_resumed_job_keeps_its_batching(inputs: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    actors = {"max_batch": 5, "threads": 1, "scheduler": "refill", "cache_bytes": 12_345}
    stored = plan(job(inputs, checkpoint, shard_rows=4, shard_bytes=99_999, actors=actors))
    batching = stored.batching
    assert (batching.shard_rows, batching.shard_bytes, batching.cache_bytes) == (4, 99_999, 12_345)
    assert (batching.max_batch, batching.threads, batching.scheduler) == (5, 1, "refill")
    with caplog.at_level(logging.WARNING):
        later = job(inputs, checkpoint, shard_bytes=99_999, actors={"count": 4, "max_batch": 2, "threads": 1})
        again = plan(later, stored=stored)
    assert again == stored
    assert [record.getMessage() for record in caplog.records] == [
        "actors.max_batch = 2 is ignored: this job was planned with 5"
    ]


@pytest.mark.parametrize(
    ("given", "output", "said"),
    [
        ("~/in", "~/in", "~/in holds the input file ~/in/a.parquet"),
        ("~/in", "~", "~ holds the input file ~/in/a.parquet"),
        ("~/in", "~/in/", "~/in/ holds the input file ~/in/a.parquet"),
        ("~/in", "~/in/answers", "~/in/answers lies in the input folder ~/in"),
        ("~/in", "~/link/answers", "~/link/answers lies in the input folder ~/in"),
        ("~/link", "~/in/answers", "~/in/answers lies in the input folder ~/link"),
        ("~/in", "~/link", "~/link holds the input file ~/in/a.parquet"),
        ("~/in/*.parquet", "~/link", "~/link holds the input file ~/in/a.parquet"),
        ("~/linked", "~/link", "~/link holds the input file ~/linked/one.parquet"),
        ("~/in/*/*.parquet", "~/in/answers", "the input glob ~/in/*/*.parquet matches files in ~/in/answers"),
        ("~/**/*.parquet", "~/in/answers", "the input glob ~/**/*.parquet matches files in ~/in/answers"),
        ("~/*/*", "~/answers", "the input glob ~/*/* matches files in ~/answers"),
        ("~/i*/part-*.parquet", "~/in-out", "the input glob ~/i*/part-*.parquet matches files in ~/in-out"),
    ],
)
def test_answers_do_not_go_where_the_input_lies_or_would_be_read_as_input(
    inputs: Path, checkpoint: Path, given: str, output: str, said: str
) -> None:
    """At the first plan: later runs would list the job's own parts as input, also with --overwrite. ~: a folder."""
    home = inputs.parent
    for copy in (inputs / "part-a.parquet", inputs / "deep" / "part-a.parquet"):
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((inputs / "a.parquet").read_bytes())
    (home / "link").symlink_to(inputs)
    (home / "linked").mkdir()
    (home / "linked" / "one.parquet").symlink_to(inputs / "a.parquet")
    given, output, said = (text.replace("~", str(home)) for text in (given, output, said))
    assert refusal(job([given], checkpoint, output={"path": output})) == f"output.path: {said}; choose another folder"
    for apart in (f"{inputs}-answers", str(inputs)[:-1]) if given == str(inputs) else ():
        assert plan(job([given], checkpoint, output={"path": apart})).rows == 22
    if "*/" in given and "**" not in given:
        assert plan(job([given], checkpoint, output={"path": f"{home}/far/from/here"})).rows >= 6


def test_an_output_folder_that_holds_the_input_is_refused_before_files_are_listed(
    inputs: Path, checkpoint: Path
) -> None:
    (inputs.parent / "link").symlink_to(inputs)
    for output in (inputs, inputs.parent / "link", inputs.parent):
        said = rf"^output.path: {output} holds the input {inputs}; choose another folder$"
        with pytest.raises(UserError, match=said):
            check_output_disjoint(job(inputs, checkpoint, output={"path": str(output)}))


def test_input_of_the_wrong_shape_is_refused(inputs: Path, checkpoint: Path) -> None:
    a, b = inputs / "a.parquet", inputs / "b.parquet"
    said = refusal(job(inputs, checkpoint, input={"prompt": "question"}))
    assert said == f"{a}: no column 'question'; it has id, prompt, topic"
    assert f"{a}: no column 'x'" in refusal(job(inputs, checkpoint, input={"template": "{{ prompt }} {{ x }}"}))
    said = refusal(job(inputs, checkpoint, input={"prompt": "id"}))
    assert said == f"{a}: column 'id' is int64; a prompt must be a string or a list of token ids"

    pq.write_table(table(4).drop_columns("prompt"), b)
    assert refusal(job(inputs, checkpoint)) == f"{b}: no column 'prompt'; it has id, topic"
    pq.write_table(table(4, topic=[1, 2, 3, 4]), b)
    assert plan(job(inputs, checkpoint)).rows == 10
    said = refusal(job(inputs, checkpoint, output={"keep": ["topic"]}))
    assert said == f"{b}: column 'topic' is int64, but string in {a}; convert one of them"

    for path in (a, b):
        pq.write_table(table(0), path)
    assert refusal(job(inputs, checkpoint)) == f"{inputs}: no rows in 2 files"
    assert refusal(job(a, checkpoint)) == f"{a}: no rows in 1 file"
    pq.write_table(table(1), b)
    assert plan(job(inputs, checkpoint)).rows == 1


def test_one_schema_is_pinned_for_all_files(inputs: Path, checkpoint: Path, folder: Folder) -> None:
    """Of the columns that are needed, in their order, whatever the files say of themselves."""
    prompts = pa.array(["x", "y"], pa.large_string())
    other = pa.table({"more": [1, 2], "topic": pa.nulls(2), "prompt": prompts, "id": pa.array([1, 2], pa.int16())})
    pq.write_table(other.replace_schema_metadata({"of": "c"}), inputs / "c.parquet")
    manifest = plan(job(inputs, checkpoint, input={"id": "id"}, output={"keep": ["topic"]}))
    expected = [("id", pa.int64()), ("prompt", pa.large_string()), ("topic", pa.string())]
    assert manifest.schema.equals(pa.schema(expected), check_metadata=True)
    save(folder, manifest)
    stored = load(folder)
    assert stored is not None and stored.schema.equals(manifest.schema, check_metadata=True)
    pq.write_table(table(2, topic=[1, 2]), inputs / "d.parquet")  # a file that appears later has no say
    assert plan(job(inputs, checkpoint, input={"id": "id"}, output={"keep": ["topic"]}), stored=stored) == stored
