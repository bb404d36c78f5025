"""Runs vLLM as an engine of `Generator`: `add` queues requests, `step` returns completions.

vLLM schedules and samples. As in the other engines, `Row` decides where an answer ends and which error it has, so stop
strings, labels and formats work alike in all engines. When `Row` ends an answer, the request in vLLM is aborted.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an engine process would outlive a killed actor
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # Ray decides which CPUs an actor has
os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")  # count NaNs on the device; the counts come with the tokens
import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext

from actors.engine.constraints.constraint import Constraint
from actors.engine.constraints.grammar import Grammar
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError, flat, suggestion
from actors.engine.loop import Call
from actors.engine.model.end_tokens import end_tokens
from actors.engine.model.loading import Checkpoint
from actors.engine.model.tokenizer import write_tokenizer
from actors.engine.row import Row, begin_row
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import Completion, EngineStats, FinishReason, Request, TokenLogprob
from actors.vllm.settings import KEY

log = logging.getLogger(__name__)
HIGHEST_TEMPERATURE = 2.0  # highest temperature that vLLM accepts
SET_BY_KEYS = {  # engine argument of vLLM -> key of a job file that sets it
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_num_seqs": "actors.max_batch",
    "kv_cache_memory_bytes": "actors.cache_bytes",
    "enable_prefix_caching": "shared_prefix",
    "seed": "sampling.seed",
    **dict.fromkeys(("worker_cls", "scheduler_cls", "additional_config"), "schedule"),
}
SAME_NAMES = (  # sampling parameters that vLLM names alike
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError if vLLM does not know an engine argument, or if another key of the job file sets it."""
    known = {item.name for item in dataclasses.fields(EngineArgs)}
    for name, value in options.items():
        if name == "additional_config" and value in ({KEY: {"graphs": True}}, {KEY: {"graphs": False}}):
            continue
        if name in SET_BY_KEYS:
            raise UserError(f"model.vllm: {name} is set by {SET_BY_KEYS[name]}; leave it out")
        if name not in known:
            raise UserError(f"model.vllm: vLLM has no engine argument {name!r}; {suggestion(name, sorted(known))}")


class LoadedModel:
    """The vLLM engine in this process, and the schedule that its workers run.

    A vLLM engine in which every token runs the same layers holds only these layers. Such a schedule needs an engine of
    its own: `use` closes the one and loads the other. Schedules that fall share an engine that holds their layers.

    Args:
        arguments: vLLM's engine arguments; those that depend on the schedule are added.
        adapter: folder of the speed adapter that is merged above 1x.
    """

    def __init__(self, arguments: Mapping[str, Any], adapter: str | None, schedule: Schedule) -> None:
        self._arguments, self._adapter = arguments, adapter
        self.has_nans: dict[int, int] = {}  # ticket -> number of tokens in the last step, where their logits held NaN
        self._load(schedule)

    def _load(self, schedule: Schedule) -> None:
        settings = {key: value for key, value in schedule.to_dict().items() if key != "num_layers"}
        settings["unadapted"] = True  # skips the worker's check of the schedule, because the caller has checked it
        if self._adapter is not None and not schedule.is_full_depth:
            settings["speed_adapter"] = self._adapter
        settings |= self._arguments.get("additional_config", {}).get(KEY, {})
        arguments = {"enforce_eager": not schedule.is_uniform, **self._arguments, "additional_config": {KEY: settings}}
        try:
            self.vllm = LLMEngine.from_engine_args(EngineArgs(**arguments), UsageContext.LLM_CLASS)  # as LLM's defaults
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"vLLM cannot run {self._arguments['model']}: {flat(error)}") from None
        self._core: Any = self.vllm.engine_core
        self._take_output, self._core.get_output = self._core.get_output, self._noting_output
        self.schedule: Schedule | None = schedule
        self._loaded_for = schedule

    def use(self, schedule: Schedule) -> None:
        """Run `schedule` from now on. Raises UserError if rows of another schedule are in flight."""
        old = self.schedule
        if schedule == old:
            return
        if old is not None and self.vllm.has_unfinished_requests():
            raise UserError("rows of another schedule are in flight: finish them before the schedule changes")
        if old is not None and _runs(self._loaded_for, schedule):
            if not schedule.is_uniform:
                self.vllm.collective_rpc("set_schedule", args=(schedule,))
                self.vllm.reset_prefix_cache()
            self.schedule = schedule
            return
        if old is not None:
            log.warning("vLLM's engine has one speed, so it is closed, and another is loaded for the next speed")
            self.close()
        self._load(schedule)

    def close(self) -> None:
        """Stop vLLM and free the device's memory. Nothing happens if no engine is loaded."""
        if self.schedule is None:
            return
        self._core.shutdown()
        del self.vllm, self._core, self._take_output
        self.schedule = None
        cleanup_dist_env_and_memory()

    def _noting_output(self) -> Any:
        """Return the next output of vLLM's core. Record rows with NaN logits: `RequestOutput` does not tell."""
        outputs = self._take_output()
        for one in outputs.outputs:
            if one.num_nans_in_logits:
                # vLLM has appended a hyphen and a random part to the ticket
                self.has_nans[int(one.request_id.partition("-")[0])] = len(one.new_token_ids)
                state = self.vllm.output_processor.request_states.get(one.request_id)
                if state is not None and state.output_kind == RequestOutputKind.FINAL_ONLY:
                    state.output_kind = RequestOutputKind.CUMULATIVE  # `step` gets all tokens now, and ends the row
        return outputs


def _runs(loaded_for: Schedule, schedule: Schedule) -> bool:
    """Return whether an engine that was loaded for one schedule can run another one."""
    if loaded_for.is_uniform or schedule.is_uniform:
        return loaded_for.is_uniform == schedule.is_uniform and loaded_for.prompt_layers == schedule.prompt_layers
    return set(schedule.prompt_layers) <= set(loaded_for.prompt_layers)


class VllmEngine:
    """A vLLM engine in this process, with the SkipDecode add-on and the methods of `Loop`. All calls share its steps.

    Statistics count only rows that have ended. vLLM mixes prefill and decode steps, so decode_seconds includes both.

    Args:
        cache_bytes: bytes of KV cache of all workers together; 0: as many as `gpu_memory_utilization` allows.
        options: further engine arguments of vLLM.
        The other arguments are those of `Generator`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        schedule: Schedule,
        tokenizer: Any,
        *,
        dtype: str,
        device: str,
        cache_bytes: int,
        max_rows: int,
        share_prefixes: bool,
        cumulative_logprob: bool,
        options: Mapping[str, Any],
    ) -> None:
        check_options(options)
        self.device = torch.device(current_platform.device_type)
        if device.partition(":")[0] not in ("auto", self.device.type):
            raise UserError(f"device = {device!r}: this vLLM is built for {self.device.type}: leave device out")
        folder, self.vocab_size = str(checkpoint.path), checkpoint.config.vocab_size
        self.end_id = tokenizer.eos_token_id
        ends, last = end_tokens(checkpoint.path, tokenizer, self.vocab_size), max(tokenizer.get_vocab().values())
        self.stop_ids = frozenset(token for token in ends if token <= last)  # llguidance refuses tokens of the padding
        self.cumulative_logprob = cumulative_logprob
        workers = options.get("tensor_parallel_size", 1)
        self._tokenizer = TemporaryDirectory()  # vLLM's grammars need the tokenizer that the prompts have
        write_tokenizer(tokenizer, Path(self._tokenizer.name))
        arguments = {
            "model": folder,
            "tokenizer": self._tokenizer.name,
            "dtype": dtype,
            "seed": 0,
            "max_num_seqs": max_rows,
            "kv_cache_memory_bytes": cache_bytes // workers or None,
            "enable_prefix_caching": share_prefixes,
            "distributed_executor_backend": "uni" if workers == 1 else "mp",  # in an actor, vLLM would use Ray
            "generation_config": "vllm",
            "structured_outputs_config": {"backend": "guidance"},
            "disable_log_stats": True,
            "worker_cls": "actors.vllm.worker.SkipWorker",
            "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
            **options,
        }
        adapter = None if checkpoint.adapter is None else str(checkpoint.adapter.path)
        self.loaded = LoadedModel(arguments, adapter, schedule)  # shared with the engines that `at` returns
        config = self.vllm.vllm_config
        self.context_length = int(config.model_config.max_model_len)
        self.max_rows, self.cache_bytes = int(config.scheduler_config.max_num_seqs), cache_bytes
        self._tickets = itertools.count()  # numbers that identify rows; as text, the ids of vLLM's requests
        self._begin_at(schedule)

    def _begin_at(self, schedule: Schedule) -> None:
        self.schedule, self.stats = schedule, EngineStats()
        # ticket -> row in flight, its call, and the index of its request in the call
        self.rows: dict[int, tuple[Row, Call, int]] = {}
        self._queue: deque[Call] = deque()  # calls that have not begun
        self._undrained: list[Call] = []  # calls that have begun and whose `on_drain` has not been called

    def at(self, schedule: Schedule) -> VllmEngine:
        """Return an engine with the same model and another schedule. Only one of the two may have rows in flight.

        If the schedule needs another vLLM engine (see `LoadedModel`), its first call closes the present one.
        """
        other = copy.copy(self)
        other._begin_at(schedule)
        return other

    @property
    def vllm(self) -> LLMEngine:
        """The vLLM engine that is loaded now."""
        return self.loaded.vllm

    @property
    def decoder(self) -> VllmEngine:
        """This engine: callers read device and context length from an engine's decoder."""
        return self

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return 0: vLLM takes any row that fits its context length, and preempts rows when the cache is full."""
        return 0

    def take_stats(self) -> EngineStats:
        """Return the counts since the last call."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def close(self) -> None:
        """Stop vLLM and free the device's memory."""
        self.loaded.close()

    def add(
        self,
        requests: Sequence[Request],
        on_batch: Callable[[Sequence[int]], None] | None = None,
        on_drain: Callable[[], None] | None = None,
        among: Sequence[Sequence[int]] = (),
    ) -> Call:
        """Queue requests, from any thread; see `Loop.add`. among: unused, because vLLM finds shared prefixes."""
        call = Call(requests, (), (), (), [], on_batch, on_drain)
        self._queue.append(call)
        return call

    def finish(self, call: Call) -> None:
        """Step until `call` has ended. Calls that are added meanwhile share the steps."""
        while len(call.completions) < len(call.requests) and call.error is None:
            try:
                self.step()
            except BaseException as error:
                if self.rows:
                    self.vllm.abort_request([str(ticket) for ticket in self.rows])
                for owner in (call, *(owner for _, owner, _ in self.rows.values())):
                    owner.error = error
                while self._queue:
                    self._queue.popleft().error = error
                self.rows.clear()
                self._undrained.clear()
                raise

    def step(self) -> list[tuple[Call, int, Completion]]:
        """Begin the queued calls and run one step of vLLM. Return (call, index, completion) of each ended row."""
        began, ended, aborted = time.perf_counter(), [], []
        while self._queue:
            self._begin(self._queue[0])  # the call stays in the queue if this raises, so that `finish` ends it
            self._undrained.append(self._queue.popleft())
        while self._undrained and len(self.rows) < 2 * self.max_rows:  # ask for rows before slots are free
            if (on_drain := self._undrained.pop().on_drain) is not None:
                on_drain()
        oldest = next(iter(self.rows.values()), None)
        for output in self.vllm.step():
            ticket = int(output.request_id)
            if ticket not in self.rows:  # the row ended when vLLM had already begun its next step
                continue
            row, call, number = self.rows[ticket]
            [sample] = output.outputs
            sure = len(row.tokens) + len(sample.token_ids) - self.loaded.has_nans.get(ticket, 0)  # tokens without NaN
            for token, logprobs in zip(sample.token_ids, sample.logprobs or [{}] * len(sample.token_ids), strict=True):
                if row.finish is None:
                    self._record(row, int(token), logprobs, has_nans=len(row.tokens) >= sure)
            if output.finished and row.finish is None:
                row.finish = FinishReason.LENGTH if sample.finish_reason == "length" else FinishReason.ERROR
            elif row.finish is not None and not output.finished:
                aborted.append(output.request_id)
            if row.finish is not None:
                call.completions[number] = self._end(row, call, output.num_cached_tokens or 0)
                ended.append((call, number, call.completions[number]))
                del self.rows[ticket]
        self.vllm.abort_request(aborted)
        self.loaded.has_nans.clear()
        seconds = time.perf_counter() - began
        self.stats.decode_seconds += seconds
        if oldest is not None:
            oldest[1].stats.decode_seconds += seconds
        return ended

    def _begin(self, call: Call) -> None:
        """Pass a call's requests to vLLM. A request that this engine cannot answer ends with an error."""
        self.loaded.use(self.schedule)
        if call.on_batch is not None:
            call.on_batch(range(len(call.requests)))
        for number, request in enumerate(call.requests):
            ticket = next(self._tickets)
            # vLLM masks and samples tokens; a greedy request keeps `Row` from computing a mask too
            greedy = replace(request, sampling=replace(request.sampling, temperature=0.0, n=1))
            try:
                row = begin_row(
                    greedy,
                    ticket,
                    context_length=self.context_length,
                    vocab_size=self.vocab_size,
                    stop_ids=self.stop_ids,
                )
                self.vllm.add_request(str(ticket), tokens_input(list(request.prompt_ids)), self._params(request, row))
            except ValueError as error:
                call.completions[number] = Completion((), FinishReason.ERROR, None, error=flat(error))
            else:
                self.rows[ticket] = row, call, number

    def _params(self, request: Request, row: Row) -> VllmParams:
        params = request.sampling
        form = None
        if request.constraint is not None:
            if params.logprobs is not None or self.cumulative_logprob:
                raise UserError(
                    "engine vllm cannot combine log-probabilities with choices or output_format: leave one of them out"
                )
            if self.end_id not in self.stop_ids:
                raise UserError(
                    f"{request.constraint.name}: the tokenizer's EOS is not an end token of the model: add it to "
                    "eos_token_id in generation_config.json"
                )
            form = StructuredOutputsParams(grammar=grammar(request.constraint, self.end_id))
        if params.temperature > HIGHEST_TEMPERATURE:
            raise UserError(f"temperature = {params.temperature:g}: engine vllm allows at most {HIGHEST_TEMPERATURE:g}")
        # `Row` ends the other answers, so it needs each token at once
        ends_in_vllm = request.constraint is None and request.ending is None
        scores = self.cumulative_logprob or isinstance(request.constraint, ChoiceTrie)
        return VllmParams(
            **{name: getattr(params, name) for name in SAME_NAMES},
            max_tokens=row.limit,
            min_tokens=min(params.min_new_tokens, row.limit),
            stop_token_ids=sorted(row.stop_ids),
            ignore_eos=True,  # the model's end tokens are among stop_token_ids
            logprobs=0 if params.logprobs is None and scores else params.logprobs,
            seed=request.key % 2**63 if params.temperature > 0 else None,
            structured_outputs=form,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if ends_in_vllm else RequestOutputKind.DELTA,
        )

    def _record(self, row: Row, token: int, logprobs: Mapping[int, Any], *, has_nans: bool) -> None:
        """Add a token to a row. If the token ends the answer, set `row.finish`."""
        if has_nans or (logprobs and not math.isfinite(logprobs[token].logprob)):
            row.finish, row.has_no_token = FinishReason.ERROR, True
            return
        row.tokens.append(token)
        row.position += 1
        if logprobs:
            own = logprobs[token].logprob
            row.logprob += own
            row.choice_logprob += own  # vLLM masks all other tokens, so this is a probability among labels
            count = row.request.sampling.logprobs
            if count is not None:
                ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:count]
                row.logprobs.append(TokenLogprob(token, own, tuple((key, value.logprob) for key, value in ranked)))
        row.finish = row.advance()

    def _end(self, row: Row, call: Call, cached: int) -> Completion:
        """Return a row's completion. Add the row to the statistics. cached: prompt tokens found in the prefix cache."""
        for stats in (self.stats, call.stats):
            stats.prompt_tokens += len(row.request.prompt_ids) - cached
            stats.padded_prompt_tokens += len(row.request.prompt_ids) - cached
            stats.shared_prompt_tokens += cached
            stats.generated_tokens += len(row.tokens)
            stats.add_steps(self.schedule, max(len(row.tokens) - 1, 0))
        done = row.completion(self.cumulative_logprob)
        if done.finish_reason == FinishReason.ERROR and done.error is None:
            return replace(done, error="vLLM ended the row before its answer was complete")
        return done


def grammar(constraint: Constraint, eos: int) -> str:
    """Convert a constraint to a grammar of llguidance. Raises UserError if the constraint applies after thinking."""
    if isinstance(constraint, ChoiceTrie):
        return constraint.lark(eos)
    if isinstance(constraint, Grammar):
        return constraint.lark
    raise UserError(
        f"{constraint.name}: engine vllm cannot constrain an answer that follows thinking: leave `reasoning` out"
    )
