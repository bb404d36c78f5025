"""Who answers a workload: this engine at several speeds, and peers in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peak_memory import forget_peak, peak_bytes
from transformers import AutoModelForCausalLM
from workloads import Forced, Workload

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import EngineStats, Request, SamplingParams

HERE = Path(__file__).parent
CACHE_BYTES = 2**32  # as vLLM has them
PEER_LIMIT = 3600  # seconds for one answer


@dataclass
class Timing:
    """seconds: of the whole run; prefill and decode: where they can be told apart. peak_bytes: most memory resident
    in the process that answered."""

    seconds: float
    tokens: int
    peak_bytes: int
    prefill: float | None = None
    decode: float | None = None
    stats: EngineStats | None = None
    schedule: Schedule | None = None


class Ours:
    """The engine without pipeline around it, at any speed."""

    def __init__(self, checkpoint: Path, max_rows: int) -> None:
        before = psutil.Process().memory_info().rss
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.decoder = fastest_decoder(model.eval().requires_grad_(False))
        gc.freeze()  # as an actor of the pipeline does
        self.model_bytes = psutil.Process().memory_info().rss - before
        self.max_rows = max_rows
        self.engines: dict[tuple[float, int], Engine] = {}  # kept, as an actor keeps its own

    def answer(self, workload: Workload, speedup: float, scheduler: str) -> Timing:
        """Lengths are known to nobody beforehand. The horizon is the workload's median length."""
        key = speedup, workload.horizon
        if key not in self.engines:
            schedule = ScheduleSpec(speedup=speedup, horizon=workload.horizon).build(self.decoder.num_layers)
            self.engines[key] = Engine(self.decoder, schedule, (), cumulative_logprob=False)
        engine = self.engines[key]
        sampling = SamplingParams(max_new_tokens=workload.limit, ignore_eos=True)
        requests = [
            Request(ids, sampling, key=row, ending=Forced(new))
            for row, (ids, new) in enumerate(zip(workload.prompts, workload.new, strict=True))
        ]
        forget_peak()
        began = time.perf_counter()
        done = generate(engine, requests, budget_bytes=CACHE_BYTES, max_rows=self.max_rows, scheduler=scheduler)
        seconds = time.perf_counter() - began
        assert [len(one.token_ids) for one in done] == workload.new
        stats = engine.take_stats()
        return Timing(
            seconds,
            workload.generated,
            peak_bytes(),
            stats.prefill_seconds,
            stats.decode_seconds,
            stats,
            engine.schedule,
        )


class PeerEnded(Exception):
    """A peer did not answer as it should; the message is the end of what it said."""


class Peer:
    """A peer in a process of its own, which sleeps while others are timed; started again if it has ended.

    start_seconds: what it took to load, and to compile where it does so at start. Raises PeerEnded.
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
        reply = self._reply()
        self.version: str = reply["version"]
        self.start_seconds: float = reply["seconds"]

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


def start_peers(
    peers: Mapping[str, tuple[str, Path, dict[str, str]]], checkpoint: Path, threads: int, max_rows: int
) -> dict[str, Peer]:
    """Those that start; the others are passed by, with a line. peers: of each its script, Python and environment."""
    started: dict[str, Peer] = {}
    for name, (script, python, environment) in peers.items():
        if not python.exists():
            print(f"{name} is not installed: make peers", file=sys.stderr)
            continue
        try:
            started[name] = Peer(str(python), script, checkpoint, threads, max_rows, **environment)
        except PeerEnded as error:
            print(f"{name} did not start, passed by: {error}", file=sys.stderr)
    return started
