"""Breaks ten lines of the code, one at a time, in a copy of the repository, and runs the quick tests of that line.

    python tests/mutation_check.py [--lines] [NUMBER ...]

NUMBER: a place in MUTATIONS, from 1. Prints a line per mutation; exit 1 if fewer than nine are caught, 2 if a line is
not in the code or the unchanged code fails its tests. --lines: only checks that the lines are in the code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENOUGH = 9


@dataclass(frozen=True)
class Mutation:
    """What breaks, a line of a file, what replaces it, and the test files that should then fail."""

    name: str
    file: str
    line: str
    replacement: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "commit order: the record is created before the part",
        "pipeline/commit/sink.py",
        "    if not folder.create(part_name(shard.index), part):\n",
        "    folder.create(record_name(shard.index), encode_record(commit_record(part, stats), fingerprint))\n"
        "    if not folder.create(part_name(shard.index), part):\n",
        ("tests/pipeline/commit/test_sink.py", "tests/pipeline/commit/test_records.py"),
    ),
    Mutation(
        "lease fencing: a holder does not check that its epoch is the highest",
        "pipeline/commit/lease.py",
        "        if max(self._epochs(), default=0) != self.epoch or not self._holds(self.epoch):\n",
        "        if not self._holds(self.epoch):\n",
        ("tests/pipeline/commit/test_lease.py", "tests/pipeline/commit/test_lease_model.py"),
    ),
    Mutation(
        "nesting of layers: a layer also runs for rows whose depth is its rank",
        "actors/engine/engine.py",
        "self._sampled([len(rows) - bisect_right(depths, rank) for rank",
        "self._sampled([len(rows) - bisect_right(depths, rank - 1) for rank",
        ("tests/engine/test_engine.py",),
    ),
    Mutation(
        "key of random numbers: without the row's number",
        "actors/engine/types.py",
        '    digest = hashlib.blake2b(f"{seed}\\0{source}\\0{row}\\0{sample}".encode(), digest_size=8).digest()\n',
        '    digest = hashlib.blake2b(f"{seed}\\0{source}\\0{sample}".encode(), digest_size=8).digest()\n',
        ("tests/test_generator.py", "tests/engine/test_sampling.py"),
    ),
    Mutation(
        "stop handling: a stop token at min_new_tokens does not end the row",
        "actors/engine/row.py",
        "        if count >= request.sampling.min_new_tokens:\n",
        "        if count > request.sampling.min_new_tokens:\n",
        ("tests/engine/test_engine.py",),
    ),
    Mutation(
        "retry budget: after a spent budget, the next call gets a whole one",
        "pipeline/storage/s3.py",
        "_Budget(0.0 if self._spent else self.retry_seconds)",
        "_Budget(self.retry_seconds)",
        ("tests/pipeline/job/test_store_outages.py",),
    ),
    Mutation(
        "quarantine: a row that died alone once too few is quarantined",
        "pipeline/runtime/quarantine.py",
        "            if deaths >= quarantine.attempts\n",
        "            if deaths >= quarantine.attempts - 1\n",
        ("tests/pipeline/runtime/test_quarantine.py",),
    ),
    Mutation(
        "plan: digests of its files are not compared",
        "pipeline/plan/plan_files.py",
        '        if _sha256(data[name]) != values["sha256"][name]:\n',
        "        if name not in data:\n",
        ("tests/pipeline/plan/test_manifest.py",),
    ),
    Mutation(
        "row order: completions are returned in the order in which rows ended",
        "actors/engine/loop.py",
        "        return [self.completions[row] for row in range(len(self.requests))]\n",
        "        return list(self.completions.values())\n",
        ("tests/engine/test_engine.py",),
    ),
    Mutation(
        "cache: a layer has one slot less than it has uses",
        "actors/engine/cache.py",
        "        return [self.prompt_tokens + used if used else 0 for used in uses]\n",
        "        return [self.prompt_tokens + used - 1 if used else 0 for used in uses]\n",
        ("tests/engine/test_cache.py", "tests/engine/test_engine.py"),
    ),
]


def copy_repository(target: Path) -> None:
    """Copy the tracked files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def quick_tests(folder: Path, files: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of these files as `make test` does, without those that start Ray, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    marks = ["-m", "not slow and not ceph and not ray"]
    return subprocess.run([*command, *marks, *files], cwd=folder, capture_output=True, text=True)


def first_failure(output: str) -> str:
    """The test that pytest reports first."""
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split(" - ")[0].split(" ", 1)[1] if failures else "no test: see the output"


def main() -> None:
    began, caught = time.monotonic(), 0
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "--lines"] or range(1, len(MUTATIONS) + 1)
    chosen = [(number, MUTATIONS[number - 1]) for number in numbers]
    for number, mutation in chosen:
        if (ROOT / mutation.file).read_text().count(mutation.line) != 1:
            print(f"{number:2} {mutation.name}: its line is not in {mutation.file}, once")
            sys.exit(2)
    if "--lines" in sys.argv:
        return
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        folder = Path(scratch)
        copy_repository(folder)
        unchanged = quick_tests(folder, sorted({file for _, mutation in chosen for file in mutation.tests}))
        if unchanged.returncode != 0:
            print(f"the unchanged code fails {first_failure(unchanged.stdout)}\n{unchanged.stdout[-2000:]}")
            sys.exit(2)
        for number, mutation in chosen:
            path = folder / mutation.file
            text = path.read_text()
            path.write_text(text.replace(mutation.line, mutation.replacement))
            done = quick_tests(folder, list(mutation.tests))
            path.write_text(text)
            caught += done.returncode == 1
            verdict = f"caught by {first_failure(done.stdout)}" if done.returncode == 1 else "NOT CAUGHT"
            print(f"{number:2} {mutation.name}: {verdict}", flush=True)
    print(f"{caught} of {len(chosen)} caught in {(time.monotonic() - began) / 60:.0f} min")
    sys.exit(0 if caught >= min(ENOUGH, len(chosen)) else 1)


if __name__ == "__main__":
    main()
