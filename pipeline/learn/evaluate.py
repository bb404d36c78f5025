"""`skipdecode evaluate`: scores rows of a job at several speeds, against references or against full depth."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.answers import Prompt
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.adapt import AdaptConfig
from pipeline.config.forms import normalized
from pipeline.config.job import JobConfig
from pipeline.input.files import list_files
from pipeline.learn.rows import check_scorable, draw, layout, prompt_ids, read_sample, usable_references
from pipeline.learn.score.lines import Evaluation
from pipeline.learn.score.run import score
from pipeline.learn.speeds import variants
from pipeline.plan.columns import check_columns
from pipeline.prepare.prompt_spec import check_spec, prompt_spec
from pipeline.runtime.signals import interruptible

log = logging.getLogger(__name__)


def evaluate(config: JobConfig, speedups: Sequence[float] = (), others: Mapping[str, Path] | None = None) -> Evaluation:
    """Answer rows of the job's input at full depth and at each speed, and score and time the answers.

    The keys `held_out` (number of rows), `references`, `metric` and `runs` of the job's `adapt` section apply. Rows
    with an error, or without a usable reference, are left out, with a warning.

    Args:
        config: The job. Its schedule is used at each speed; its keys for depths are ignored.
        speedups: Default: those of the `adapt` section; without such a section, the job's own.
        others: See `score`.

    Raises:
        UserError: a mistake in the job, before a model is loaded, or a row that cannot be answered.
    """
    own, job_speed = config.adapt, config.schedule.speedup
    options = own or AdaptConfig()
    config = config.model_copy(update={"adapt": options})
    if own is None and job_speed is not None:
        speedups = speedups or [job_speed]
    check_scorable(config)
    check_columns(config)
    files, schema = layout(config, list_files(config.input.path, config.storage, config.input.format))
    model = resolve_checkpoint(config.model, config.storage)
    spec = prompt_spec(config, model, time.time())  # a chat template may write the date
    check_spec(spec)
    changes = config.schedule.without_depths()
    stored = model.checkpoint.spec or ScheduleSpec()
    found = variants(stored.overridden(changes), sorted({1.0, *(speedups or options.speedups)}))
    for variant in found:
        model.checkpoint.schedule({**changes, "speedup": variant.nominal})  # raises UserError for a wrong key

    drawn = draw(sum(file.rows for file in files), options.held_out)
    table, readable = read_sample(config, files, schema, drawn)
    labels = None if config.choices is None else {normalized(label) for label in config.choices}
    right = [None] * table.num_rows if options.references is None else table[options.references].to_pylist()
    prompts, references = list[Prompt](), list[list[str]]()
    numbers = [row for row, is_good in zip(drawn, readable, strict=True) if is_good]
    for row, ids, value in zip(numbers, prompt_ids(table, spec), right, strict=True):
        usable = usable_references(value, labels)
        if ids is not None and (usable or options.references is None):
            prompts.append(Prompt(ids, ", ".join(config.input.path), row))
            references.append(usable)
    if len(prompts) < len(drawn):
        log.warning(
            "%d of %d rows are left out: they have an error or no usable reference",
            len(drawn) - len(prompts),
            len(drawn),
        )
    with interruptible():
        return score(
            config,
            model,
            found,
            prompts,
            None if options.references is None else references,
            others=others,
            metric=options.metric,
            runs=options.runs,
        )
