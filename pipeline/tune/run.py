"""`skipdecode tune`: adapt a checkpoint to a schedule or to any speed.

recipe ──> plan ──────────────> train (in this process, or by workers) ──> checkpoint, tune.json
           data, tokenizer,      one schedule drawn for each step
           schedules
"""

from __future__ import annotations

import logging
from pathlib import Path

from actors.engine.schedules.schedule import MEASURED
from pipeline.config.tune import TuneConfig
from pipeline.runtime.announce import announce
from pipeline.tune import resume
from pipeline.tune.measured_order import with_measured_order
from pipeline.tune.plan import plan_training, with_order
from pipeline.tune.train import train
from pipeline.tune.workers import check_machine, train_in_processes

log = logging.getLogger(__name__)


def tune(config: TuneConfig) -> Path:
    """Train as `config` says and write the checkpoint; a run that was interrupted continues from its last saved step.

    Raises UserError of one line, before anything is trained, if configuration or data are wrong.
    """
    plan = plan_training(config)
    if resume.finished(config):
        log.warning("%s is finished; nothing is left to do", config.output)
        return Path(config.output)
    check_machine(config.workers)
    resume.begin(config)
    announce(
        f"training {config.model.path} on {len(plan.train):,} pairs, {len(plan.dev):,} in the dev set, "
        f"into {config.output}"
    )
    recorded = config
    if config.schedule.keep_order == MEASURED:
        config = with_measured_order(config, plan)
        plan = with_order(config, plan)
    if config.workers is None:
        train(config, plan, recorded)
    else:
        train_in_processes(config, recorded)
    return Path(config.output)
