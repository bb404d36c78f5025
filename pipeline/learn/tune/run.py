"""`skipdecode tune`: trains a checkpoint for one or more schedules.

recipe ──> plan ──────────────> train (in this process or in workers) ──> checkpoint, tune.json
           data, tokenizer,      draws schedules at each step
           schedules
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.machine import set_threads
from actors.engine.model.file_digests import digests
from actors.engine.model.loading import load_decoder
from actors.engine.schedule.schedule import MEASURED
from pipeline.config.tune import TuneConfig
from pipeline.learn.keep_order import measured_order
from pipeline.learn.tune import resume
from pipeline.learn.tune.plan import Order, TrainingPlan, plan_training, with_order
from pipeline.learn.tune.train import train
from pipeline.learn.tune.workers import check_machine, train_in_processes
from pipeline.runtime.announce import announce

log = logging.getLogger(__name__)


def tune(config: TuneConfig) -> Path:
    """Train as `config` says and write the checkpoint. Resume an interrupted training from its last saved step.

    Before the training starts, raises UserError of one line if configuration or data are wrong.
    """
    plan = plan_training(config)
    if resume.finished(config):
        log.warning("the training in %s is finished; nothing is left to do", config.output)
        return Path(config.output)
    check_machine(config.workers)
    resume.begin(config)
    announce(
        f"training {config.model.path} on {len(plan.train):,} pairs, with a dev set of {len(plan.dev):,}; "
        f"output: {config.output}"
    )
    order = measured(config, plan) if config.schedule.keep_order == MEASURED else None
    if config.workers is None:
        train(config, with_order(config, plan, order))
    else:
        train_in_processes(config, order)
    return Path(config.output)


def measured(config: TuneConfig, plan: TrainingPlan) -> Order:
    """Measure the start checkpoint's layer order (keep order). Return it and the warm-up (measured too, if not set)."""
    path, device = Path(config.model.path), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and config.training.bf16 else torch.float32
    set_threads(config.training.threads)

    def load() -> Decoder:
        return fastest_decoder(load_decoder(path, dtype, device).model)

    rows = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in plan.train]
    given = config.schedule.warmup if "warmup" in config.schedule.model_fields_set else None
    identity = {"files": digests(path), "dtype": str(dtype).removeprefix("torch.")}
    order = measured_order(identity, load, rows, given, None)
    if device.type == "cuda":  # the training, perhaps in another process, needs the GPU's memory
        gc.collect()
        torch.cuda.empty_cache()
    return order
