"""Answers the first rows of a job in this process (`skipdecode try`). Writes no files. Does not import Ray."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens
from pipeline.answer.output import row_ids
from pipeline.answer.settings import fetched
from pipeline.answer.stage import prompts
from pipeline.answer.stats import id_value
from pipeline.config.job import JobConfig
from pipeline.input.rows import read_shards
from pipeline.plan.columns import check_columns
from pipeline.plan.hardware import Hardware
from pipeline.plan.job import announce_no_gain, can_gain, plan
from pipeline.prepare.chat import ends_with_assistant
from pipeline.prepare.prompt_spec import PromptSpec, prompt_spec
from pipeline.prepare.prompts import CONTROL_TOKENS, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.runtime.announce import announced

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedRow:
    """A row with the prompt that the model gets, and with the answers."""

    id: Any  # value of the id column; without an id column, file and row number
    prompt: str  # decoded prompt, with special tokens; "" if the row has an error
    answers: list[Answer]
    full_depth: list[Answer]  # for each of `answers`, the one at full depth; [] if they cannot differ
    control_tokens: int  # number of control tokens in the row's values


def answer_first_rows(config: JobConfig, rows: int, say: Callable[[str], None] = log.debug) -> list[TriedRow]:
    """Answer the first `rows` rows of the input. Pass notes about the job, e.g. which tokens end answers, to `say`.

    If the job's schedule can change answers, answer the rows at full depth too, with the same random numbers.
    Random numbers, prompts and row errors are the same as in the job. Batches are smaller, and no prefix is shared.
    Except in float32, answers may therefore differ. Raises UserError; NoRows if the input is empty.
    """
    check_columns(config)
    job = plan(_on_this_machine(config), None, Hardware(), limit=rows, preview=True)
    section, manifest = job.config.input, job.manifest
    spec = prompt_spec(job.config, job.checkpoint, manifest.batching.planned)
    announce_no_gain(job)
    prepared: list[tuple[Any, Prompt, int]] = []
    continued = False
    with announced("preparing the prompts"):
        for shard, table in read_shards(manifest.files, manifest.shards, manifest.schema, job.config.storage):
            done = prepare_table(table, spec)
            ids = map(id_value, row_ids(table, section.id_column, manifest.batching.root, shard))
            parsed = done[CONTROL_TOKENS].fill_null(0).to_pylist()
            prepared += zip(ids, prompts(done, shard), parsed, strict=True)
            chats = table[section.messages].to_pylist() if section.messages is not None else []
            continued |= any(map(ends_with_assistant, chats))
    with announced("loading the model"):
        from actors.generator import Generator

        settings = fetched(job.settings)
        generator = Generator(settings)
    if continued and not section.continue_final:
        note = "a chat ends with an assistant's message, but the model starts a new message"
        say(f"{note}; to continue the last one, set input.continue_final: true")
    say(f"answers end at {', '.join(_ends(job.checkpoint.checkpoint.path, spec)) or 'no token (the model names none)'}")
    given = [prompt for _, prompt, _ in prepared]
    with announced("answering"):
        answers, full_depth = generator.answer(given), list[Answer]()
    if not job.schedule.is_full_depth and can_gain(job):
        schedule = job.checkpoint.checkpoint.schedule({"speedup": 1.0})
        with announced("answering at full depth"):
            if settings.speed_adapter is None or settings.vllm is not None:
                generator = generator.at(schedule)
            else:  # the adapter is merged into the weights; free them first, because two models may not fit into memory
                generator.engine.close()
                del generator
                gc.collect()
                generator = Generator(replace(settings, speed_adapter=None, schedule=schedule))
            full_depth = generator.answer(given)
    tokenizer = tokenizer_of(spec.checkpoint)
    return [
        TriedRow(
            id,
            tokenizer.decode(list(prompt.ids)) if prompt.ids else "",
            [answer for answer in answers if answer.row == row],
            [answer for answer in full_depth if answer.row == row],
            control_tokens,
        )
        for row, (id, prompt, control_tokens) in enumerate(prepared)
    ]


def same_tokens(answer: Answer, other: Answer) -> int:
    """Return how many tokens two answers have in common, in the same order."""
    matcher = SequenceMatcher(None, answer.token_ids or (), other.token_ids or (), autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def _ends(checkpoint: Any, spec: PromptSpec) -> list[str]:
    """Return the tokens and texts that end an answer, each with the key or file that names it."""
    tokenizer, sampling = tokenizer_of(spec.checkpoint), spec.sampling
    ends = {} if sampling.ignore_eos else end_tokens(checkpoint, tokenizer, spec.vocab_size)
    tokens = [(token, ", ".join(places)) for token, places in sorted(ends.items())]
    tokens += [(token, "sampling.stop_token_ids") for token in sampling.stop_token_ids]
    named = [f"{tokenizer.decode([token])!r} ({places})" for token, places in tokens]
    return [*named, *(f"{text!r} (sampling.stop)" for text in sampling.stop)]


def _on_this_machine(config: JobConfig) -> JobConfig:
    """Return the job, with one GPU if it asks for GPUs. Raises UserError if this machine has no GPU."""
    if not config.actors.gpus:
        return config
    import torch

    if not torch.cuda.is_available():
        raise UserError("actors.gpus: torch finds no GPU here; to try the job on the CPU, add --set actors.gpus=0")
    return config.model_copy(update={"actors": config.actors.model_copy(update={"gpus": 1.0})})
