"""What an evaluation is about, found and checked before any model is loaded: rows, checkpoints, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.choices import ChoiceTrie
from actors.engine.loading import load_tokenizer
from actors.engine.schedule import ScheduleSpec
from actors.generator import Generator, Prompt
from pipeline.checkpoints import Located, fetch, locate
from pipeline.choices import longest, tokenize_labels
from pipeline.config_evaluate import EvalConfig
from pipeline.evaluation_data import EvalRow, read_rows
from pipeline.variants import comparisons, speeds

CACHE_BYTES = 2**30


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    prompts: token ids of each row, by the model's tokenizer. spec: the checkpoint's schedule, the file's on top.
    """

    config: EvalConfig
    rows: list[EvalRow]
    prompts: list[Prompt]
    model: Located
    reference: Located | None
    beside: dict[str, Located]
    spec: ScheduleSpec

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

    def load(self, found: Located) -> Generator:
        """One of the models, at full depth."""
        config = self.config
        return Generator(
            str(fetch(found.source)),
            schedule={"speedup": 1.0},
            sampling=config.sampling.model_dump(exclude={"seed"}),
            choices=config.choices,
            seed=config.sampling.seed,
            dtype=config.model.dtype,
            device=config.model.device,
            compile=config.model.compile,
            threads=config.threads,
            cache_bytes=CACHE_BYTES,
            max_batch=config.max_batch,
        )


def prepare(config: EvalConfig, source: str) -> Subject:
    """Read the rows and look at the checkpoints. ValueError of one line for what does not fit; loads no model."""
    rows = read_rows(config.data, config.choices)
    model = locate(config.model, config.storage)
    checkpoint = model.checkpoint
    spec = (checkpoint.spec or ScheduleSpec()).overridden(config.schedule.changes())
    try:
        for one in speeds(spec, [1.0, *config.speedups]):
            one.spec.build(checkpoint.num_layers)
    except ValueError as error:
        raise ValueError(f"{source}: schedule: {error}") from None
    if config.compare is not None:
        try:
            comparisons(
                spec, checkpoint.num_layers, config.compare, config.sampling.max_new_tokens, config.learned_order
            )
        except ValueError as error:
            raise ValueError(f"{source}: compare: {error}") from None
    prompts = _tokenized(rows, model, config, source)
    reference = None
    if config.reference_model is not None:
        reference = _other("reference_model", config.reference_model, model, prompts, rows, config, source)
    beside = {
        name: _other(f"beside.{name}", path, model, prompts, rows, config, source)
        for name, path in config.beside.items()
    }
    return Subject(config, rows, prompts, model, reference, beside, spec)


def _other(
    key: str,
    path: str,
    model: Located,
    prompts: Sequence[Prompt],
    rows: Sequence[EvalRow],
    config: EvalConfig,
    source: str,
) -> Located:
    """A further checkpoint that is to answer the same token ids; ValueError names `key` if it cannot."""
    found = locate(config.model.model_copy(update={"path": path}), config.storage)
    if load_tokenizer(found.checkpoint.path).get_vocab() != load_tokenizer(model.checkpoint.path).get_vocab():
        raise ValueError(
            f"{source}: {key}: {path} has another tokenizer than {config.model.path}; answers can only be held "
            "against each other token by token if the vocabulary is the same"
        )
    context = found.checkpoint.context_length
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.ids) >= context:
            raise ValueError(
                f"{row.place}: prompt of {len(prompt.ids)} tokens leaves no room in {key}'s context of {context}"
            )
    return found


def _tokenized(rows: Sequence[EvalRow], model: Located, config: EvalConfig, source: str) -> list[Prompt]:
    """The rows' token ids; ValueError names a row, or a choice, that the model cannot take."""
    tokenizer = load_tokenizer(model.checkpoint.path)
    vocabulary, context = model.checkpoint.config.vocab_size, model.checkpoint.context_length
    room = 1
    if config.choices is not None:
        ids = tokenize_labels(tokenizer, config.choices)
        try:
            room = longest(config.choices, ids)
            ChoiceTrie([ids[label] for label in config.choices], tokenizer.eos_token_id)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    prompts = []
    for row in rows:
        tokens = next(encoded) if isinstance(row.prompt, str) else row.prompt
        if len(tokens) + room > context:
            raise ValueError(f"{row.place}: prompt of {len(tokens)} tokens leaves no room in a context of {context}")
        if max(tokens, default=0) >= vocabulary:
            raise ValueError(f"{row.place}: token {max(tokens)} lies outside the model's vocabulary of {vocabulary}")
        prompts.append(Prompt(tokens, row.path, row.number))
    return prompts
