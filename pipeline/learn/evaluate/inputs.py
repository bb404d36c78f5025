"""Reads and checks an evaluation's rows, checkpoints, schedule and output folder before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from actors.answers import Prompt
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.machine import process_memory
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from actors.generator import Generator
from actors.settings import EngineSettings
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch, resolve_checkpoint
from pipeline.config.adapt import SHORT
from pipeline.config.evaluate import EvalConfig, EvalDataConfig
from pipeline.config.forms import normalized
from pipeline.config.job import StorageConfig
from pipeline.input.rows import read_columns
from pipeline.input.schema import MissingColumn
from pipeline.learn.evaluate.metrics import is_label
from pipeline.learn.evaluate.results import RECORD, output_files, slug
from pipeline.learn.rows import Text, is_text, token_ids
from pipeline.messages import counted
from pipeline.prepare.tokenizer import longest, tokenize_labels
from pipeline.storage.owned_folder import OwnedFolder, check_apart, local_path

REFERENCE = "reference model"  # the reference model's name in evaluate's table
CHANCE = "chance"  # name of the table line for answers that do not depend on the prompt


@dataclass(frozen=True)
class Variant:
    """A schedule or model to measure, which becomes a line of evaluate's table.

    spec: complete schedule. nominal: nominal speed-up; None for a reference model or baseline.
    """

    name: str
    spec: ScheduleSpec
    nominal: float | None


def speeds(spec: ScheduleSpec, speedups: Sequence[float], prompts: Sequence[str] = ()) -> list[Variant]:
    """Return `spec` at 1x and at each speed-up, then at each speed-up above 1x with each other policy in `prompts`."""
    speedups = list(dict.fromkeys([1.0, *map(float, speedups)]))
    variants = [Variant(f"{each:g}x", spec.overridden({"speedup": each}), each) for each in speedups]
    for prompt, speedup in product(prompts, speedups):
        if prompt != spec.prompt and speedup > 1:
            changed = spec.overridden({"speedup": speedup, "prompt": prompt})
            variants.append(Variant(f"{speedup:g}x prompt={prompt}", changed, speedup))
    return variants


@dataclass(frozen=True)
class EvalRow:
    """Row `number` of the file `path`. If the data has no references, `references` is (); if no ids, `id` is None."""

    prompt: Text
    references: tuple[str, ...]
    id: Any
    path: str
    number: int


@dataclass(frozen=True)
class EvalInputs:
    """Inputs of an evaluation.

    prompts: token ids of each row. new_tokens: maximum number of tokens of an answer. others: line name -> reference
    model or baseline. spec: the checkpoint's schedule with the changes from the evaluation file.
    """

    config: EvalConfig
    rows: list[EvalRow]
    prompts: list[Prompt]
    new_tokens: int
    model: ResolvedCheckpoint
    others: dict[str, ResolvedCheckpoint]
    spec: ScheduleSpec
    folder: OwnedFolder

    @property
    def is_labelling(self) -> bool:
        """Whether answers are labels: `choices` is set, or every reference is a single word."""
        return self.config.choices is not None or (
            self.config.data.references is not None
            and all(is_label(reference) for row in self.rows for reference in row.references)
        )

    @property
    def metric(self) -> str:
        """Name of the main metric, which decides how good a line is."""
        if self.config.data.references is not None:
            return "exact_match" if self.is_labelling else "bleu"
        return "agreement_exact" if self.is_labelling or self.new_tokens <= SHORT else "fidelity"

    def load(self, checkpoint: ResolvedCheckpoint, *, fast: bool = False) -> Generator:
        """Load `checkpoint` with a schedule at full depth. fast: merge its speed adapter, as jobs above 1x do."""
        config = self.config
        full = checkpoint.checkpoint.schedule({"speedup": 1.0})
        # `model.weights` applies only to the checkpoint in `model`
        model = config.model if checkpoint is self.model else config.model.model_copy(update={"weights": None})
        on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not torch.cuda.is_available())
        generator = Generator(
            EngineSettings(
                str(fetch(checkpoint.source)),
                speed_adapter=str(fetch(checkpoint.adapter)) if fast and checkpoint.adapter is not None else None,
                # the adapter is merged only if the model is loaded with a schedule that skips layers
                schedule={"depths": (max(1, full.warmup),)} if fast else full,
                unadapted=True,
                sampling=config.sampling.model_dump(exclude={"seed"}),
                seed=config.sampling.seed,
                choices=config.choices,
                dtype=model.dtype,
                weights=model.weights,
                device=model.device,
                threads=config.threads,
                cache_bytes=config.cache_bytes or (min(2**30, process_memory() // 4) if on_cpu else 8 * 2**30),
                max_batch=config.max_batch,
            )
        )
        return generator.at(full)


def prepare(config: EvalConfig) -> EvalInputs:
    """Read the rows, resolve the checkpoints, and check that they fit together, without loading a model.

    Raises UserError if the configuration or the data are wrong.
    """
    # always the project's own engine: vLLM gives no logits for a schedule that skips layers
    config = config.model_copy(update={"model": config.model.model_copy(update={"engine": "builtin", "vllm": None})})
    folder = OwnedFolder(local_path("output", config.output), RECORD, "output")
    folder.check([])
    rows = read_rows(config.data, config.choices, config.storage)
    model = resolve_checkpoint(config.model, config.storage)
    changes = config.schedule.changes()
    if config.schedule.keep_order == MEASURED:
        changes["keep_order"] = "paper"  # a placeholder until the order is measured
    spec = (model.checkpoint.spec or ScheduleSpec()).overridden(changes)
    variants = speeds(spec, config.speedups, config.prompts)
    try:
        for variant in variants:
            variant.spec.build(model.checkpoint.num_layers)
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None
    names = [REFERENCE, *(variant.name for variant in variants)]
    taken = {slug(name): name for name in (*names, CHANCE)}
    for name in config.baselines:
        if slug(name) in taken:
            raise UserError(f"baselines: {name!r} and {taken[slug(name)]!r} would write the same file; rename {name!r}")
        taken[slug(name)] = name
    folder.check(output_files([*names, *config.baselines]))
    reserved, new_tokens = 1, config.sampling.max_new_tokens
    if config.choices is not None:
        tokenizer = load_tokenizer(model.checkpoint.path)
        ids = tokenize_labels(tokenizer, config.choices)
        longest(config.choices, ids)  # only checks the labels: its error names the bad label, ChoiceTrie's does not
        trie = ChoiceTrie([ids[label] for label in config.choices], [tokenizer.eos_token_id])
        reserved = new_tokens = trie.most_tokens
    prompts = _tokenized(rows, model, reserved)
    others: dict[str, ResolvedCheckpoint] = {}
    sources = {"model.path": model.source, "model.speed_adapter": model.adapter}
    paths = {} if config.reference_model is None else {REFERENCE: ("reference_model", config.reference_model)}
    for name, (key, path) in (paths | {one: (f"baselines.{one}", at) for one, at in config.baselines.items()}).items():
        others[name] = _same_tokenizer(key, path, model, config)
        _check_context(prompts, others[name], reserved, f"{key}'s context")
        sources[key] = others[name].source
    used = {key: [source] for key, source in sources.items() if isinstance(source, str)}
    check_apart("output", folder.path, {"data.path": config.data.path, **used})
    folder.make()
    return EvalInputs(config, rows, prompts, new_tokens, model, others, spec, folder)


def read_rows(data: EvalDataConfig, choices: Sequence[str] | None, storage: StorageConfig) -> list[EvalRow]:
    """Return at most `data.limit` rows. Raises UserError, with file, row and column, if a row cannot be scored."""
    labels = None if choices is None else {normalized(label) for label in choices}
    columns = [data.prompt, *([data.references] if data.references is not None else [])]
    rows: list[EvalRow] = []
    for path in data.path:
        left = None if data.limit is None else data.limit - len(rows)
        if left == 0:
            break
        try:
            values = read_columns(path, columns, storage, left, [] if data.id in columns else [data.id])
        except MissingColumn as error:
            if error.column != data.references:
                raise
            hint = "to measure agreement with full depth instead, set data.references: null"
            raise UserError(f"{error}; {hint}") from None
        prompts = values[data.prompt]
        ids: list[Any] = values.get(data.id, [None] * len(prompts))
        references: list[tuple[Any, ...]] = [()] * len(prompts)
        if data.references is not None:
            references = [tuple(one) if isinstance(one, list) else (one,) for one in values[data.references]]
        for number, (prompt, right, name) in enumerate(zip(prompts, references, ids, strict=True)):
            row = f"{path}: row {number}"
            if not is_text(prompt):
                raise UserError(f"{row}: column {data.prompt!r} must hold text or token ids that are not empty")
            if data.references is not None and (not right or not all(isinstance(one, str) for one in right)):
                raise UserError(f"{row} needs at least one reference; column {data.references!r} must hold text")
            for label in right:
                if labels is not None and normalized(label) not in labels:
                    raise UserError(f"{row}: label {label!r} is not one of choices; add it, or leave the row out")
            rows.append(EvalRow(prompt, right, name, path, number))
    if len(rows) < 2:
        raise UserError(f"{data.path[0]}: {counted(len(rows), 'row')} to score, but intervals need 2 or more; add rows")
    return rows


def _same_tokenizer(key: str, path: str, model: ResolvedCheckpoint, config: EvalConfig) -> ResolvedCheckpoint:
    """Resolve the checkpoint `path`. Raises UserError if its tokenizer differs from the tokenizer of `model`."""
    other = resolve_checkpoint(config.model.model_copy(update={"path": path, "speed_adapter": None}), config.storage)
    if load_tokenizer(other.checkpoint.path).get_vocab() != load_tokenizer(model.checkpoint.path).get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than {config.model.path}; answers are compared token by token, which "
            "needs the same vocabulary"
        )
    return other


def _tokenized(rows: Sequence[EvalRow], model: ResolvedCheckpoint, reserved: int) -> list[Prompt]:
    """Tokenize the rows. Raises UserError if the context has no room for a row and `reserved` new tokens."""
    encoded = token_ids(load_tokenizer(model.checkpoint.path), [row.prompt for row in rows])
    vocabulary = model.checkpoint.config.vocab_size
    for row, tokens in zip(rows, encoded, strict=True):
        if max(tokens, default=vocabulary) >= vocabulary:
            told = f"the prompt is empty, or has a token outside the model's vocabulary of {vocabulary}"
            raise UserError(f"{row.path}: row {row.number}: {told}; leave the row out")
    prompts = [Prompt(tokens, row.path, row.number) for row, tokens in zip(rows, encoded, strict=True)]
    _check_context(prompts, model, reserved, "a context")
    return prompts


def _check_context(prompts: Sequence[Prompt], model: ResolvedCheckpoint, reserved: int, named: str) -> None:
    """Raise UserError if the model's context has no room for a prompt and `reserved` new tokens.

    named: name of the context in the error.
    """
    context = model.checkpoint.context_length
    for prompt in prompts:
        if len(prompt.ids) + reserved > context:
            raise UserError(
                f"{prompt.source}: row {prompt.row}: prompt of {len(prompt.ids)} tokens leaves no room in {named} of "
                f"{context}"
            )
