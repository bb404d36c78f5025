"""What all parts of the GPU's benchmark share: the time that is left, models, rows, and a timed run. See gpu.py."""

from __future__ import annotations

import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from shapes import SHAPES
from transformers import AutoModelForCausalLM

from actors.engine.decoder import Decoder
from actors.engine.gpu.engine import GpuEngine
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request, SamplingParams

PROMPT, NEW = 512, 512
T = TypeVar("T")


class Clock:
    """The time that is left, and what was left out for want of it."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []
        self.last: dict[str, float] = {}

    def allows(self, name: str, seconds: float) -> bool:
        """Whether something of about so many seconds can begin."""
        if time.monotonic() + seconds < self.end:
            return True
        self.left_out.append(name)
        return False


def give_back(device: torch.device) -> None:
    """Memory that nobody refers to, before the next one takes nearly all there is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(name: str, clock: Clock, device: torch.device, work: Callable[[], T]) -> T | None:
    """A part of the benchmark, whatever it fails at: what is behind it is still measured."""
    try:
        return work()
    except Exception as error:  # told, here and in the results
        clock.left_out.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"  failed: {clock.left_out[-1]}", flush=True)
        traceback.print_exc()
    finally:
        give_back(device)
    return None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(shape: str, device: torch.device) -> Any:
    """A model of random weights, made where it stays."""
    config = SHAPES[shape]()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def rows_of(kind: str, count: int, vocabulary: int, new_tokens: int = NEW) -> list[Request]:
    """Rows of a workload, the same every time; each ends at its own length and nowhere else."""
    chance = random.Random(7)
    rows = []
    for number in range(count):
        prompt, new = PROMPT, new_tokens
        if kind == "e2e":  # as long as those of the data set: about 33 and 29 tokens
            prompt, new = (max(4, round(chance.gauss(*one))) for one in ((33, 8), (29, 9)))
        elif kind == "long-tailed":
            new = min(1536, max(1, round(300 * chance.lognormvariate(0, 0.7))))
        ids = [chance.randrange(3, vocabulary) for _ in range(prompt)]
        rows.append(Request(ids, SamplingParams(max_new_tokens=new, ignore_eos=True), number))
    return rows


def schedule_of(decoder: Decoder, speed: float, rows: Sequence[Request]) -> Schedule:
    horizon = max(2, round(statistics.median([row.sampling.max_new_tokens for row in rows] or [NEW])))
    return ScheduleSpec(speedup=speed, horizon=horizon).build(decoder.num_layers)


def run(engine: GpuEngine, rows: list[Request], device: torch.device) -> tuple[float, float]:
    """Seconds of prefill, and of decode to the end, of rows that are all in flight at once."""
    engine.open(len(rows), max(len(row.prompt_ids) for row in rows), max(row.sampling.max_new_tokens for row in rows))
    synchronize(device)
    began = time.perf_counter()
    engine.admit(rows)
    synchronize(device)
    filled = time.perf_counter()
    done = 0
    while done < len(rows):
        done += len(engine.step(last=True))
    synchronize(device)
    ended = time.perf_counter()
    engine.close()
    return filled - began, ended - filled
