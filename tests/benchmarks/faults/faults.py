"""What is lost, repeated and falsified when a job meets a fault: this project and others, by one script.

    python tests/benchmarks/faults/faults.py [--systems "this project;Daft"] [--faults kill,disk] [--repetitions 5]
        [--seed 0] [--out work/faults.json] [--limit 900] [--at-once 2]

A fault comes when a drawn number of rows is computed, one fifth of the job for each of five repetitions. Then the same
command is started again until its exit status is 0, three times at most, and the output is read as a consumer reads it:
all of its Parquet files by pyarrow. A start that does not end within `--limit` seconds hangs, and is killed. The file
of results gets each repetition as it ends; repetitions that it holds are not run again. --table prints it as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("systems.py")
sys.path[:0] = [str(ROOT), str(ROOT / "tests/pipeline"), str(Path(__file__).parent)]

import bucket_server  # noqa: E402
import psutil  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import s3fs  # noqa: E402
from cli_command import MARK, marked  # noqa: E402
from fault_proxy import SLOW_DOWN, fault_proxy  # noqa: E402
from local_cluster import LocalCluster  # noqa: E402
from systems import FILES, NODE_CPUS, POISON, ROWS, SYSTEMS, Task, reply  # noqa: E402

OURS = "this project"
STARTS = 3
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
NO_RAY = "timed out during startup"  # of a Ray that did not come up in its 30 s, since the machine is busy
TMPFS_MIB = 24


def prompt(row: int) -> str:
    """Of one row; all differ."""
    foods = ("Chinese", "English", "French", "Indian", "Italian", "Japanese")
    return f"name[Place {row}], eatType[pub], food[{foods[row % 6]}], near[Café {row * 7919 % 10007}]"


def row_id(row: int) -> str:
    return f"row-{row:05d}"


def write_input(folder: Path, rows: int, poison: int | None) -> None:
    """Files of five row groups; one row may be deadly."""
    folder.mkdir(parents=True)
    each = rows // FILES
    for number in range(FILES):
        of_file = range(number * each, (number + 1) * each)
        prompts = [prompt(row) + (POISON if row == poison else "") for row in of_file]
        table = pa.table({"id": [row_id(row) for row in of_file], "prompt": prompts})
        pq.write_table(table, folder / f"in-{number}.parquet", row_group_size=each // 5)


@dataclass
class Result:
    """What one repetition came to.

    Args:
        at: rows computed when the fault came.
        starts: of the command; without_ray: of these, in which Ray itself did not come up in time.
        statuses: of the other starts that nobody killed, in order; None: it hung.
        lost: rows that no file holds, but for a deadly one. repeated: rows too many. falsified: rows of another text.
        unreadable: files that pyarrow refuses; their rows count as lost.
        told: rows with an error in place of a text.
        again: share of the rows that was computed more than once.
        missed: the job had ended before the fault; such a repetition is run again by the next command.
    """

    system: str
    fault: str
    repetition: int
    seed: int
    at: int = 0
    starts: int = 0
    without_ray: int = 0
    statuses: list[int | None] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    falsified: int = 0
    unreadable: int = 0
    told: int = 0
    again: float = 0.0
    ended: bool = False
    missed: bool = False
    seconds: float = 0.0
    note: str = ""
    said: str = ""


class Trial:
    """One job, in a folder of its own, that is started as often as it takes."""

    def __init__(self, bench: Bench, result: Result, folder: Path) -> None:
        self.bench, self.result, self.folder = bench, result, folder
        self.chance = random.Random(f"{result.seed} {result.fault} {result.repetition}")
        share = (result.repetition + self.chance.random()) / bench.repetitions
        self.at = int(bench.rows * (0.02 + 0.9 * share))
        self.poison = int(self.chance.random() * bench.rows) if result.fault == "poison" else None
        write_input(folder / "input", bench.rows, self.poison)
        (folder / "computed").mkdir()
        self.output, self.state, self.endpoint = str(folder / "output"), str(folder / "state"), ""
        self.environment: dict[str, str] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.stack = ExitStack()

    def start_alone(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the job's command while no other repetition does: two Rays that start together may exceed its 30 s."""
        with self.bench.starting:
            computed, limit = self.computed(), time.monotonic() + 120
            process = self.start(*options)
            while process.poll() is None and self.computed() == computed and time.monotonic() < limit:
                time.sleep(0.1)
        return process

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the job's command, in a session of its own."""
        task = Task(str(self.folder / "input"), self.output, self.state, str(self.folder / "computed"), self.endpoint)
        file = self.folder / "task.json"
        file.write_text(json.dumps(asdict(task)))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        common = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", **CREDENTIALS}  # or Ray's workers yield to all
        with (self.folder / f"start-{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [python(self.result.system), SCRIPT, self.result.system, file, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
                env={**kept, **common, **self.environment, MARK: self.mark(len(self.started))},
            )
        self.started.append(process)
        return process

    def mark(self, start: int) -> str:
        """Carried in their environment by all processes of a start."""
        return f"{self.folder.name}-{start}"

    def family(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Of a start: its process and all below it, or that carry its mark."""
        found = set(marked(self.mark(self.started.index(process))))
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            found |= {top, *top.children(recursive=True)}
        return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL every process of a start."""
        while family := self.family(process):
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.poll()
            time.sleep(0.1)
        process.wait()

    def computed(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "computed").iterdir())

    def at_its_moment(self) -> subprocess.Popen[bytes]:
        """Start the command and wait until the drawn number of rows is computed."""
        process, limit = self.start_alone(), time.monotonic() + self.bench.limit
        while self.computed() < self.at and time.monotonic() < limit:
            if process.poll() is not None:
                if NO_RAY not in self.log(process):
                    break
                self.result.without_ray += 1
                process = self.start_alone()
            time.sleep(0.02)
        if process.poll() is not None:
            self.result.missed = True
        self.result.at = self.computed()
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a start to end, and note its status; None: it hung, and is killed."""
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(self.bench.limit)
        log = self.log(process)
        last = log.strip().splitlines()[-1:]
        self.result.said += f"[{status}] {last[0][-300:] if last else ''}\n"
        self.kill(process)
        if status and NO_RAY in log:
            self.result.without_ray += 1
        else:
            self.result.statuses.append(status)

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"start-{self.started.index(process)}.log").read_text(errors="replace")

    def end_or_repeat(self) -> None:
        """Start the same command until it ends with status 0; starts without a Ray do not count."""
        most = len(self.result.statuses) + STARTS
        while 0 not in self.result.statuses and len(self.result.statuses) < most:
            asked = self.result.statuses[-1:] == [2] and "--repair" in self.log(self.started[-1])
            self.end(self.start(*(["--repair"] if asked and self.result.system == OURS else [])))

    def files(self) -> list[Path]:
        """The output's files as a consumer reads them; those of a bucket are fetched."""
        folder = Path(self.output)
        if self.endpoint:
            folder, store = self.folder / "fetched", s3fs.S3FileSystem(endpoint_url=self.endpoint)
            with suppress(FileNotFoundError):  # of a job that wrote nothing
                store.get(f"{self.output}/", f"{folder}/", recursive=True)
        hidden = ("_", ".")
        files = (file.relative_to(folder) for file in folder.rglob("*.parquet"))
        return sorted(folder / file for file in files if not any(part.startswith(hidden) for part in file.parts))

    def count(self) -> None:
        """Read the output."""
        result, seen = self.result, Counter[str]()
        right = {row_id(row): reply(prompt(row)) for row in range(self.bench.rows) if row != self.poison}
        for file in self.files():
            try:
                table = pq.read_table(file)
                ids, texts = table["id"].to_pylist(), table["generated_text"].to_pylist()
            except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError):
                result.unreadable += 1
                continue
            seen.update(ids)
            result.told += texts.count(None)
            result.falsified += sum(
                text is not None and text != right.get(one) for one, text in zip(ids, texts, strict=True)
            )
        result.lost = len(set(right) - set(seen))
        result.repeated = sum(seen.values()) - len(seen)
        result.again = round(max(0, self.computed() - self.bench.rows) / self.bench.rows, 3)
        result.starts, result.ended = len(self.started), 0 in result.statuses


def python(system: str) -> str:
    """Of the system's environment."""
    peer = SYSTEMS[system].environment
    return str(ROOT / "work/peers" / peer / "bin/python") if peer else sys.executable


def killed(trial: Trial) -> None:
    """SIGKILL of every process."""
    trial.kill(trial.at_its_moment())


def terminated(trial: Trial) -> None:
    """SIGTERM to the command."""
    first = trial.at_its_moment()
    first.terminate()
    trial.end(first)


def worker(trial: Trial) -> None:
    """SIGKILL of one of the processes that answer."""
    first = trial.at_its_moment()
    alive = [int(file.name) for file in (trial.folder / "computed").iterdir() if psutil.pid_exists(int(file.name))]
    if alive:
        os.kill(trial.chance.choice(sorted(alive)), signal.SIGKILL)
    trial.end(first)


def poison(trial: Trial) -> None:
    """A row kills the process that works on it, each time."""
    trial.end(trial.start_alone())


def disk(trial: Trial) -> None:
    """A tmpfs with output and state is filled to its last byte; space is made once the command has ended."""
    place = trial.folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", str(place)], check=True)
    trial.stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
    trial.output, trial.state = str(place / "output"), str(place / "state")
    first = trial.at_its_moment()
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    trial.end(first)
    filler.unlink()


def twice(trial: Trial) -> None:
    """Two starts at once."""
    both = [trial.start(), trial.start()]
    for one in both:
        trial.end(one)


def flipped(trial: Trial) -> None:
    """SIGKILL, then a bit of a written file is flipped; where none is written yet, the job is finished first."""
    killed(trial)
    if not trial.files():
        trial.result.note = "no file was written when it was killed: flipped after the end"
        trial.end_or_repeat()
    trial.result.statuses.clear()
    file = trial.chance.choice(trial.files())
    data = bytearray(file.read_bytes())
    place = trial.chance.randrange(len(data)) if data else 0
    if data:
        data[place] ^= 1 << trial.chance.randrange(8)
        file.write_bytes(data)
    trial.result.note += f" {file.name}, byte {place} of {len(data)}"
    trial.end(trial.start_alone())


def stopped(seconds: float) -> Callable[[Trial], None]:
    def fault(trial: Trial) -> None:
        first = trial.at_its_moment()
        family = trial.family(first)
        for one in family:
            one.suspend()
        second = trial.start()
        with trial.bench.idle():
            time.sleep(seconds)
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.resume()
        trial.end(first)
        trial.end(second)

    return fault


def store(trial: Trial) -> None:
    """Output and state are in a bucket whose store answers each request with 503 for a minute."""
    proxy = trial.stack.enter_context(fault_proxy(trial.bench.bucket))
    trial.endpoint = proxy.url
    folder = f"s3://{bucket_server.BUCKET}/{trial.folder.name}"
    trial.output, trial.state = f"{folder}/output", f"{folder}/state"
    first = trial.at_its_moment()
    proxy.script = lambda request: SLOW_DOWN
    with trial.bench.idle():
        time.sleep(60)
        proxy.script = lambda request: None
    trial.result.note = f"{sum(proxy.done.values())} refusals"
    trial.end(first)


def node(trial: Trial) -> None:
    """SIGKILL of every process of the second of two nodes, each with room for one process that answers."""
    cluster = LocalCluster(NODE_CPUS)
    trial.stack.callback(cluster.close)
    cluster.join(NODE_CPUS)
    while "Ray runtime started" not in Path(cluster.folder, "start-1.log").read_text():
        time.sleep(0.2)
    trial.environment = {
        **{name: value for name, value in cluster.env.items() if name.startswith("RAY_")},
        "RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}",
    }
    first = trial.at_its_moment()
    second = psutil.Process(cluster.nodes[1].pid)
    for one in [*second.children(recursive=True), second]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    trial.end(first)


FAULTS: dict[str, tuple[str, Callable[[Trial], None]]] = {
    "kill": ("SIGKILL of everything", killed),
    "term": ("SIGTERM", terminated),
    "worker": ("SIGKILL of a worker", worker),
    "poison": ("a row that kills its process", poison),
    "disk": ("disk full", disk),
    "twice": ("two starts at once", twice),
    "flip": ("a flipped bit in a written file", flipped),
    "stop60": ("stopped for 60 s, a second start meanwhile", stopped(60)),
    "stop90": ("stopped for 90 s, a second start meanwhile", stopped(90)),
    "store": ("the store answers 503 for a minute", store),
    "node": ("a node of two leaves the cluster", node),
}


class Bench:
    """What all repetitions share: their number, the bucket's server, and the machine's cores."""

    def __init__(self, folder: Path, repetitions: int, limit: float, at_once: int, rows: int = ROWS) -> None:
        self.folder, self.repetitions, self.limit, self.rows = folder, repetitions, limit, rows
        self.cores = threading.BoundedSemaphore(at_once)
        self.starting = threading.Lock()
        self.bucket = ""

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Meanwhile another repetition may run."""
        self.cores.release()
        try:
            yield
        finally:
            self.cores.acquire()

    def run(self, system: str, fault: str, repetition: int, seed: int) -> Result:
        """One repetition; its folder stays if a row is lost, repeated or falsified, or the job did not end."""
        result = Result(system, fault, repetition, seed)
        with self.cores:
            began = time.monotonic()
            trial = Trial(self, result, self.folder / f"{fault}-{repetition}-{uuid.uuid4().hex[:8]}")
            try:
                with trial.stack:
                    FAULTS[fault][1](trial)
                    trial.end_or_repeat()
                    trial.count()
            finally:
                for process in trial.started:
                    trial.kill(process)
            result.seconds = round(time.monotonic() - began, 1)
        if result.ended and not (result.lost or result.repeated or result.falsified):
            shutil.rmtree(trial.folder)
        return result


def versions(system: str) -> str:
    """Of the packages that count, in the system's environment."""
    names = SYSTEMS[system].packages
    code = "import sys, importlib.metadata as of; print(*(f'{n} {of.version(n)}' for n in sys.argv[1:]), sep=', ')"
    done = subprocess.run([python(system), "-c", code, *names.split()], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def spread(values: list[float], unit: str = "") -> str:
    low, high = min(values), max(values)
    return f"{low:g}{unit}" if low == high else f"{low:g}-{high:g}{unit}"


def cell(results: list[Result], most: int) -> str:
    """Lost / repeated / falsified, how many repetitions ended and at which start, what was computed again.

    Args:
        most: repetitions of other cells; another number is told.
    """
    if not results:
        return "-"
    number = "" if len(results) == most else f"n {len(results)}: "
    counts = "/".join(spread([getattr(one, name) for one in results]) for name in ("lost", "repeated", "falsified"))
    clean = all(one.ended and not (one.lost or one.repeated or one.falsified or one.unreadable) for one in results)
    ended = [one for one in results if one.ended]
    said = [counts if clean else f"**{counts}**"]
    if len(ended) < len(results):
        said.append(f"**{len(results) - len(ended)} of {len(results)} never ended**")
    else:
        said.append(f"{spread([one.starts - one.without_ray for one in ended])} starts")
    if hung := sum(None in one.statuses for one in results):
        said.append(f"hung in {hung}")
    if unreadable := sum(one.unreadable > 0 for one in results):
        said.append(f"unreadable files left in {unreadable}")
    if max(one.again for one in results) > 0:
        said.append(f"again {spread([round(100 * one.again) for one in results], '%')}")
    dagger = "" if results[0].fault in SYSTEMS[results[0].system].promised else " †"
    return number + "; ".join(said) + dagger


def markdown(found: dict[str, Any]) -> str:
    """The table: a line a fault, a column a system."""
    cells: dict[tuple[str, str], list[Result]] = {}
    for one in found["results"]:
        cells.setdefault((one["fault"], one["system"]), []).append(Result(**one))
    systems = [system for system in SYSTEMS if any(system == one for _, one in cells)]
    most = max(map(len, cells.values()))
    lines = [f"| fault | {' | '.join(systems)} |", "|---|" + "---|" * len(systems)]
    for fault, (title, _) in FAULTS.items():
        row = [cell(cells.get((fault, system), []), most) for system in systems]
        lines.append(f"| {title} | {' | '.join(row)} |")
    lines += ["", f"n {most} unless said otherwise; seeds {sorted({one['seed'] for one in found['results']})}."]
    lines += [f"{system}: {found['versions'][system]}" for system in systems]
    return "\n".join([*lines, f"machine: {found['machine']}"])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.release()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=OURS, help=f"of {', '.join(SYSTEMS)}; several with ; or all")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900, help="seconds for a start")
    parser.add_argument("--at-once", type=int, default=2, help="repetitions")
    parser.add_argument("--out", type=Path, default=ROOT / "work/faults.json")
    parser.add_argument("--table", action="store_true", help="print the file of results and run nothing")
    asked = parser.parse_args()
    found: dict[str, Any] = {"results": [], "versions": {}}
    with suppress(FileNotFoundError):
        found = json.loads(asked.out.read_text())
    if asked.table:
        print(markdown(found))
        return
    done = {(one["system"], one["fault"], one["repetition"], one["seed"]) for one in found["results"]}
    systems = list(SYSTEMS) if asked.systems == "all" else asked.systems.split(";")
    wanted = [
        (system, fault, repetition, asked.seed)
        for repetition in range(asked.repetitions)
        for fault in asked.faults.split(",")
        for system in systems
        if fault != "node" or SYSTEMS[system].nodes
    ]
    found["machine"] = machine()
    found["versions"] |= {system: versions(system) for system in systems}
    keeping = threading.Lock()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(Path(tempfile.mkdtemp(prefix="faults-")), asked.repetitions, asked.limit, asked.at_once)

    def run(one: tuple[str, str, int, int]) -> None:
        result = bench.run(*one)
        print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
        if result.missed:
            return
        with keeping:
            found["results"].append(asdict(result))
            found["results"].sort(key=lambda kept: [kept[name] for name in ("system", "fault", "repetition")])
            asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    os.environ.update(CREDENTIALS)
    with bucket_server.serving() as bench.bucket, ThreadPoolExecutor(asked.at_once + 2) as pool:
        for failed in [pool.submit(run, one) for one in wanted if one not in done]:
            failed.result()
    print(markdown(found))


if __name__ == "__main__":
    main()
