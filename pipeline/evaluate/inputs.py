"""What an evaluation is about, found and checked before any model is loaded: rows, checkpoints, schedule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from actors.answers import Prompt
from actors.engine.choices import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.loading import load_tokenizer
from actors.engine.schedule import ScheduleSpec
from actors.engine.schedule_file import SCHEDULE_FILE
from actors.engine.schedule_variants import comparisons, speeds
from actors.generator import Generator
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch, resolve_checkpoint
from pipeline.config.evaluate import EvalConfig
from pipeline.config.labels import longest, tokenize_labels
from pipeline.evaluate.data import EvalRow, read_rows
from pipeline.evaluate.results import RECORD, output_files, slug
from pipeline.generate.settings import generator_settings
from pipeline.storage.owned_folder import OwnedFolder, check_apart

REFERENCE = "reference model"  # its line, at full depth


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    prompts: token ids of each row, by the model's tokenizer. new_tokens: of an answer at most. spec: the
    checkpoint's schedule, the file's on top.
    """

    config: EvalConfig
    rows: list[EvalRow]
    prompts: list[Prompt]
    new_tokens: int
    model: ResolvedCheckpoint
    reference: ResolvedCheckpoint | None
    beside: dict[str, ResolvedCheckpoint]
    spec: ScheduleSpec
    folder: OwnedFolder

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.model.checkpoint.num_layers

    @property
    def is_labelling(self) -> bool:
        """Answers are labels: by choices, or as every reference is a single word."""
        return self.config.choices is not None or (
            self.config.data.references is not None
            and all(len(reference.split()) == 1 for row in self.rows for reference in row.references)
        )

    @property
    def metric(self) -> str:
        """What lines are judged by: exact match of labels, BLEU of other references, else agreement."""
        if self.config.data.references is not None:
            return "exact_match" if self.is_labelling else "bleu"
        return "agreement_exact" if self.is_labelling else "agreement_rouge_l"

    def load(self, found: ResolvedCheckpoint) -> Generator:
        """One of the models, at full depth."""
        config = self.config
        paged = config.model.engine == "paged" and not on_cpu(config)  # its cache stays allocated, once a model
        caches = 1 + (self.reference is not None) + len(self.beside) if paged else 1
        return Generator(
            str(fetch(found.source)),
            schedule={"speedup": 1.0},
            **generator_settings(config.model, config.sampling, config.choices),
            threads=config.threads,
            cache_bytes=_cache_bytes(config) // caches,
            max_batch=config.max_batch,
            cumulative_logprob=False,  # as a job, unless it writes them
        )


def prepare(config: EvalConfig, source: str, *, search: bool = False) -> Subject:
    """Check the output folder, read the rows and resolve the checkpoints.

    Loads no model. search: the output is a schedule, not tables. Raises UserError of one line for what does not fit.
    """
    folder = _make_output(config.output, source)
    rows = read_rows(config.data, config.choices)
    model = resolve_checkpoint(config.model, config.storage)
    checkpoint = model.checkpoint
    spec = (checkpoint.spec or ScheduleSpec()).overridden(config.schedule.changes())
    planned = speeds(spec, [1.0, *config.speedups])
    try:
        for one in planned:
            one.spec.build(checkpoint.num_layers)
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None
    if config.compare is not None:
        try:
            order = config.learned_order or list(range(checkpoint.num_layers))  # not yet learned: any will do
            planned += comparisons(spec, checkpoint.num_layers, config.compare, config.sampling.max_new_tokens, order)
        except ValueError as error:
            raise UserError(f"compare: {error}") from None
    folder.check(
        [SCHEDULE_FILE] if search else output_files([REFERENCE, *(one.name for one in planned), *config.beside])
    )
    _check_names(config.beside, [REFERENCE, *(one.name for one in planned)], source)
    trie = _trie(model, config, source)
    room = 1 if trie is None else trie.most_tokens
    prompts = _tokenized(rows, model, room)

    def other(key: str, path: str) -> ResolvedCheckpoint:
        found = _other(key, path, model, config, source)
        _check_room(rows, prompts, found, room, key)
        return found

    reference = None if config.reference_model is None else other("reference_model", config.reference_model)
    beside = {name: other(f"beside.{name}", path) for name, path in config.beside.items()}
    models = {"model.path": model, **({} if reference is None else {"reference_model": reference})}
    models |= {f"beside.{name}": found for name, found in beside.items()}
    local = {key: [found.source] for key, found in models.items() if isinstance(found.source, str)}
    check_apart("output", folder.path, {"data.path": config.data.path, **local})
    return Subject(
        config=config,
        rows=rows,
        prompts=prompts,
        new_tokens=config.sampling.max_new_tokens if trie is None else trie.most_tokens,
        model=model,
        reference=reference,
        beside=beside,
        spec=spec,
        folder=folder,
    )


def _cache_bytes(config: EvalConfig) -> int:
    """The budget of one batch, where the file gives none that of a job's only actor."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    return min(2**30, psutil.virtual_memory().total // 4) if on_cpu(config) else 8 * 2**30


def on_cpu(config: EvalConfig) -> bool:
    """Whether the models run there."""
    device = config.model.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _make_output(output: str, source: str) -> OwnedFolder:
    """The output folder, made unless it holds files of the user; UserError if it cannot be written into."""
    if "://" in output:
        raise UserError(f"output: {output}: evaluate writes into a local folder; copy it from there")
    folder = Path(output)
    owned = OwnedFolder(folder, RECORD, "output")
    owned.check([])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"output: {output}: there is a file of that name; give a folder") from None
    except OSError as error:
        raise UserError(f"output: {output}: cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"output: {output}: not writable")
    return owned


def _check_names(beside: Iterable[str], planned: Iterable[str], source: str) -> None:
    """ValueError if two lines would share a name, or the file that their answers go into."""
    taken = {slug(name): name for name in planned}
    for name in beside:
        file = slug(name)
        if not file:
            raise UserError(f"beside: {name!r} leaves nothing to name a file by; use letters or digits")
        if file in taken:
            raise UserError(f"beside: {name!r} is the name of another line, {taken[file]!r}; choose its own")
        taken[file] = name


def _other(key: str, path: str, model: ResolvedCheckpoint, config: EvalConfig, source: str) -> ResolvedCheckpoint:
    """A further checkpoint that is to answer the same token ids; ValueError names `key` if it has no such."""
    found = resolve_checkpoint(config.model.model_copy(update={"path": path}), config.storage)
    if load_tokenizer(found.checkpoint.path).get_vocab() != load_tokenizer(model.checkpoint.path).get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than {config.model.path}; answers can only be held "
            "against each other token by token if the vocabulary is the same"
        )
    return found


def _trie(model: ResolvedCheckpoint, config: EvalConfig, source: str) -> ChoiceTrie | None:
    """The labels as the model's tokens, None without choices; ValueError if they cannot be told apart."""
    if config.choices is None:
        return None
    tokenizer = load_tokenizer(model.checkpoint.path)
    ids = tokenize_labels(tokenizer, config.choices)
    try:
        longest(config.choices, ids)  # refuses by the label's text, where the trie knows but its number
        return ChoiceTrie([ids[label] for label in config.choices], tokenizer.eos_token_id)
    except ValueError as error:
        raise UserError(str(error)) from None


def _tokenized(rows: Sequence[EvalRow], model: ResolvedCheckpoint, room: int) -> list[Prompt]:
    """The rows' token ids; ValueError names a row that the model cannot take with `room` tokens behind it."""
    tokenizer = load_tokenizer(model.checkpoint.path)
    vocabulary = model.checkpoint.config.vocab_size
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    prompts = []
    for row in rows:
        tokens = next(encoded) if isinstance(row.prompt, str) else row.prompt
        if not tokens:
            raise UserError(f"{row.place}: the tokenizer finds no token in this prompt; leave the row out")
        if max(tokens) >= vocabulary:
            raise UserError(f"{row.place}: token {max(tokens)} lies outside the model's vocabulary of {vocabulary}")
        prompts.append(Prompt(tokens, row.path, row.number))
    _check_room(rows, prompts, model, room)
    return prompts


def _check_room(
    rows: Sequence[EvalRow], prompts: Sequence[Prompt], found: ResolvedCheckpoint, room: int, whose: str = ""
) -> None:
    """ValueError names a row whose prompt leaves fewer than `room` tokens of the context. whose: of another model."""
    context = found.checkpoint.context_length
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.ids) + room > context:
            of = f"{whose}'s context" if whose else "a context"
            raise UserError(f"{row.place}: prompt of {len(prompt.ids)} tokens leaves no room in {of} of {context}")
