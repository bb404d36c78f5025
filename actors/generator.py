"""Defines `Generator`, a callable class that answers the prompts in a batch of rows. It adds columns of answers.

    ds.map_batches(Generator, fn_constructor_args=[EngineSettings("…")], compute=ActorPoolStrategy(size=2), num_cpus=0)

This module does not import ray. A call splits its rows into batches of similar prompt lengths. A batch has as many rows
as fit into `cache_bytes`. The split depends only on the rows and the settings.
"""

from __future__ import annotations

import copy
import logging
import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from actors.answers import Answer, Prompt, answer_columns, answer_types, as_column, error_answer, object_column
from actors.engine.build import build_engine, current_device
from actors.engine.constraints.json_schema import wrong_key
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import Reasoning
from actors.engine.errors import UserError
from actors.engine.machine import set_threads
from actors.engine.model.loading import Checkpoint, inspect, with_adapter
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import Completion, EngineStats, FinishReason, Request, SamplingParams
from actors.requests import RequestBuilder
from actors.settings import EngineSettings

if TYPE_CHECKING:
    from actors.engine.engine import Engine
    from actors.engine.loop import Call, Loop


log = logging.getLogger(__name__)
ROWS_SECONDS = 20.0  # an actor of Ray Data may log a warning if it gets no rows for this time


@dataclass(frozen=True)
class RowsAtWork:
    """Rows that `Generator.begin` has queued."""

    prompts: Sequence[Prompt]
    owners: Sequence[int]  # for each request of `call`: index of its prompt in `prompts`
    errors: Mapping[int, str]  # index in `prompts` -> why this row has no request
    call: Call


class Generator:
    """Answers rows with one model on one device.

    Several threads may call a generator. Calls run one after the other; vLLM runs them together.

    Raises:
        UserError: The settings, the checkpoint or the device cannot be used. The message is one line.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.sampling = settings, SamplingParams().merged(dict(settings.sampling or {}))
        set_threads(settings.threads)
        inspected = inspect(settings.checkpoint, by_vllm=settings.vllm is not None)
        if settings.speed_adapter is not None:
            inspected = with_adapter(inspected, settings.speed_adapter)
        self.schedule = _schedule(inspected, settings)
        self.tokenizer = load_tokenizer(settings.checkpoint)
        how: dict[str, Any] = {
            "dtype": settings.dtype,
            "device": settings.device,
            "cache_bytes": settings.cache_bytes,
            "cumulative_logprob": settings.cumulative_logprob,
        }
        if settings.vllm is None:
            how["int8"] = settings.weights is not None
            self.engine = build_engine(inspected, self.schedule, self.tokenizer, **how)
        else:
            from actors.vllm.engine import VllmEngine

            how |= {"share_prefixes": settings.share_prefixes, "options": settings.vllm, "max_rows": settings.max_batch}
            self.engine = cast("Engine", VllmEngine(inspected, self.schedule, self.tokenizer, **how))
        self.calls = self._loop()
        self._building, self._running = threading.RLock(), threading.Lock()
        self.device = self.engine.decoder.device
        self.builder = RequestBuilder(
            self.tokenizer,
            self.sampling,
            settings.choices,
            None if settings.output_format is None else OutputFormat.of(settings.output_format),
            seed=settings.seed,
            strip=settings.strip,
            vocab_size=inspected.config.vocab_size,
            stop_ids=self.engine.stop_ids,
            reasoning=None if settings.reasoning is None else Reasoning(**settings.reasoning),
            row_logprobs=settings.row_logprobs,
        )
        self._rows_came = threading.Event()
        names = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(None))
        self._in_ray_data = any(name.startswith("ray.data.") for name in names)
        if self._in_ray_data:
            threading.Thread(target=self._warn_without_rows, daemon=True).start()

    def _warn_without_rows(self) -> None:
        """Log a warning if no rows come because Ray Data has no CPU left for the tasks that read the input."""
        ray = sys.modules["ray"]
        if not self._rows_came.wait(ROWS_SECONDS) and (free := ray.available_resources().get("CPU", 0.0)) < 1:
            log.warning(
                "no rows came in %g s, and %g CPUs of the cluster are free: the actor pool may hold the CPUs that Ray "
                "Data's read tasks need; pass num_cpus=0 to map_batches, or use a smaller pool",
                ROWS_SECONDS,
                free,
            )

    def at(self, schedule: Schedule, *, max_batch: int | None = None) -> Generator:
        """Return a generator with the same weights and another schedule. Only one of the two may have rows in flight.

        The weights stay as they were loaded, with or without a merged speed adapter. Only vLLM may need another engine
        for the schedule; its first call then closes the present engine, loads the other one, and logs this. The other
        engine has the speed adapter, unless the schedule runs every layer for every token.

        Args:
            schedule: Schedule of the returned generator.
            max_batch: Maximum number of rows in flight in the returned generator; None: as in this generator.
        """
        other = copy.copy(self)
        other.schedule, other.engine = schedule, self.engine.at(schedule)
        other.settings = replace(self.settings, max_batch=max_batch or self.settings.max_batch)
        other.calls = other._loop()
        return other

    def _loop(self) -> Loop:
        if self.settings.vllm is not None:  # vLLM has its own scheduler
            return cast("Loop", self.engine)
        from actors.engine.loop import Loop

        return Loop(
            self.engine,
            budget_bytes=self.settings.cache_bytes,
            max_rows=self.settings.max_batch,
            share_prefixes=self.settings.share_prefixes,
            scheduler=self.settings.scheduler,
        )

    def __call__(self, batch: Any) -> Any:
        """Answer the prompts in a batch's column `prompt_column`. Return the batch with answer columns added.

        A prompt is text, a list of token ids, or a list of messages for the checkpoint's chat template. Equal prompts
        have equal answers, and answers do not depend on how rows are batched. With n above 1, each row is repeated n
        times. A missing number is None, e.g. `mean_depth` if an answer has one token. Chat templates run in
        transformers' sandbox, which limits neither time nor memory.

        batch: A dict of arrays [rows], a pyarrow Table or a pandas DataFrame. The result is a dict if `batch` is one,
        else a Table. In Ray Data, answer columns are pyarrow arrays, so that all blocks have the same types.
        """
        kept: dict[str, Any]
        if is_dict := isinstance(batch, Mapping):
            kept = {name: as_column(values) for name, values in batch.items()}
        else:
            table = batch if isinstance(batch, pa.Table) else pa.Table.from_pandas(batch, preserve_index=False)
            kept = dict(zip(table.column_names, table.columns, strict=True))
        if (name := self.settings.prompt_column) not in kept:
            raise UserError(f"prompt_column: no column {name!r} in the batch, which has {', '.join(map(repr, kept))}")
        optional = {
            "cumulative_logprob": self.settings.cumulative_logprob,
            "choice_probability": self.builder.choices is not None,
            "reasoning": self.builder.reasoning is not None,
            "logprobs": self.sampling.logprobs is not None,
        }
        added = [column for column, is_asked in optional.items() if is_asked]
        if taken := sorted(kept.keys() & answer_types(added).keys()):
            raise UserError(f"the batch has a column {taken[0]!r}, which is the name of an answer column: rename it")
        prompts = [self.builder.prompt(value) for value in (kept[name] if is_dict else kept[name].to_pylist())]
        answers = self.answer(prompts)
        rows = [answer.row for answer in answers]
        columns: dict[str, Any] = answer_columns(answers, added)
        if not is_dict:
            return pa.table({name: values.take(pa.array(rows, pa.int64())) for name, values in kept.items()} | columns)
        if not self._in_ray_data:
            columns = {
                name: values.to_numpy() if pa.types.is_integer(values.type) else object_column(values.to_pylist())
                for name, values in columns.items()
            }
        return {name: values[rows] for name, values in kept.items()} | columns

    def answer(
        self,
        prompts: Sequence[Prompt],
        on_batch: Callable[[Sequence[int]], None] | None = None,
    ) -> list[Answer]:
        """Answer each row `n` times; return the answers in row order. A row that fails has one answer, with the error.

        Args:
            prompts: The rows.
            on_batch: Called before each batch, with the indices of the rows that may be in flight until the next call
                of `on_batch`. At the end, `on_batch` is called without rows.
        """
        work = self.begin(prompts, on_batch)
        self.run(work)
        return self.finish(work)

    def begin(
        self,
        prompts: Sequence[Prompt],
        on_batch: Callable[[Sequence[int]], None] | None = None,
        on_drain: Callable[[], None] | None = None,
        among: Sequence[Sequence[int]] = (),
    ) -> RowsAtWork:
        """Queue rows. This is the first of three steps of `answer`; `run` and `finish` must follow.

        Any thread may call this. on_drain: called once, in the thread of `run`, when fewer rows wait than there are
        slots, so that rows of another call come before slots are free. Only vLLM calls it. among: see
        `shared_prefixes`.
        """
        self._rows_came.set()
        requests: list[Request] = []
        owners: list[int] = []
        errors: dict[int, str] = {}
        with self._building:
            for row, prompt in enumerate(prompts):
                try:
                    samples = self._requests(prompt)
                except ValueError as error:
                    errors[row] = str(error)
                    continue
                requests += samples
                owners += [row] * len(samples)

        def report(indices: Sequence[int]) -> None:
            assert on_batch is not None
            on_batch(sorted({owners[index] for index in indices}))

        call = self.calls.add(requests, None if on_batch is None else report, on_drain, among)
        return RowsAtWork(prompts, owners, errors, call)

    def run(self, work: RowsAtWork) -> None:
        """Run the engine until the rows that `begin` has queued are answered. Only one thread runs; others wait."""
        with self._running, current_device(self.device):
            self.calls.finish(work.call)

    def finish(self, work: RowsAtWork) -> list[Answer]:
        """Return the answers to the rows of `work`; call `run` first."""
        completions, prompts, errors = work.call.result(), work.prompts, dict(work.errors)
        if work.call.on_batch is not None:
            work.call.on_batch(())
        # if a sample has no token because of an error (e.g. out of memory), its row gets one answer, with the error
        for row, done in zip(work.owners, completions, strict=True):
            if done.error is not None and not done.token_ids:
                errors[row] = done.error
        answers = [error_answer(row, len(prompts[row].ids), error) for row, error in errors.items()]
        counts: Counter[int] = Counter()
        with self._building:
            for row, request, completion in zip(work.owners, work.call.requests, completions, strict=True):
                if row not in errors:
                    answers.append(self.completed(prompts[row], row, counts[row], request, completion))
                    counts[row] += 1
        return sorted(answers, key=lambda answer: (answer.row, answer.sample_index))

    def completed(self, prompt: Prompt, row: int, sample: int, request: Request, completion: Completion) -> Answer:
        """Convert the completion of `request`, which must have tokens, to an Answer."""
        count = len(completion.token_ids)
        text, reasoning = self.builder.text(request, completion)
        if completion.error is None and request.constraint is not None and request.constraint.name == "json_schema":
            wrong = wrong_key(text)
            if wrong is not None:
                error = f"json_schema: {wrong}"
                completion = replace(completion, finish_reason=FinishReason.ERROR, error=error)
        return Answer(
            row=row,
            sample_index=sample,
            generated_text=text,
            finish_reason=str(completion.finish_reason),
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=count,
            mean_depth=self.schedule.mean_depth(count),
            error=self.builder.error(completion, text),
            token_ids=list(completion.token_ids),
            cumulative_logprob=completion.cumulative_logprob,
            logprobs=self.builder.logprobs(completion),
            choice_probability=completion.choice_probability,
            reasoning=reasoning,
        )

    def _requests(self, prompt: Prompt) -> list[Request]:
        """Return one request for each of the row's `n` answers. Raises UserError if the row cannot be answered."""
        requests = self.builder.requests(prompt)
        limit = requests[0].new_tokens_limit(self.engine.decoder.context_length)
        needed = self.engine.row_bytes(len(prompt.ids), limit)
        if needed > (budget := self.settings.cache_bytes):
            raise UserError(
                f"the row needs {needed} bytes of KV cache, but the budget is {budget}: shorten the prompt, "
                "lower max_new_tokens, or raise the budget (actors.cache_bytes)"
            )
        return requests

    def take_stats(self) -> EngineStats:
        """Return the engine's counts since the last call."""
        return self.engine.take_stats()

    def peak_memory_bytes(self) -> int:
        """Return the peak memory use in bytes: of the GPU if there is one, else of this process."""
        if self.device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self.device))
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def device_name(self) -> str:
        """Return the GPU's name or "cpu", for the statistics. If CUDA_VISIBLE_DEVICES is set, append it in brackets."""
        name = "cpu"
        if self.device.type == "cuda":
            import torch

            name = torch.cuda.get_device_name(self.device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"{name} [{visible}]" if visible else name


def _schedule(checkpoint: Checkpoint, settings: EngineSettings) -> Schedule:
    """Return the schedule of `settings`. Raise UserError if it does not fit the checkpoint, or was not trained."""
    if isinstance(settings.schedule, Schedule):
        return settings.schedule
    changes = dict(settings.schedule or {})
    if settings.unadapted:
        return checkpoint.schedule(changes)
    return checkpoint.adapted_schedule(changes, str(settings.checkpoint), "pass unadapted=True")
