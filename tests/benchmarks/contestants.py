"""Who answers a workload: this engine at several speeds, `transformers`, and peers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from physics import Counter, Part
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from workloads import Forced, Workload

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule import ScheduleSpec
from actors.engine.scheduler import generate
from actors.engine.types import EngineStats, Request, SamplingParams

HERE = Path(__file__).parent
CACHE_BYTES = 2**32  # as vLLM has them


@dataclass
class Timing:
    """seconds: of the whole run; prefill and decode: where they can be told apart."""

    seconds: float
    tokens: int
    prefill: float | None = None
    decode: float | None = None
    stats: EngineStats | None = None
    parts: dict[str, Part] | None = None


class Ours:
    """The engine without pipeline around it, at any speed."""

    def __init__(self, checkpoint: Path, counter: Counter, max_rows: int) -> None:
        before = psutil.Process().memory_info().rss
        self.decoder = Decoder(load_model(checkpoint))
        self.counter = counter
        counter.watch(self.decoder)
        self.decoder.prepare_for_cpu()
        self.model_bytes = psutil.Process().memory_info().rss - before
        self.max_rows = max_rows

    def answer(self, workload: Workload, speedup: float, scheduler: str) -> Timing:
        """Lengths are known to nobody beforehand. The horizon is the workload's median length."""
        horizon = max(2, sorted(workload.new)[len(workload.new) // 2])
        schedule = ScheduleSpec(speedup=speedup, horizon=horizon).build(self.decoder.num_layers)
        engine = Engine(self.decoder, schedule, (), cumulative_logprob=False)
        sampling = SamplingParams(max_new_tokens=workload.limit, ignore_eos=True)
        requests = [
            Request(ids, sampling, key=row, ending=Forced(new))
            for row, (ids, new) in enumerate(zip(workload.prompts, workload.new, strict=True))
        ]
        self.counter.take()
        began = time.perf_counter()
        done = generate(engine, requests, budget_bytes=CACHE_BYTES, max_rows=self.max_rows, scheduler=scheduler)
        seconds = time.perf_counter() - began
        assert [len(one.token_ids) for one in done] == workload.new
        stats = engine.take_stats()
        return Timing(
            seconds, workload.generated, stats.prefill_seconds, stats.decode_seconds, stats, self.counter.take()
        )


def load_model(checkpoint: Path) -> PreTrainedModel:
    """A checkpoint in bfloat16, for inference alone."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


class _Lengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, new: Sequence[int]) -> None:
        self.ends = torch.tensor([prompt + count for count in new])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return self.ends <= input_ids.shape[1]


class Transformers:
    """`generate` in batches, longest prompts first; dynamic cache, static compiled, or its continuous batching."""

    def __init__(self, checkpoint: Path, kind: str, max_rows: int) -> None:
        self.model = load_model(checkpoint)
        self.kind = kind
        self.max_rows = max_rows

    def answer(self, workload: Workload) -> Timing:
        """Greedy."""
        began = time.perf_counter()
        if self.kind == "continuous":
            self._continuous(workload)
        else:
            self._batches(workload)
        return Timing(time.perf_counter() - began, workload.generated)

    def _batches(self, workload: Workload) -> None:
        order = sorted(range(len(workload.new)), key=lambda row: -len(workload.prompts[row]))
        static: dict[str, Any] = {}
        if self.kind == "static":
            compiled = CompileConfig()
            compiled._compile_all_devices = True  # else not on a CPU
            static = {"cache_implementation": "static", "compile_config": compiled}
        for first in range(0, len(order), self.max_rows):
            rows = order[first : first + self.max_rows]
            longest = max(len(workload.prompts[row]) for row in rows)
            ids = torch.tensor([[1] * (longest - len(workload.prompts[row])) + workload.prompts[row] for row in rows])
            mask = torch.tensor(
                [[0] * (longest - len(workload.prompts[row])) + [1] * len(workload.prompts[row]) for row in rows]
            )
            new = [workload.new[row] for row in rows]
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=workload.limit,
                do_sample=False,
                pad_token_id=1,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([_Lengths(longest, new)]),
                **static,
            )

    def _continuous(self, workload: Workload) -> None:
        settings = GenerationConfig(max_new_tokens=workload.limit, do_sample=False, eos_token_id=-1)
        with self.model.continuous_batching_context_manager(settings, persistent_manager=True) as manager:
            for ids, new in zip(workload.prompts, workload.new, strict=True):
                manager.add_request(ids, max_new_tokens=new)
            made = 0
            for _ in workload.prompts:
                made += len(manager.get_result().generated_tokens)
        assert made == workload.generated


class PeerEnded(Exception):
    """A peer's process is no more; the message is the end of what it said."""


class Peer:
    """A peer in a process of its own, which sleeps while others are timed."""

    def __init__(
        self, python: str, script: str, checkpoint: Path, threads: int, max_rows: int, **environment: str
    ) -> None:
        self.log = checkpoint.parent / f"{script}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, str(HERE / script), str(checkpoint), str(threads), str(max_rows)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment, "OMP_NUM_THREADS": str(threads)},
            )
        self.version = self._reply()["version"]

    def answer(self, workload: Workload) -> Timing:
        """As the peer itself counts its seconds."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": workload.prompts, "new": workload.new}), file=self.process.stdin, flush=True)
        reply = self._reply()
        assert reply["tokens"] == workload.generated, reply
        return Timing(reply["seconds"], reply["tokens"])

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerEnded(" | ".join(self.log.read_text(errors="replace").splitlines()[-3:]))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
