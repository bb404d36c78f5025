"""Runs that are killed at random moments, and zombies, which sleep until another has done their work and wake up."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray_free_run
from cli_command import HANGING_SECONDS, Command, assert_released, wait_until
from fault_bench import SHARDS, Bench, Trial, digests, parts
from in_process import files_of, job_config
from in_process import parts as parts_of
from part_builders import FINGERPRINT, part, part_stats

from pipeline.commit.sink import clear_temporaries, commit
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.shards import Shard
from pipeline.storage.folder import Folder, LocalFolder, open_folder

TESTS = Path(__file__).parents[2]
SHARD = Shard(3, "in.parquet", 18, 6)

ATTEMPTS = """
import json, os, signal, sys
from part_builders import FINGERPRINT, part, part_stats
from pipeline.commit import sink
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard
from pipeline.storage.folder import open_folder

shard = Shard(3, "in.parquet", 18, 6)
data, stats = part(shard), part_stats(shard, node="zombie")

def asleep(call, when=lambda *args: True):
    def sleeping(*args, **keys):
        if when(*args):
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*args, **keys)
    return sleeping

def attempt(url, storage, where, result):
    folder = open_folder(url, StorageConfig(**storage))
    if where == "before its commit":
        sink.commit = asleep(sink.commit)
    elif where == "before the part gets its name":
        os.link = asleep(os.link)
    else:
        type(folder).create = asleep(type(folder).create, lambda self, name, data: name.endswith(".json"))
    try:
        said = repr(sink.commit(folder, shard, data, stats, FINGERPRINT))
    except OSError as error:
        said = type(error).__name__
    with open(result, "w") as file:
        file.write(said)

for case in json.loads(sys.argv[1]):  # each a process of its own, which need not import all this again
    pid = os.fork()
    if not pid:
        attempt(*case)
        os._exit(0)
    print(pid, flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
CASES = [
    ("local", "before its commit", "False"),
    ("s3", "before its commit", "False"),
    ("local", "before the part gets its name", "FileNotFoundError"),  # its half has been cleared away
    ("local", "before the record", "True"),  # its part was there; its record is rebuilt
]


def contents(folder: Folder) -> dict[str, Any]:
    """Every file, and when it was last written, but the lease's."""
    if isinstance(folder, LocalFolder):
        return {name: content for name, content in files_of(folder.path).items() if "/lease/" not in name}
    names = [f"{below}/{name}".strip("/") for below in ("", "_job", "_job/commits") for name in folder.names(below)]
    fs: Any = folder.fs  # type: ignore[attr-defined]
    return {name: (folder.read(name), fs.info(f"{folder.path}/{name}")["LastModified"]) for name in names}  # type: ignore[attr-defined]


@pytest.fixture
def asleep() -> Iterator[list[psutil.Process]]:
    """Processes that are killed at the end, whatever happens."""
    found: list[psutil.Process] = []
    yield found
    for process in found:
        if process.is_running():
            process.kill()


def test_attempts_that_wake_up_after_their_shard_was_committed_change_nothing(
    tmp_path: Path, s3: StorageConfig, asleep: list[psutil.Process]
) -> None:
    cases: list[tuple[Folder, str, str, Path]] = []
    for number, (store, where, says) in enumerate(CASES):
        url = f"s3://bucket/{uuid.uuid4().hex}" if store == "s3" else str(tmp_path / f"{number}")
        cases.append((open_folder(url, s3), where, says, tmp_path / f"{number}.txt"))
    path = os.pathsep.join([str(TESTS / "pipeline"), str(TESTS.parent)])
    given = [(folder.url, s3.model_dump(), where, str(result)) for folder, where, _, result in cases]
    zombies = subprocess.Popen(
        [sys.executable, "-c", ATTEMPTS, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert zombies.stdout is not None
    asleep.append(psutil.Process(zombies.pid))
    for _ in cases:
        asleep.append(psutil.Process(int(zombies.stdout.readline())))
    before = []
    for zombie, (folder, where, _, _) in zip(asleep[1:], cases, strict=True):
        wait_until(lambda zombie=zombie: zombie.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
        if isinstance(folder, LocalFolder):
            clear_temporaries(folder)  # as the next run does
        first = commit(folder, SHARD, part(SHARD), part_stats(SHARD, node="alive"), FINGERPRINT)
        assert first == (where != "before the record")
        folder.replace("_SUCCESS", b"{}")
        before.append(contents(folder))
        assert len(before[-1]) == 3
    time.sleep(1.1)  # the store's times are whole seconds
    for zombie in asleep[1:]:
        zombie.resume()
    assert zombies.wait(timeout=HANGING_SECONDS) == 0
    for (folder, where, says, result), was in zip(cases, before, strict=True):
        assert (where, result.read_text()) == (where, says)
        assert contents(folder) == was


RUN = """
import sys
from pipeline.commit import lease
lease.BEAT_SECONDS, lease.WATCH_SECONDS = 0.5, 5.0
from pipeline.cli.app import app
app(["run", sys.argv[1]])
"""


class WatchingCommand(Command):
    """The command with a lease that is taken over after five seconds."""

    arguments = ("-c", RUN)


@pytest.mark.ray
@pytest.mark.slow
def test_a_whole_run_that_wakes_up_after_it_was_replaced_changes_nothing(
    tmp_path: Path, checkpoint: Path, asleep: list[psutil.Process]
) -> None:
    """Driver, raylet and workers of the first run stop; a second one takes over and finishes; the first goes on."""
    table = pa.table({"id": list(range(96)), "prompt": [f"alpha {row}" for row in range(96)]})
    pq.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / "out"
    own: dict[str, Any] = {"input": {"id": "id"}, "sampling": {"max_new_tokens": 24, "ignore_eos": True}}
    job = job_config(tmp_path / "in.parquet", output, checkpoint, **own, actors={"max_batch": 2}, shard_rows=4)
    first = WatchingCommand(tmp_path, job)
    first.wait_for_parts(output, 2)
    driver = psutil.Process(first.process.pid)
    asleep += [driver, *driver.children(recursive=True)]
    for process in asleep:
        process.suspend()
    early = parts_of(output)
    assert len(early) < 24
    code, _, err = WatchingCommand(tmp_path, job).end()
    assert code == 0, err
    assert f"taking over the lease of process {driver.pid} on " in err
    assert_released(output)
    finished = contents(open_folder(str(output), job.storage))
    assert len(parts_of(output)) == 24 and early.items() <= parts_of(output).items()
    for process in asleep:
        if process.is_running():
            process.resume()
    code, _, err = first.end()
    assert code == 5, err
    assert "another run has taken over" in err.splitlines()[-1] and "Traceback" not in err
    after = contents(open_folder(str(output), job.storage))
    passing = ("/_job/tmp/", "/_job/quarantine/")  # which the next command clears away
    assert {name: one for name, one in after.items() if not any(part in name for part in passing)} == finished
    first.assert_nothing_left()
    assert json.loads((output / "_SUCCESS").read_text())["rows"] == 96


TRIALS, KILLS = 3, 3  # jobs of each store, at least; kills of each job, at most
UNFINISHED = 6  # kills before the job's end, at least
IMPORTED_WHILE_PLANNING = (  # takes seconds
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "transformers.convert_slow_tokenizer",
    "pyarrow.pandas_compat",
    "pandas",
    "s3fs",
    "aiobotocore.session",
    "boto3",
)


@pytest.fixture(scope="module")
def processes(s3: StorageConfig) -> Iterator[ForkServerContext]:
    """Processes forked from one that has imported everything, has no threads, and knows the credentials of `s3`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ray_free_run", *IMPORTED_WHILE_PLANNING])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server does not get our path otherwise
        yield context


@pytest.fixture(scope="module", params=["local", "s3"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    if request.param == "local":
        return Bench(folder, str(folder / "outputs"), StorageConfig())
    return Bench(folder, f"s3://bucket/{folder.name}", request.getfixturevalue("s3"))


def started(processes: ForkServerContext, job: JobConfig) -> ForkServerProcess:
    process = processes.Process(target=ray_free_run.run, args=(job.model_dump(exclude_none=True),))
    process.start()
    return process


def ended(processes: ForkServerContext, job: JobConfig) -> float:
    """Run the job to its end; how many seconds it took."""
    began, process = time.monotonic(), started(processes, job)
    process.join(HANGING_SECONDS)
    assert process.exitcode == 0
    return time.monotonic() - began


def test_killed_at_any_moment_the_same_run_finishes(bench: Bench, processes: ForkServerContext) -> None:
    whole = bench.job()
    ended(processes, whole)  # the first one waits for the imports
    seconds = ended(processes, bench.job())
    print(f"an undisturbed run takes {seconds:.2f} s")
    bench.undisturbed = digests(bench.output(whole))
    assert len(bench.undisturbed) == SHARDS
    chance = random.Random(3)
    unfinished = 0
    for seed in range(5 * TRIALS):
        job = bench.job()
        for count in sorted(chance.choices(range(SHARDS), k=KILLS)):
            process = started(processes, job)
            wait_until(lambda: len(parts(bench.output(job))) >= count or not process.is_alive(), every=0.02)  # noqa: B023
            process.join(chance.uniform(0, seconds / (SHARDS if count else 1)))
            process.kill()
            process.join()
            if "_SUCCESS" in bench.output(job).names():
                break
            unfinished += 1
        ended(processes, job)
        trial = bench.look(job, Trial("driver", seed))
        assert trial.identical and not trial.problem, trial  # its rows' ids are made up
        output = bench.output(job)
        assert output.names("_job/tmp") == []
        [term] = output.names("_job/lease")
        assert json.loads(output.read(f"_job/lease/{term}"))["released"]
        if seed + 1 >= TRIALS and unfinished >= UNFINISHED:
            return
    raise AssertionError(f"{unfinished} of the kills hit an unfinished run")
