"""A run without Ray, killed at random moments between its first file and its last."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest
import ray_free_run
from fault_bench import SHARDS, Bench, Trial, digests

from pipeline.config.job import JobConfig, StorageConfig

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


def ended(processes: ForkServerContext, job: JobConfig, after: float | None = None) -> float:
    """Run the job to its end, or SIGKILL it after so many seconds; the seconds it lived."""
    process = processes.Process(target=ray_free_run.run, args=(job.model_dump(exclude_none=True),))
    process.start()
    began = time.monotonic()
    process.join(60 if after is None else after)
    if after is not None:
        process.kill()
        process.join()
    else:
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
        for earlier in range(KILLS):
            lived = ended(processes, job, chance.uniform(0, seconds))
            if "_SUCCESS" in bench.output(job).names():
                seconds = seconds if earlier else min(seconds, lived)  # the one above was slow: other work beside it
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
