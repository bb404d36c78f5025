"""Who answers a workload, this engine and peers in processes of their own, and how their figures are compared."""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ideal import Ceilings
from peer_process import forget_peak, peak_bytes
from transformers import AutoModelForCausalLM
from workloads import Forced, Workload

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.engine import Engine
from actors.engine.loop import Loop
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import EngineStats, Request, SamplingParams

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / "work" / "peers"
PEERS: dict[str, tuple[str, Path, dict[str, str]]] = {  # script, Python, environment
    "vllm": ("peer_vllm.py", INSTALLED / "vllm/bin/python", {}),
}
CACHE_BYTES = 2**32  # as vLLM has them
PEER_LIMIT = 3600  # seconds for one answer


@dataclass
class Timing:
    """seconds: of the whole run. peak_bytes: most memory resident in the process that answered. stats, schedule: of
    this engine alone."""

    seconds: float
    tokens: int
    peak_bytes: int
    stats: EngineStats | None = None
    schedule: Schedule | None = None


def timed(workload: Workload, answer: Callable[[], Sequence[Any]], engine: Engine) -> Timing:
    """Time an answer of this process to the workload."""
    engine.take_stats()
    forget_peak()
    began = time.perf_counter()
    answers = answer()
    seconds = time.perf_counter() - began
    assert [len(one.token_ids or ()) for one in answers] == workload.new
    return Timing(seconds, workload.generated, peak_bytes(), engine.take_stats(), engine.schedule)


class Ours:
    """The engine without pipeline around it, at any speed."""

    def __init__(self, checkpoint: Path, max_rows: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.decoder = fastest_decoder(model.eval().requires_grad_(False))
        gc.freeze()  # as an actor of the pipeline does
        self.max_rows = max_rows
        self.engines: dict[tuple[float, int], Engine] = {}  # kept, as an actor keeps its own

    def answer(self, workload: Workload, speedup: float, scheduler: str) -> Timing:
        """Lengths are known to nobody beforehand. The horizon is the workload's median length."""
        key = speedup, workload.horizon
        if key not in self.engines:
            schedule = ScheduleSpec(speedup=speedup, horizon=workload.horizon).build(self.decoder.num_layers)
            self.engines[key] = Engine(self.decoder, schedule, (), cumulative_logprob=False)
        engine = self.engines[key]
        sampling = SamplingParams(max_new_tokens=max(workload.new), ignore_eos=True)
        requests = [
            Request(ids, sampling, key=row, ending=Forced(new))
            for row, (ids, new) in enumerate(zip(workload.prompts, workload.new, strict=True))
        ]
        how = {"budget_bytes": CACHE_BYTES, "max_rows": self.max_rows, "scheduler": scheduler}
        loop = Loop(engine, **how)
        return timed(workload, lambda: loop.finish(loop.add(requests)), engine)


class PeerEnded(Exception):
    """A peer did not answer as it should; the message is the end of what it said."""


class Peer:
    """A peer in a process of its own, which sleeps while others are timed; started again if it has ended.

    Raises PeerEnded.
    """

    def __init__(
        self, python: str, script: str, checkpoint: Path, threads: int, max_rows: int, **environment: str
    ) -> None:
        self.command = [python, str(HERE / script), str(checkpoint), str(threads), str(max_rows)]
        self.environment = {**os.environ, **environment, "OMP_NUM_THREADS": str(threads)}
        with tempfile.NamedTemporaryFile(dir=checkpoint.parent, suffix=".log", delete=False) as log:
            self.log = Path(log.name)
        self._start()

    def _start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )
        self.version: str = self._reply()["version"]

    def answer(self, workload: Workload) -> Timing:
        """As the peer itself counts its seconds."""
        if self.process.poll() is not None:
            self._start()
        assert self.process.stdin is not None
        try:
            print(json.dumps({"prompts": workload.prompts, "new": workload.new}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        reply = self._reply()
        if reply["tokens"] != workload.generated:
            self.close()
            raise PeerEnded(f"{reply['tokens']} tokens, {workload.generated} were asked for")
        return Timing(reply["seconds"], reply["tokens"], reply["peak_bytes"])

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PEER_LIMIT)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            raise self._ended("" if readable else f"no answer in {PEER_LIMIT} s")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self, why: str = "") -> PeerEnded:
        self.close()
        said = self.log.read_text(errors="replace").splitlines()[-3:]
        return PeerEnded(" | ".join([why, *said] if why else said))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_peers(
    peers: Mapping[str, tuple[str, Path, dict[str, str]]], checkpoint: Path, options: argparse.Namespace
) -> Iterator[dict[str, Peer]]:
    """Start the peers in `options.peers`. For a peer that does not start, print a line and leave it out."""
    started: dict[str, Peer] = {}
    with ExitStack() as stack:
        for name in options.peers:
            script, python, environment = peers[name]
            if not python.exists():
                print(f"{name} is not installed: make peers", file=sys.stderr)
                continue
            try:
                peer = Peer(str(python), script, checkpoint, options.threads, options.max_rows, **environment)
            except PeerEnded as error:
                print(f"{name} did not start, passed by: {error}", file=sys.stderr)
                continue
            stack.callback(peer.close)
            started[name] = peer
        yield started


def rounds(
    ours: Mapping[str, Callable[[], Timing]], peers: Mapping[str, Peer], workload: Workload, runs: int
) -> dict[str, list[Timing]]:
    """Time every contestant once in each round, in turn. The first timing of each is its warm-up."""
    contestants = {**ours, **{name: partial(peer.answer, workload) for name, peer in peers.items()}}
    seen: dict[str, list[Timing]] = {name: [] for name in contestants}
    for _ in range(runs + 1):
        for name, contestant in list(contestants.items()):
            try:
                timing = contestant()
            except PeerEnded as error:
                print(f"{name} did not answer, passed by: {error}", file=sys.stderr)
                del contestants[name], seen[name]
                continue
            print(f"    {name:22s} {timing.tokens / timing.seconds:9,.0f} tokens/s", file=sys.stderr, flush=True)
            seen[name].append(timing)
    return seen


def median(timings: list[Timing]) -> Timing:
    """Return the timing with the median number of seconds. The first timing, the warm-up, does not count."""
    return sorted(timings[1:], key=lambda one: one.seconds)[(len(timings) - 2) // 2]


def figures(timings: list[Timing]) -> dict[str, float]:
    """Return the figures of a contestant that every contestant has."""
    one = median(timings)
    peak = max(timing.peak_bytes for timing in timings[1:])
    return {"tokens/s": one.tokens / one.seconds, "warm-up, s": timings[0].seconds, "peak MiB": peak / 2**20}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return figures by contestant as a table; its columns are those of the contestant with the most."""
    titles = max(found.values(), key=len)
    lines = ["".join([f"{'':24s}", *(f"{title:>13s}" for title in titles)])]
    for name, one in found.items():
        cells = [f"{one[title]:,.{0 if one[title] >= 100 else 2}f}" if title in one else "" for title in titles]
        lines.append("".join([f"{name:24s}", *(f"{cell:>13s}" for cell in cells)]).rstrip())
    return "\n".join(lines)


def comparison(doc: str | None, rows: int, max_rows: int, peers: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all comparisons have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--max-rows", type=int, default=max_rows, help="in flight at once")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", default=list(peers), type=lambda text: [name for name in text.split(",") if name])
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    return parser


def facts(options: argparse.Namespace, ceilings: Ceilings) -> dict[str, Any]:
    """Return facts on which the figures depend, such as versions and the machine."""
    processors = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": processors[0].split(":", 1)[1].strip() if processors else "unknown",
        "threads": options.threads,
        "torch": torch.__version__,
        "command": shlex.join(["python", *sys.argv]),
        "gflops": ceilings.flops / 1e9,
        "gigabytes_per_second": ceilings.bandwidth / 1e9,
    }


def save(results: Mapping[str, Any], file: Path | None) -> None:
    """Write the results as JSON if the options name a file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
