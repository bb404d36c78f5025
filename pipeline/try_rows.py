"""The first rows of a job answered in this process. Nothing is written, and ray is not imported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from actors.answers import Answer, Prompt
from pipeline.backends.in_process import InProcess
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.generate.output import row_ids
from pipeline.generate.settings import fetched
from pipeline.generate.stage import prompts
from pipeline.job import PlannedJob, generator_arguments, planned_schedule
from pipeline.plan.agreement import announce_no_gain
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import Manifest, NoRows, limited, plan_batching, read_footers
from pipeline.prepare.prompt_spec import check_spec, prompt_spec
from pipeline.prepare.prompts import prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.read.files import InputFile, list_files
from pipeline.read.ipc import from_ipc
from pipeline.read.rows import read_blocks
from pipeline.read.shards import Shard, cut_shards
from pipeline.runtime.announce import announced


@dataclass(frozen=True)
class TriedRow:
    """A row as the model saw it, and its answers.

    Args:
        id: the row's id column, else file name and row number.
        prompt: text of the prompt's tokens; "" for a row with an error.
    """

    id: Any
    prompt: str
    answers: list[Answer]


def answer_first_rows(config: JobConfig, rows: int) -> list[TriedRow]:
    """Answers to the first `rows` rows of the input.

    Random numbers, prompts and row errors are those of the job. Batches are smaller and no prefix is shared, so
    that in types other than float32 an answer may differ.

    Raises:
        UserError: configuration, checkpoint or input are wrong.
        NoRows: the input has no rows.
    """
    with announced("reading the configuration and the checkpoint's description"):
        check_columns(config)
        config = _on_this_machine(config)
        checkpoint = resolve_checkpoint(config.model, config.storage)
        schedule = planned_schedule(config, checkpoint)
        check_spec(prompt_spec(config, checkpoint, time.time()))
        announce_no_gain(schedule, prompt_spec(config, checkpoint, time.time()))
    with announced("reading the input"):
        files, shards, schema = _first_rows(config, rows)
    batching = replace(plan_batching(config, checkpoint, rows, InProcess()), planned=float(int(time.time())))
    job = PlannedJob(config, checkpoint, schedule, Manifest("", {}, batching, files, shards, schema))
    spec = prompt_spec(config, checkpoint, batching.planned)
    ids: list[Any] = []
    prepared: list[Prompt] = []
    with announced("preparing the prompts"):
        for shard, table in _tables(config, job.manifest):
            prepared += prompts(prepare_table(table, spec), shard.url, shard.first_row)
            ids += row_ids(table, config.input.id_column, shard.url, shard.first_row).to_pylist()
    with announced("loading the model"):
        from actors.generator import Generator

        generator = Generator(**fetched(generator_arguments(job)))
    with announced("answering"):
        answers = generator.answer(prepared)
    tokenizer = tokenizer_of(checkpoint.source)
    return [
        TriedRow(
            ids[row],
            tokenizer.decode(list(prompt.ids)) if prompt.ids else "",
            [answer for answer in answers if answer.row == row],
        )
        for row, prompt in enumerate(prepared)
    ]


def _on_this_machine(config: JobConfig) -> JobConfig:
    """One actor, on a GPU only where this machine has one."""
    import torch

    gpus = 1.0 if config.actors.gpus and torch.cuda.is_available() else 0.0
    return config.model_copy(update={"actors": config.actors.model_copy(update={"gpus": gpus})})


def _first_rows(config: JobConfig, rows: int) -> tuple[list[InputFile], list[Shard], pa.Schema]:
    """Files and shards of the first rows, and their schema; files after them are not opened.

    Of text files no further rows are read: the types are those of these rows.
    """
    listed = list_files(config.input.path, config.storage, config.input.format)
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


def _tables(config: JobConfig, manifest: Manifest) -> Iterator[tuple[Shard, pa.Table]]:
    files = {file.url: file for file in manifest.files}
    for shard in manifest.shards:
        for block in read_blocks([shard], files[shard.url], manifest.schema, config.storage):
            yield shard, from_ipc(block["rows"][0].as_py())
