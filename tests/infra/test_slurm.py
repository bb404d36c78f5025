"""The recipe for Slurm: its files as text, and as jobs of a Slurm on this machine (`make test-slurm`)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_command import HANGING_SECONDS, assert_released, wait_until
from in_process import answered_rows, files_of
from infra_files import ROOT, parse_ray, parse_run
from local_cluster import free_ports
from shown_commands import blocks, commands

RECIPE = "configs/recipes/slurm"
FILES = ["nodes.sbatch", "one-node.sbatch"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5  # a requeued job waits as long
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
{nodes}
PartitionName=test Nodes=ALL Default=YES
"""


class Slurm:
    """A munged, a slurmctld and two slurmd, each in the foreground, until `close`. Their logs lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, list[subprocess.Popen[bytes]]()
        host, (port, *ports) = socket.gethostname(), free_ports(3)
        nodes = [f"NodeName=n{one} NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=2" for one in ports]
        conf, munge = folder / "slurm.conf", folder / "munge"
        conf.write_text(CONFIG.format(host=host, port=port, folder=folder, nodes="\n".join(nodes)))
        munge.with_suffix(".key").write_bytes(os.urandom(128))
        munge.with_suffix(".key").chmod(0o600)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env = {**kept, "SLURM_CONF": str(conf), "PATH": path, "OMP_NUM_THREADS": "1"}
        files = [f"--{name}={munge}.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")]
        self._start("munged", "--foreground", "--force", *files, f"--seed-file={munge}.seed")
        wait_until(munge.with_suffix(".socket").is_socket)
        self._start("slurmctld", "-D")
        for one in ports:
            self._start("slurmd", "-D", "-N", f"n{one}")
        wait_until(lambda: self.said("sinfo", "--noheader", "--format=%D %t", check=False).strip() == "2 idle")

    def said(self, *command: str, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=check, env=self.env, timeout=HANGING_SECONDS
        )
        return done.stdout

    def value(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"(?<!\S){name}=(\S+)", self.said("scontrol", "show", "job", job))
        assert found, name
        return found[1]

    def end(self, job: str) -> tuple[str, str]:
        """State and exit code of a job that is not requeued."""
        wait_until(lambda: self.value(job, "JobState") in ENDED, every=0.5)
        return self.value(job, "JobState"), self.value(job, "ExitCode")

    def log(self, job: str) -> str:
        """What a job has printed."""
        path = Path(self.value(job, "StdOut"))
        return path.read_text() if path.is_file() else ""

    def close(self) -> None:
        """End all jobs, then all daemons."""
        self.said("scancel", "--user=root", check=False)
        wait_until(lambda: not self.said("squeue", "--noheader", check=False))
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(timeout=HANGING_SECONDS)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{len(self.daemons)}-{command[0]}.log").open("wb") as log:
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.env))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("Slurm is not installed: make test-slurm")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


@pytest.fixture
def clone(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder stands for a clone, with the prompts of the recipe. Its program `held` is `skipdecode` that
    writes no third part while the file `hold` exists."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    slow = ROOT / "tests" / "pipeline" / "slow_stages.py"
    program = tmp_path / "bin" / "skipdecode"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:{slow.parent} exec {sys.executable} {slow} "$@"\n')
    program.chmod(0o755)
    make, *_ = blocks(f"{RECIPE}/README.md")[0]
    subprocess.run([sys.executable, *shlex.split(make)[1:]], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return tmp_path


def submit(slurm: Slurm, line: str, *options: str) -> str:
    """Submit a job as the README does. options: of sbatch. Gives the job's id."""
    program, *rest = shlex.split(line)
    assert program == "sbatch"
    return slurm.said(program, "--parsable", *options, *rest).strip()


def submit_held(slurm: Slurm, clone: Path, line: str, *options: str) -> tuple[str, dict[str, object]]:
    """The same for a job that waits with two parts for a signal. Gives also the two parts' files."""
    hold = clone / "hold"
    hold.touch()
    path = f"{clone}/bin:{slurm.env['PATH']}"
    job = submit(slurm, line, f"--export=ALL,PATH={path},SKIPDECODE_TEST_HOLD={hold}", *options)
    output = Path("work/demo/answers")
    wait_until(lambda: len(list(output.glob("part-*.parquet"))) == 2 or slurm.value(job, "JobState") in ENDED)
    return job, {name: held for name, held in files_of(output).items() if name.endswith(".parquet")}


def check_rows() -> None:
    """Every row of the demo is answered once."""
    ids = [row["id"] for row in answered_rows(Path("work/demo/answers")) if row["error"] is None]
    assert ids == [f"demo-{row:05d}" for row in range(2000)]
    assert_released(Path("work/demo/answers"))


def lines() -> tuple[str, str]:
    """The README's lines that submit a job: to one node, to several."""
    one, several = (line for block in blocks(f"{RECIPE}/README.md") for line in block if line.startswith("sbatch "))
    return one, several


@pytest.mark.parametrize("name", FILES)
def test_files_are_bash_and_name_options_that_exist(name: str) -> None:
    path = ROOT / RECIPE / name
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    assert {"--signal=B:TERM@60", "--requeue", "--open-mode=append"} <= set(re.findall(r"^#SBATCH (\S+)$", text, re.M))
    starts = re.findall(r"ray start .*(?= >/dev/null &$)", "\n".join(commands(text)), re.M)
    assert len(starts) == 2 * (name == "nodes.sbatch")
    for line in starts:
        parse_ray(re.sub(r"\$\w+", "2", line))


def test_the_lines_of_the_readme_name_files_and_options_that_exist() -> None:
    for line, name in zip(lines(), FILES[::-1], strict=True):
        file, job = re.findall(r"\S+\.\w+(?= |$)", line)[:2]
        assert file == f"{RECIPE}/{name}" and (ROOT / job).is_file()
        parse_run(f"skipdecode run {line[line.index(job) :]}")


@pytest.mark.parametrize(
    ("run", "state", "status"),
    [
        ("exit 0", "RUNNING", 0),
        ("exit 2", "RUNNING", 2),
        ("exit 4", "RUNNING", 4),
        ("exit 4", "CANCELLED", 4),
        ("trap 'exit 4' TERM; kill -TERM $PPID; while :; do sleep 0.1; done", "RUNNING", 4),  # $PPID: the script
    ],
)
def test_exit_status_4_of_a_running_job_requeues_it(run: str, state: str, status: int, tmp_path: Path) -> None:
    for name, does in {"skipdecode": run, "squeue": f"echo {state}", "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", ROOT / RECIPE / "one-node.sbatch", "job.yaml"], env=env, stdout=subprocess.PIPE)
    assert done.returncode == status
    assert done.stdout.decode() == "scontrol requeue 7\n" * (status == 4 and state == "RUNNING")


@pytest.mark.slurm
def test_a_job_on_one_node_ends_and_a_wrong_one_is_not_requeued(slurm: Slurm, clone: Path) -> None:
    one, _ = lines()
    wrong = submit(slurm, f"{one} --set sampling.max_new_tokens=-1")
    assert (slurm.end(wrong), slurm.value(wrong, "Restarts")) == (("FAILED", "2:0"), "0")
    assert slurm.end(submit(slurm, one)) == ("COMPLETED", "0:0")
    check_rows()


@pytest.mark.slurm
@pytest.mark.parametrize("case", ["time limit", "signal", "several nodes"])
def test_a_signalled_job_is_requeued_and_resumes(case: str, slurm: Slurm, clone: Path) -> None:
    one, several = lines()
    line, limit = (several if case == "several nodes" else one), ["--time=3"] * (case == "time limit")
    job, before = submit_held(slurm, clone, line, *limit)
    assert len(before) == 2, slurm.log(job)
    if case != "time limit":
        slurm.said("scancel", "--batch", "--signal=TERM", job)
    # with no shard at work, it does not wait
    wait_until(lambda: re.search(r"stopping: up to|interrupted \(SIGTERM\)", slurm.log(job)) is not None, every=0.2)
    (clone / "hold").unlink()
    assert (slurm.end(job), slurm.value(job, "Restarts")) == (("COMPLETED", "0:0"), "1"), slurm.log(job)
    assert "interrupted (SIGTERM)" in slurm.log(job)
    check_rows()
    assert before.items() <= files_of("work/demo/answers").items()


@pytest.mark.slurm
def test_a_cancelled_job_is_not_requeued_but_can_be_submitted_again(slurm: Slurm, clone: Path) -> None:
    one, _ = lines()
    job, before = submit_held(slurm, clone, one)
    assert len(before) == 2, slurm.log(job)
    slurm.said("scancel", job)
    state, _ = slurm.end(job)
    assert (state, slurm.value(job, "Restarts")) == ("CANCELLED", "0"), slurm.log(job)
    (clone / "hold").unlink()
    assert slurm.end(submit(slurm, one)) == ("COMPLETED", "0:0")
    check_rows()
    assert before.items() <= files_of("work/demo/answers").items()
