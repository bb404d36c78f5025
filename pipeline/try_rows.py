"""The first rows of a job answered in this process. Nothing is written, and ray is not imported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.generate.distributions import id_value
from pipeline.generate.output import row_ids
from pipeline.generate.settings import fetched
from pipeline.generate.stage import prompts
from pipeline.input.files import InputFile, input_root, list_input
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard, cut_shards
from pipeline.plan.agreement import announce_no_gain
from pipeline.plan.batching import plan_batching
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import Manifest, NoRows, limited, pinned_snapshot, read_footers, with_snapshot
from pipeline.planned import PlannedJob, generator_arguments, planned_schedule
from pipeline.prepare.chat import ends_with_assistant
from pipeline.prepare.prompt_spec import check_generation, check_spec, prompt_spec
from pipeline.prepare.prompts import CONTROL_TOKENS, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.run.in_process import InProcess
from pipeline.runtime.announce import announced

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedRow:
    """A row as the model saw it, and its answers.

    Args:
        id: the row's id column, else file and row number.
        prompt: text of the prompt's tokens; "" for a row with an error.
        answers: answers to the prompt.
        control_tokens: that its prompt spells and that were parsed.
    """

    id: Any
    prompt: str
    answers: list[Answer]
    control_tokens: int


def answer_first_rows(config: JobConfig, rows: int, say: Callable[[str], None] = log.debug) -> list[TriedRow]:
    """Answer the first `rows` rows of the input.

    Random numbers, prompts and row errors are those of the job. Batches are smaller and no prefix is shared, so
    that in types other than float32 an answer may differ.

    Args:
        say: called with lines about the job, such as the tokens at which answers end.

    Raises:
        UserError: configuration, checkpoint or input are wrong.
        NoRows: the input has no rows.
    """
    with announced("reading the configuration and the checkpoint's description"):
        check_columns(config)
        config = with_snapshot(_on_this_machine(config), pinned_snapshot(config, None))
        checkpoint = resolve_checkpoint(config.model, config.storage)
        schedule = planned_schedule(config, checkpoint)
        check_generation(config, checkpoint)
        check_spec(prompt_spec(config, checkpoint, time.time()))
        announce_no_gain(schedule, prompt_spec(config, checkpoint, time.time()))
    with announced("reading the input"):
        files, shards, schema = _first_rows(config, rows)
        root = input_root(config.input, config.storage, {file.url for file in files})
    batching = replace(plan_batching(config, checkpoint, rows, InProcess()), planned=float(int(time.time())))
    manifest = Manifest("", {}, batching, files, shards, schema)
    job = PlannedJob(config, checkpoint, schedule, manifest)
    spec = prompt_spec(config, checkpoint, batching.planned)
    ids: list[Any] = []
    prepared: list[Prompt] = []
    control_tokens: list[int] = []
    continued = False
    with announced("preparing the prompts"):
        for shard, table in read_shards(files, shards, schema, config.storage):
            done = prepare_table(table, spec)
            prepared += prompts(done, shard)
            control_tokens += done[CONTROL_TOKENS].fill_null(0).to_pylist()
            continued |= spec.messages is not None and any(map(ends_with_assistant, table[spec.messages].to_pylist()))
            ids += map(id_value, row_ids(table, config.input.id_column, root, shard))
    with announced("loading the model"):
        from actors.generator import Generator

        generator = Generator(**fetched(generator_arguments(job)))
    tokenizer = tokenizer_of(spec.checkpoint)
    ends = end_tokens(checkpoint.checkpoint.path, tokenizer, spec.vocab_size)
    named = (f"{tokenizer.decode([token])!r} ({', '.join(places)})" for token, places in sorted(ends.items()))
    if continued and not config.input.continue_final:
        say("messages end with an assistant's turn: input.continue_final: true continues it; else a new one begins")
    say(f"answers end at {', '.join(named) or 'no token: the model names none'}")
    with announced("answering"):
        answers = generator.answer(prepared)
    return [
        TriedRow(
            ids[row],
            tokenizer.decode(list(prompt.ids)) if prompt.ids else "",
            [answer for answer in answers if answer.row == row],
            control_tokens[row],
        )
        for row, prompt in enumerate(prepared)
    ]


def _on_this_machine(config: JobConfig) -> JobConfig:
    """Return the job with one actor, and a whole GPU if it asks for one. Raises UserError if there is none here."""
    if not config.actors.gpus:
        return config
    import torch

    if not torch.cuda.is_available():
        raise UserError("actors.gpus: torch finds no GPU here; --set actors.gpus=0 tries the job on the CPU")
    return config.model_copy(update={"actors": config.actors.model_copy(update={"gpus": 1.0})})


def _first_rows(config: JobConfig, rows: int) -> tuple[list[InputFile], list[Shard], pa.Schema]:
    """Files and shards of the first rows, and their schema; files after them are not opened.

    Of text files no further rows are read: the types are those of these rows.
    """
    listed = list_input(config.input, config.storage)
    check_output_disjoint(config, listed)
    files: list[InputFile] = []
    for url, entry in listed.items():
        files += read_footers(config, {url: entry}, rows)[0]
        if sum(file.rows for file in files) >= rows:
            break
    files, schema = read_footers(config, {file.url: listed[file.url] for file in files}, rows)
    shards = limited(cut_shards(files, rows, config.shard_bytes), rows)
    if not shards:
        raise NoRows(f"{config.input.path[0]}: no rows in {len(files)} files")
    return files, shards, schema
