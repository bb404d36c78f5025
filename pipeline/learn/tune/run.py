"""`skipdecode tune`: trains a checkpoint for one or more schedules.

recipe ──> plan ──────────────> train ──────────────────────────────> checkpoint, tune.json
           data, tokenizer,      draws schedules at each step
           schedules
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.errors import free_memory
from actors.engine.machine import set_threads
from actors.engine.model.file_digests import digests
from actors.engine.model.loading import load_decoder
from actors.engine.schedule.schedule import MEASURED
from pipeline.config.tune import TuneConfig
from pipeline.learn.keep_order import measured_order
from pipeline.learn.tune import resume
from pipeline.learn.tune.plan import TrainingPlan, plan_training, with_order
from pipeline.learn.tune.train import train
from pipeline.runtime.announce import announce

log = logging.getLogger(__name__)


def tune(config: TuneConfig) -> Path:
    """Train as `config` says and write the checkpoint. Resume an interrupted training from its last saved step.

    Raises UserError before the training starts if the recipe or the data are wrong.
    """
    plan = plan_training(config)
    if resume.finished(config):
        log.warning("the training in %s is finished; nothing is left to do", config.output)
        return Path(config.output)
    resume.begin(config)
    announce(
        f"training {config.model.path} on {len(plan.train):,} pairs, with a dev set of {len(plan.dev):,}; "
        f"output: {config.output}"
    )
    if config.schedule.keep_order == MEASURED:
        plan = with_measured_order(config, plan)
    train(config, plan)
    return Path(config.output)


def with_measured_order(config: TuneConfig, plan: TrainingPlan) -> TrainingPlan:
    """Measure the start checkpoint's layer order, and the warm-up unless the recipe sets it. Return the new plan."""
    path, device = Path(config.model.path), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and config.training.bf16 else torch.float32
    set_threads(config.training.threads)
    rows = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in plan.train]
    given = config.schedule.warmup if "warmup" in config.schedule.model_fields_set else None
    identity = {"files": digests(path), "dtype": str(dtype).removeprefix("torch.")}
    order, warmup = measured_order(
        identity, lambda: fastest_decoder(load_decoder(path, dtype, device).model), rows, given, None
    )
    free_memory()  # the training needs the GPU's memory
    return with_order(config, plan, order, warmup)
