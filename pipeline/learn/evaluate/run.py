"""`skipdecode evaluate`: quality against speed, by the engine alone, without Ray.

    rows, checkpoints → lines → answers, timed in turn → statistics of rows → scores with intervals → tables, plot

Quality: against references if there are any, and always against full depth. Speed is three numbers: nominal, layer
ratio over the decode steps that ran, and wall clock against the same engine at full depth, over the same rows in the
same batches, of the whole run and of decode alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch

from actors.engine.schedule.schedule import MEASURED, Schedule, ScheduleSpec
from actors.generator import Generator
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.evaluate import EvalConfig
from pipeline.learn.evaluate.inputs import REFERENCE, EvalInputs, prepare
from pipeline.learn.evaluate.intervals import DEFAULT, paired_scores
from pipeline.learn.evaluate.line_statistics import available_metrics, line_statistics
from pipeline.learn.evaluate.plot import write_plot
from pipeline.learn.evaluate.results import Evaluation, Line, Score, output_files, write_answers, write_table
from pipeline.learn.evaluate.timed_runs import TimedRun, answer, common_batch, time_in_turn
from pipeline.learn.keep_order import ROWS, Row, measured_order, rank_layers
from pipeline.learn.variants import Variant, comparisons, speeds
from pipeline.runtime.announce import announce

OTHER_MODELS = ("reference", "model")  # groups of lines whose layers are another model's


@dataclass(frozen=True)
class Models:
    """The loaded models, which all cut the rows into the same batches.

    base: the model without its speed adapter, for full depth; None for a model without one. baselines: by the names
    of their lines.
    """

    model: Generator
    base: Generator | None
    reference: Generator | None
    baselines: dict[str, Generator]

    @property
    def full_depth(self) -> Generator:
        """The model whose full depth all lines are compared with."""
        return self.reference or self.base or self.model

    def at(self, schedule: Schedule) -> tuple[Generator, Schedule]:
        """The line of a schedule: speeds above 1x have the speed adapter."""
        return (self.base if self.base is not None and schedule.is_full_depth else self.model), schedule


def evaluate(config: EvalConfig) -> Evaluation:
    """Answer the rows at every speed, score and time them; write tables, plot, answers and a record of the settings.

    Raises UserError of one line for a mistake, before a model is loaded.
    """
    inputs = prepare(config)
    models = load_models(inputs)
    inputs = with_measured_order(inputs, models.base or models.model)
    variants = speeds(inputs.spec, list(dict.fromkeys([1.0, *config.speedups])), config.prompts)
    if config.compare is not None:
        variants += _compared(inputs, models.base or models.model, variants, config.compare)
    lines = {variant.name: models.at(variant.spec.build(inputs.num_layers)) for variant in variants}
    if models.reference is not None:
        variants = [Variant(REFERENCE, "reference", ScheduleSpec(), None), *variants]
        lines = {REFERENCE: (models.reference, models.reference.schedule), **lines}
    full_depth = variants[0].name
    variants += [Variant(name, "model", ScheduleSpec(), None) for name in models.baselines]
    lines |= {name: (baseline, baseline.schedule) for name, baseline in models.baselines.items()}

    runs = time_in_turn(lines, inputs.prompts, config.runs)
    announce(f"scoring {len(lines)} lines of {len(inputs.rows):,} answers")
    statistics = line_statistics(inputs, lines, runs, full_depth, available_metrics(inputs))
    scores = paired_scores(statistics, full_depth)
    evaluation = Evaluation(
        lines=[_line(variant, runs[variant.name], runs["1x"], scores[variant.name]) for variant in variants],
        output=inputs.folder.path,
        rows=len(inputs.rows),
        batch=models.model.max_batch,
        metric=inputs.metric,
        full_depth=full_depth,
        confidence=DEFAULT.confidence,
    )
    _write(evaluation, inputs, runs, models.model)
    return evaluation


def load_models(inputs: EvalInputs) -> Models:
    """Load all models of an evaluation."""

    def load(checkpoint: ResolvedCheckpoint, name: str, *, fast: bool = False) -> Generator:
        announce(f"loading {name}, for {len(inputs.rows):,} rows")
        return inputs.load(checkpoint, fast=fast)

    config = inputs.config
    model, base = load(inputs.model, config.model.path), None
    if inputs.model.adapter is not None:
        base, model = model, load(inputs.model, f"{config.model.path} with its speed adapter", fast=True)
    reference = None if inputs.reference is None else load(inputs.reference, str(config.reference_model))
    baselines = {name: load(found, config.baselines[name]) for name, found in inputs.baselines.items()}
    everyone = [one for one in (model, base, reference, *baselines.values()) if one is not None]
    batch = min(common_batch(generator, inputs.prompts, inputs.new_tokens) for generator in everyone)

    def limited(generator: Generator) -> Generator:
        return generator.at(generator.schedule, max_batch=batch)

    return Models(
        limited(model),
        None if base is None else limited(base),
        None if reference is None else limited(reference),
        {name: limited(baseline) for name, baseline in baselines.items()},
    )


def with_measured_order(inputs: EvalInputs, generator: Generator) -> EvalInputs:
    """The inputs with a keep order measured on full-depth answers of the first rows, if the recipe asks for one."""
    schedule = inputs.config.schedule
    if schedule.keep_order != MEASURED:
        return inputs
    identity = {**inputs.model.identity(), "dtype": inputs.config.model.dtype}
    order, warmup = measured_order(
        identity,
        lambda: generator.engine.decoder,
        _full_depth(inputs, generator),
        schedule.warmup,
        inputs.config.model.cache,
        announce,
    )
    return replace(inputs, spec=inputs.spec.overridden({"keep_order": order, "warmup": warmup}))


def _full_depth(inputs: EvalInputs, generator: Generator) -> list[Row]:
    """Prompts and full-depth answers of the first rows, for a keep order and for the answers' length."""
    announce(f"answering {min(ROWS, len(inputs.rows))} rows at full depth for the keep order")
    run = answer(generator, generator.schedule, inputs.prompts[:ROWS])
    return [(prompt.ids, row.token_ids or ()) for prompt, row in zip(inputs.prompts, run.answers, strict=False)]


def _compared(inputs: EvalInputs, generator: Generator, planned: Sequence[Variant], speedup: float) -> list[Variant]:
    """The built-in comparisons at the mean depth of one speed, over answers as long as full depth's.

    Without the first, the paper's own schedule, if it is planned already.
    """
    pairs = _full_depth(inputs, generator)
    order: Sequence[int] | None = inputs.config.learned_order
    if order is None:
        announce(f"learning a keep order from {len(pairs)} answers")
        order = rank_layers(generator.engine.decoder, pairs, warmup=inputs.spec.warmup).keep_order
        announce(f"learned_order: {list(order)}")
    tokens = round(sum(len(response) for _, response in pairs) / len(pairs))
    paper, *others = comparisons(inputs.spec, inputs.num_layers, speedup, tokens, order)
    known = [variant.spec.build(inputs.num_layers).to_dict() for variant in planned]
    return others if paper.spec.build(inputs.num_layers).to_dict() in known else [paper, *others]


def _line(variant: Variant, run: TimedRun, base: TimedRun, scores: Mapping[str, Score]) -> Line:
    """base: the run of 1x, for the wall clocks."""
    stats = run.stats
    own_layers = variant.group not in OTHER_MODELS
    seconds, decode = run.median_seconds, run.median_decode_seconds
    return Line(
        name=variant.name,
        group=variant.group,
        nominal=variant.nominal,
        prompt=variant.spec.prompt,
        layer_ratio=stats.full_layer_steps / stats.layer_steps if stats.layer_steps and own_layers else None,
        mean_depth=stats.layer_steps / stats.decode_steps if stats.decode_steps else None,
        seconds=seconds,
        decode_seconds=decode,
        tokens_per_second=stats.generated_tokens / seconds,
        wall_clock=base.median_seconds / seconds,
        decode_wall_clock=base.median_decode_seconds / decode if decode else 1.0,
        cache_bytes=stats.cache_bytes,
        scores=dict(scores),
    )


def _write(evaluation: Evaluation, inputs: EvalInputs, runs: Mapping[str, TimedRun], generator: Generator) -> None:
    """Replace the files of the last evaluation; the record, written last, holds the settings behind the numbers."""
    folder = inputs.folder
    folder.discard(folder.files())
    folder.claim(output_files(runs))
    write_answers(folder.path, inputs.columns(), {name: run.answers for name, run in runs.items()})
    write_table(evaluation)
    write_plot(evaluation)
    folder.save(
        {
            "config": inputs.config.model_dump(mode="json"),
            "cache_bytes": generator.cache_bytes,
            "version": version("skipdecode"),
            "device": generator.device_name(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
    )
