"""A recipe's keep order, measured on its start weights and its training pairs."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from actors.engine.checkpoint.file_digests import digests
from actors.engine.checkpoint.loading import load_decoder
from actors.engine.decoder import Decoder
from actors.engine.machine import set_threads
from pipeline.checkpoints.keep_order import measured_order
from pipeline.config.tune import TuneConfig
from pipeline.runtime.announce import announce
from pipeline.tune.plan import TrainingPlan


def with_measured_order(config: TuneConfig, plan: TrainingPlan) -> TuneConfig:
    """The recipe with its keep order as a list, and the warm-up that follows from it unless the recipe has one."""
    path = Path(config.model.path)
    on_cpu = not torch.cuda.is_available()
    dtype = torch.float32 if on_cpu or not config.training.bf16 else torch.bfloat16
    set_threads(config.training.threads)

    def load() -> Decoder:
        decoder = load_decoder(path, dtype, torch.device("cpu" if on_cpu else "cuda"))
        decoder.prepare_for_cpu()
        return decoder

    rows = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in plan.train]
    given = config.schedule.warmup if "warmup" in config.schedule.model_fields_set else None
    identity = {"files": digests(path), "dtype": str(dtype).removeprefix("torch.")}
    order, warmup = measured_order(identity, load, rows, given, None, announce)
    if not on_cpu:  # the training, perhaps in another process, has the GPU's memory
        gc.collect()
        torch.cuda.empty_cache()
    schedule = config.schedule.model_copy(update={"keep_order": list(order), "warmup": warmup})
    return config.model_copy(update={"schedule": schedule})
