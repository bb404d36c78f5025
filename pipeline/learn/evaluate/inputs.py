"""Inputs of an evaluation, read and checked before any model is loaded: rows, checkpoints, schedule, output folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.answers import Prompt
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.machine import process_memory
from actors.engine.model.loading import load_tokenizer
from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from actors.generator import Generator
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch, resolve_checkpoint
from pipeline.config.adapt import SHORT
from pipeline.config.evaluate import EvalConfig, EvalDataConfig
from pipeline.config.forms import normalized
from pipeline.config.job import StorageConfig
from pipeline.generate.settings import generator_settings
from pipeline.input.rows import read_columns
from pipeline.input.schema import MissingColumn
from pipeline.learn.evaluate.results import RECORD, output_files, slug
from pipeline.learn.variants import Variant, comparisons, speeds
from pipeline.messages import is_unicode
from pipeline.prepare.tokenizer import longest, tokenize_labels
from pipeline.storage.owned_folder import OwnedFolder, check_apart

REFERENCE = "reference model"  # name of its line, at full depth


@dataclass(frozen=True)
class EvalRow:
    """A row to answer and score.

    prompt: text or token ids. references: none where the data has none. id: None where the data has none.
    path, number: its file and its number there.
    """

    prompt: str | list[int]
    references: tuple[str, ...]
    id: Any
    path: str
    number: int

    @property
    def location(self) -> str:
        """File and row, for messages."""
        return f"{self.path}: row {self.number}"


@dataclass(frozen=True)
class EvalInputs:
    """Inputs of an evaluation.

    prompts: token ids of each row, by the model's tokenizer. new_tokens: of an answer at most. baselines: by the names
    of their lines. spec: the checkpoint's schedule with the recipe's changes. folder: the output folder.
    """

    config: EvalConfig
    rows: list[EvalRow]
    prompts: list[Prompt]
    new_tokens: int
    model: ResolvedCheckpoint
    reference: ResolvedCheckpoint | None
    baselines: dict[str, ResolvedCheckpoint]
    spec: ScheduleSpec
    folder: OwnedFolder

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.model.checkpoint.num_layers

    @property
    def is_labelling(self) -> bool:
        """Whether answers are labels: by choices, or because every reference is a single word."""
        return self.config.choices is not None or (
            self.config.data.references is not None
            and all(len(reference.split()) == 1 for row in self.rows for reference in row.references)
        )

    @property
    def metric(self) -> str:
        """The metric that lines are judged by.

        With references exact match of labels, else BLEU; without, exact agreement of labels and short answers, else
        fidelity.
        """
        if self.config.data.references is not None:
            return "exact_match" if self.is_labelling else "bleu"
        return "agreement_exact" if self.is_labelling or self.new_tokens <= SHORT else "fidelity"

    def columns(self) -> dict[str, list[Any]]:
        """The rows' own columns in the files of answers: id and references if the data has them, and prompt."""
        prompts: list[Any] = [row.prompt for row in self.rows]
        if any(isinstance(prompt, str) for prompt in prompts):  # files of both kinds: ids as text
            prompts = [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in prompts]
        columns = {"prompt": prompts}
        if any(row.id is not None for row in self.rows):
            columns = {"id": [row.id for row in self.rows], **columns}
        if self.rows[0].references:
            columns["references"] = [list(row.references) for row in self.rows]
        return columns

    def load(self, checkpoint: ResolvedCheckpoint, *, fast: bool = False) -> Generator:
        """One of the models, at full depth. fast: with its speed adapter, which no full depth of a job has."""
        config = self.config
        full = checkpoint.checkpoint.schedule({"speedup": 1.0})
        # any schedule below full depth merges the adapter
        start = {"depths": (max(1, full.warmup),)} if fast else {"speedup": 1.0}
        # others are compared with as they are
        model = config.model if checkpoint is self.model else config.model.model_copy(update={"weights": None})
        generator = Generator(
            str(fetch(checkpoint.source)),
            speed_adapter=str(fetch(checkpoint.adapter)) if fast and checkpoint.adapter is not None else None,
            schedule=start,
            unadapted=True,
            **generator_settings(model, config.sampling, config.choices),
            threads=config.threads,
            cache_bytes=_cache_bytes(config),
            max_batch=config.max_batch,
            cumulative_logprob=False,  # as in a job that does not write them
        )
        return generator.at(full)


def prepare(config: EvalConfig) -> EvalInputs:
    """Read the rows, resolve the checkpoints and check that all fit together; loads no model.

    Raises UserError of one line for a mistake.
    """
    # vLLM has no logits under a schedule
    model_config = config.model.model_copy(update={"engine": "library", "vllm": None})
    config = config.model_copy(update={"model": model_config})
    folder = _output_folder(config.output)
    rows = read_rows(config.data, config.choices, config.storage)
    model = resolve_checkpoint(config.model, config.storage)
    changes = config.schedule.changes()
    if config.schedule.keep_order == MEASURED:
        changes["keep_order"] = "paper"  # until it is measured
    spec = (model.checkpoint.spec or ScheduleSpec()).overridden(changes)
    names = [REFERENCE, *(variant.name for variant in _planned(config, spec, model.checkpoint.num_layers))]
    _check_names(config.baselines, names)
    folder.check(output_files([*names, *config.baselines]))
    trie = _trie(config, model)
    reserved = 1 if trie is None else trie.most_tokens
    prompts = _tokenized(rows, model, reserved)
    further = {} if config.reference_model is None else {"reference_model": config.reference_model}
    further |= {f"baselines.{name}": path for name, path in config.baselines.items()}
    others = {key: _same_tokenizer(key, path, model, config) for key, path in further.items()}
    for key, other in others.items():
        _check_context(rows, prompts, other, reserved, key)
    models = {"model.path": model, **others}
    local = {key: [found.source] for key, found in models.items() if isinstance(found.source, str)}
    if isinstance(model.adapter, str):
        local["model.speed_adapter"] = [model.adapter]
    check_apart("output", folder.path, {"data.path": config.data.path, **local})
    return EvalInputs(
        config=config,
        rows=rows,
        prompts=prompts,
        new_tokens=config.sampling.max_new_tokens if trie is None else trie.most_tokens,
        model=model,
        reference=others.get("reference_model"),
        baselines={name: others[f"baselines.{name}"] for name in config.baselines},
        spec=spec,
        folder=folder,
    )


def read_rows(data: EvalDataConfig, choices: Sequence[str] | None, storage: StorageConfig) -> list[EvalRow]:
    """The rows, at most `data.limit`. Raises UserError that names file, column and row of one that cannot be scored."""
    labels = None if choices is None else {normalized(label) for label in choices}
    rows: list[EvalRow] = []
    for path in data.path:
        rows += _rows_of(path, data, labels, None if data.limit is None else data.limit - len(rows), storage)
        if len(rows) == data.limit:
            break
    if len(rows) < 2:
        raise UserError(
            f"{data.path[0]}: {len(rows) or 'no'} row{'s' * (len(rows) != 1)} to score; intervals are over rows: "
            "give at least 2"
        )
    return rows


def _rows_of(
    path: str, data: EvalDataConfig, labels: set[str] | None, limit: int | None, storage: StorageConfig
) -> list[EvalRow]:
    columns = [data.prompt, *([data.references] if data.references is not None else [])]
    try:
        values = read_columns(path, columns, storage, limit, [] if data.id in columns else [data.id])
    except MissingColumn as error:
        if error.column != data.references:
            raise
        raise UserError(
            f"{error}; data.references: null measures agreement with full depth, without references"
        ) from None
    rows = []
    for number, prompt in enumerate(values[data.prompt]):
        references: tuple[Any, ...] = ()
        if not _is_prompt(prompt):
            raise UserError(
                f"{path}: row {number}: column {data.prompt!r} must hold text or token ids, none of them empty"
            )
        if data.references is not None:
            value = values[data.references][number]
            references = tuple(value) if isinstance(value, list) else (value,)
            _check_references(references, f"{path}: row {number}", data.references, labels)
        rows.append(EvalRow(prompt, references, values[data.id][number] if data.id in values else None, path, number))
    return rows


def _check_references(references: Sequence[Any], location: str, column: str, labels: set[str] | None) -> None:
    if not references or not all(_is_text(reference) for reference in references):
        raise UserError(f"{location} needs a prompt and at least one reference; column {column!r} must hold text")
    for label in references:
        if labels is not None and normalized(label) not in labels:
            raise UserError(f"{location}: label {label!r} is not one of choices; add it, or leave the row out")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(token, int) and token >= 0 for token in value)
    return _is_text(value) and bool(value.strip())


def _planned(config: EvalConfig, spec: ScheduleSpec, num_layers: int) -> list[Variant]:
    """The lines of the model itself, each of which can be built."""
    variants = speeds(spec, [1.0, *config.speedups], config.prompts)
    try:
        for variant in variants:
            variant.spec.build(num_layers)
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None
    if config.compare is not None:
        order = config.learned_order or list(range(num_layers))  # any, until it is learned
        try:
            variants += comparisons(spec, num_layers, config.compare, config.sampling.max_new_tokens, order)
        except ValueError as error:
            raise UserError(f"compare: {error}") from None
    return variants


def _cache_bytes(config: EvalConfig) -> int:
    """The budget of one batch; default that of a job's only actor."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    return min(2**30, process_memory() // 4) if _on_cpu(config) else 8 * 2**30


def _on_cpu(config: EvalConfig) -> bool:
    device = config.model.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _output_folder(output: str) -> OwnedFolder:
    """The output folder, made unless it holds files of the user. Raises UserError if it is not writable."""
    if "://" in output:
        raise UserError(f"output: {output}: evaluate writes into a local folder; copy it from there")
    folder = OwnedFolder(Path(output), RECORD, "output")
    folder.check([])
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"output: {output}: there is a file of that name; give a folder") from None
    except OSError as error:
        raise UserError(f"output: {output}: cannot be made: {error.strerror}") from None
    if not os.access(folder.path, os.W_OK | os.X_OK):
        raise UserError(f"output: {output}: not writable")
    return folder


def _check_names(baselines: Iterable[str], lines: Iterable[str]) -> None:
    """Raise UserError if a baseline's name, or the name of its answers' file, is another line's."""
    taken = {slug(name): name for name in lines}
    for name in baselines:
        file = slug(name)
        if not file:
            raise UserError(f"baselines: {name!r} leaves nothing to name a file by; use letters or digits")
        if file in taken:
            raise UserError(f"baselines: {name!r} is the name of another line, {taken[file]!r}; choose its own")
        taken[file] = name


def _same_tokenizer(key: str, path: str, model: ResolvedCheckpoint, config: EvalConfig) -> ResolvedCheckpoint:
    """A further checkpoint, which answers the same token ids. Raises UserError if its tokenizer is another."""
    other = resolve_checkpoint(config.model.model_copy(update={"path": path, "speed_adapter": None}), config.storage)
    if load_tokenizer(other.checkpoint.path).get_vocab() != load_tokenizer(model.checkpoint.path).get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than {config.model.path}; answers can only be compared token by "
            "token if the vocabulary is the same"
        )
    return other


def _trie(config: EvalConfig, model: ResolvedCheckpoint) -> ChoiceTrie | None:
    """The labels as the model's tokens; None without choices. Raises UserError if two have the same tokens."""
    if config.choices is None:
        return None
    tokenizer = load_tokenizer(model.checkpoint.path)
    ids = tokenize_labels(tokenizer, config.choices)
    longest(config.choices, ids)  # names a wrong label by its text; the trie, by its number
    return ChoiceTrie([ids[label] for label in config.choices], tokenizer.eos_token_id)


def _tokenized(rows: Sequence[EvalRow], model: ResolvedCheckpoint, reserved: int) -> list[Prompt]:
    """The rows' token ids. Raises UserError for a row that does not fit the model with `reserved` new tokens."""
    tokenizer = load_tokenizer(model.checkpoint.path)
    vocabulary = model.checkpoint.config.vocab_size
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    prompts = []
    for row in rows:
        tokens = next(encoded) if isinstance(row.prompt, str) else row.prompt
        if not tokens:
            raise UserError(f"{row.location}: the tokenizer finds no token in this prompt; leave the row out")
        if max(tokens) >= vocabulary:
            raise UserError(f"{row.location}: token {max(tokens)} lies outside the model's vocabulary of {vocabulary}")
        prompts.append(Prompt(tokens, row.path, row.number))
    _check_context(rows, prompts, model, reserved)
    return prompts


def _check_context(
    rows: Sequence[EvalRow], prompts: Sequence[Prompt], model: ResolvedCheckpoint, reserved: int, key: str = ""
) -> None:
    """Raise UserError for a row whose prompt leaves fewer than `reserved` tokens of the context.

    key: the config key of a model other than `model.path`.
    """
    context = model.checkpoint.context_length
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.ids) + reserved > context:
            owner = f"{key}'s context" if key else "a context"
            raise UserError(
                f"{row.location}: prompt of {len(prompt.ids)} tokens leaves no room in {owner} of {context}"
            )
