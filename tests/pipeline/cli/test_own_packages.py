"""A user's own folder `pipeline` and file `actors.py` beside the job break nothing that `skipdecode` does.

Of submitted jobs: tests/pipeline/job/test_cluster.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import job_values

SKIPDECODE = Path(sys.executable).with_name("skipdecode")


@pytest.fixture
def theirs(tmp_path: Path, checkpoint: Path) -> Path:
    """A folder with a job, and modules of the user's own that end a process which imports them."""
    (tmp_path / "pipeline").mkdir()
    for module in ("pipeline/__init__.py", "actors.py"):
        (tmp_path / module).write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "in.csv").write_text("id,prompt\n" + "".join(f"{row},alpha {row}\n" for row in range(6)))
    job = job_values(tmp_path / "in.csv", tmp_path / "out", checkpoint, input={"id": "id"})
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return tmp_path


def test_the_command_and_the_module_import_their_own(theirs: Path) -> None:
    for command in ([SKIPDECODE], [sys.executable, "-m", "skipdecode"]):
        env = {**os.environ, "PYTHONPATH": str(theirs)}
        done = subprocess.run([*command, "try", "job.yaml"], cwd=theirs, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("answer:") == 5


@pytest.mark.ray
def test_so_do_the_workers_of_a_ray_of_its_own(theirs: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([SKIPDECODE, "run", "job.yaml"], cwd=theirs, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(pq.read_table(theirs / "out")["id"].to_pylist()) == list("012345")
