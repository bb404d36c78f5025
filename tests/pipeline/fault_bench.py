"""A small job, its parts when it is not disturbed, and a check of the output of a disturbed run."""

from __future__ import annotations

import faulthandler
import hashlib
import io
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq
from in_process import job_config
from tiny_checkpoint import tiny_checkpoint

from pipeline.commit.sink import PART
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.storage.folder import Folder, open_folder

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel"]
ROWS, SHARDS = 60, 12
TRIAL_SECONDS = 600.0


class Hung(Exception):
    """The job took longer than a trial may."""


@dataclass
class Trial:
    """The outcome of one job.

    Args:
        hit: Whether a process was killed before the job ended; at_parts, at_seconds: when.
        recovered: "itself", "rerun" or "not".
        problem: What else went wrong.
    """

    fault: str
    seed: int
    hit: bool = False
    at_parts: int = -1
    at_seconds: float = -1.0
    victim: str = ""
    lost: int = 0
    repeated: int = 0
    identical: bool = False
    recovered: str = "itself"
    seconds: float = 0.0
    problem: str = ""
    output: str = ""

    @property
    def passed(self) -> bool:
        return not (self.lost or self.repeated or self.problem) and self.identical


@dataclass
class Bench:
    """A job of 60 rows, some of them bad, in 12 shards. root: URL of the folder that holds the output of each trial."""

    folder: Path
    root: str
    storage: StorageConfig
    undisturbed: dict[str, str] = field(default_factory=dict)
    start_seconds: float = 8.0

    def __post_init__(self) -> None:
        tiny_checkpoint(self.folder / "checkpoint")
        prompts: list[str | None] = [" ".join(WORDS[row % 7 : row % 7 + 1 + row % 4]) for row in range(ROWS)]
        prompts[17], prompts[50] = None, "alpha " * 200
        (self.folder / "in").mkdir()
        for number, (first, end) in enumerate(((0, 35), (35, ROWS))):
            ids = [f"row-{row}" for row in range(first, end)]
            table = pa.table({"id": ids, "prompt": prompts[first:end]})
            pq.write_table(table, self.folder / "in" / f"in-{number}.parquet")

    def job(self) -> JobConfig:
        """The job with a new output folder."""
        return job_config(
            self.folder / "in",
            f"{self.root}/{uuid.uuid4().hex[:8]}",
            self.folder / "checkpoint",
            input={"id": "id"},
            output={"token_ids": True},
            sampling={"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 5},
            actors={"count": 2, "cpus": 0.5, "max_batch": 4},
            shard_rows=ROWS // SHARDS,
            shared_prefix=False,
            max_error_rate=0.1,
            storage=self.storage.model_dump(),
        )

    def output(self, job: JobConfig) -> Folder:
        return open_folder(job.output.path, job.storage)

    def look(self, job: JobConfig, trial: Trial) -> Trial:
        """The trial, completed by what its output holds."""
        output = self.output(job)
        rows = Counter(
            one for name in parts(output) for one in pq.read_table(io.BytesIO(output.read(name)))["id"].to_pylist()
        )
        wanted = {f"row-{row}" for row in range(ROWS)}
        problem = trial.problem
        if not problem and "_SUCCESS" not in output.names():
            problem = "no _SUCCESS"
        if not problem and len(output.names("_job/commits")) != SHARDS:
            problem = f"{len(output.names('_job/commits'))} commit records"
        return replace(
            trial,
            lost=len(wanted - set(rows)),
            repeated=sum(count - 1 for count in rows.values()) + len(set(rows) - wanted),
            identical=digests(output) == self.undisturbed,
            problem=problem,
            output=job.output.path,
        )


def parts(folder: Folder) -> list[str]:
    return [name for name in folder.names() if PART.fullmatch(name)]


def digests(folder: Folder) -> dict[str, str]:
    return {name: hashlib.sha256(folder.read(name)).hexdigest() for name in parts(folder)}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hung in the main thread after so many seconds, with the stacks of all threads on stderr."""

    def on_alarm(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise Hung(f"hung: not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
