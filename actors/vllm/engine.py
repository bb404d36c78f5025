"""vLLM as an engine of `Generator`: requests in by `add`, completions out by `step`.

vLLM schedules and samples; `Row` decides, as in the library engine, where an answer ends and what its error is. So stop
strings, labels and forms mean the same everywhere, and a row that has ended is aborted in vLLM.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else the engine outlives an actor that is killed
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # Ray decides which CPUs an actor has
import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from actors.engine.constraints.constraint import Constraint
from actors.engine.constraints.grammar import Grammar
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError, suggestion
from actors.engine.loop import Call
from actors.engine.model.end_tokens import end_tokens
from actors.engine.model.loading import Checkpoint
from actors.engine.row import Row, begin_row
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import Completion, EngineStats, FinishReason, Request, TokenLogprob

HIGHEST_TEMPERATURE = 2.0  # that vLLM accepts
OWN = {  # arguments of vLLM that keys of a job set
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_num_seqs": "actors.max_batch",
    "kv_cache_memory_bytes": "actors.cache_bytes",
    "enable_prefix_caching": "shared_prefix",
    "seed": "sampling.seed",
    **dict.fromkeys(("worker_cls", "scheduler_cls", "additional_config"), "schedule"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for engine arguments that vLLM does not know, or that a job sets by other keys."""
    known = {item.name for item in dataclasses.fields(EngineArgs)}
    for name in options:
        if name in OWN:
            raise UserError(f"model.vllm: {name} is set by {OWN[name]}; leave it out")
        if name not in known:
            raise UserError(f"model.vllm: vLLM has no engine argument {name!r}; {suggestion(name, sorted(known))}")


class VllmEngine:
    """One engine of vLLM in this process, with the add-on; single-threaded.

    Args:
        checkpoint: in a folder; its speed adapter is merged unless the schedule runs every layer for every token.
        schedule: the layers that run.
        tokenizer: the checkpoint's.
        dtype: of weights, activations and cache.
        device: auto, cpu or cuda; vLLM is built for one of the two.
        cache_bytes: bytes of key/value cache of all workers; 0: what `gpu_memory_utilization` leaves.
        max_rows: maximum number of rows in flight.
        share_prefixes: compute beginnings that prompts share once.
        cumulative_logprob: compute each answer's log-probability.
        options: further engine arguments of vLLM.

    Attributes:
        decoder: itself, for callers that ask an engine's decoder for its device and context length.
        rows: rows in flight, by ticket.
        stats: counts of rows that have ended; vLLM mixes prompts and decode steps, whose seconds are decode_seconds.
        step_seconds: seconds of the last step.
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
        if device.partition(":")[0] not in ("auto", current_platform.device_type):
            raise UserError(f"device = {device!r}: this vLLM is built for {current_platform.device_type}")
        folder, tokens = str(checkpoint.path), checkpoint.config.vocab_size
        self.schedule, self.end_id = schedule, tokenizer.eos_token_id
        self.stop_ids = frozenset(end_tokens(checkpoint.path, tokenizer, tokens))
        self.cumulative_logprob = cumulative_logprob
        settings = {key: value for key, value in schedule.to_dict().items() if key != "num_layers"}
        settings["unadapted"] = True  # the caller has checked it
        if checkpoint.adapter is not None and not schedule.is_full_depth:
            settings["speed_adapter"] = str(checkpoint.adapter.path)
        workers = options.get("tensor_parallel_size", 1)
        arguments = {
            "model": folder,
            "dtype": dtype,
            "seed": 0,
            "max_num_seqs": max_rows,
            "kv_cache_memory_bytes": cache_bytes // workers or None,
            "enable_prefix_caching": share_prefixes,
            "enforce_eager": not schedule.is_full_depth,
            "distributed_executor_backend": "uni" if workers == 1 else "mp",  # in an actor vLLM would choose Ray
            "generation_config": "vllm",
            "structured_outputs_config": {"backend": "guidance"},
            "disable_log_stats": True,
            "worker_cls": "actors.vllm.worker.SkipWorker",
            "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
            "additional_config": {"skipdecode": settings},
            **options,
        }
        try:
            self.vllm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"vLLM cannot run {folder}: {' '.join(str(error).split())}") from None
        config = self.vllm.vllm_config
        self.context_length, self.vocab_size = int(config.model_config.max_model_len), tokens
        self.max_rows, self.device = (
            int(config.scheduler_config.max_num_seqs),
            torch.device(current_platform.device_type),
        )
        self.cache_bytes = cache_bytes or 0
        self.rows: dict[int, Row] = {}
        self.stats, self.step_seconds = EngineStats(), 0.0
        self._tickets = itertools.count()
        self._running = [schedule]  # by the workers; the list is shared by all that `at` returns

    def at(self, schedule: Schedule) -> VllmEngine:
        """Return an engine with the same weights under another schedule; only one of the two may have rows in flight.

        Raises UserError later, at the first row, if vLLM has captured CUDA graphs of the whole model.
        """
        other = object.__new__(VllmEngine)
        other.__dict__.update(self.__dict__, schedule=schedule, rows={}, stats=EngineStats())
        return other

    @property
    def decoder(self) -> VllmEngine:
        return self

    def loop(self) -> VllmLoop:
        """Return a new loop over this engine."""
        return VllmLoop(self)

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return 0: vLLM refuses no row that fits its context, and preempts rows when the cache is full."""
        return 0

    def used_cache_bytes(self) -> int:
        """Return the bytes of cache that the rows in flight use now."""
        core: Any = self.vllm.engine_core
        return int(core.engine_core.scheduler.kv_cache_manager.usage * self.cache_bytes)

    def add(self, request: Request) -> int:
        """Queue a request; returns its ticket. Raises UserError for one that this engine cannot answer."""
        if self._running != [self.schedule]:
            self.vllm.collective_rpc("set_schedule", args=(self.schedule,))
            self.vllm.reset_prefix_cache()
            self._running[:] = [self.schedule]
        ticket = next(self._tickets)
        # a greedy row computes no mask of its own
        greedy = replace(request, sampling=replace(request.sampling, temperature=0.0, n=1))
        row = begin_row(
            greedy,
            ticket,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            stop_ids=self.stop_ids,
            schedule=self.schedule,
        )
        try:
            self.vllm.add_request(str(ticket), tokens_input(list(request.prompt_ids)), self._params(request, row))
        except ValueError as error:
            raise UserError(" ".join(str(error).split())) from None
        self.rows[ticket] = row
        return ticket

    def step(self) -> list[tuple[int, Completion, EngineStats]]:
        """Run one step for the rows that vLLM schedules.

        Returns (ticket, completion, counts) of each row that has ended.
        """
        began, ended, aborted = time.perf_counter(), [], []
        for output in self.vllm.step():
            ticket = int(output.request_id)
            row = self.rows.get(ticket)
            if row is None:  # it has ended, and vLLM was a step ahead
                continue
            [sample] = output.outputs
            for token, logprobs in zip(sample.token_ids, sample.logprobs or [{}] * len(sample.token_ids), strict=True):
                if row.finish is None:
                    self._record(row, int(token), logprobs)
            if output.finished and row.finish is None:
                row.finish = FinishReason.LENGTH if sample.finish_reason == "length" else FinishReason.ERROR
            elif row.finish is not None and not output.finished:
                aborted.append(output.request_id)
            if row.finish is not None:
                counts = self._counts(row, output.num_cached_tokens or 0)
                ended.append((ticket, self._completion(row), counts))
                self.stats = self.stats.plus(counts)
                del self.rows[ticket]
        if aborted:
            self.vllm.abort_request(aborted)
        self.step_seconds = time.perf_counter() - began
        self.stats.decode_seconds += self.step_seconds
        return ended

    def cancel(self, tickets: Collection[int]) -> None:
        """Remove rows, whatever they have generated."""
        found = [ticket for ticket in tickets if self.rows.pop(ticket, None) is not None]
        self.vllm.abort_request([str(ticket) for ticket in found])

    def take_stats(self) -> EngineStats:
        """Return the counts since the last call."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def close(self) -> None:
        """Stop vLLM and free the device's memory."""
        self.vllm.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def _params(self, request: Request, row: Row) -> VllmParams:
        params = request.sampling
        form = None
        if request.constraint is not None:
            if params.logprobs is not None or self.cumulative_logprob:
                raise UserError("engine vllm has no log-probabilities beside choices or output_format")
            if self.end_id not in self.stop_ids:
                raise UserError(f"{request.constraint.name}: the tokenizer's EOS is no end token of the model")
            form = StructuredOutputsParams(grammar=grammar(request.constraint))
        if params.temperature > HIGHEST_TEMPERATURE:
            raise UserError(f"temperature = {params.temperature:g}: engine vllm has at most {HIGHEST_TEMPERATURE:g}")
        scores = self.cumulative_logprob or isinstance(request.constraint, ChoiceTrie)
        return VllmParams(
            max_tokens=row.limit,
            min_tokens=min(params.min_new_tokens, row.limit),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            stop_token_ids=sorted(row.stop_ids),
            ignore_eos=True,  # the model's end tokens are among stop_token_ids
            logprobs=0 if params.logprobs is None and scores else params.logprobs,
            seed=request.key % 2**63 if params.temperature > 0 else None,
            structured_outputs=form,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _record(self, row: Row, token: int, logprobs: Mapping[int, Any]) -> None:
        """Add a token to a row, and end the row if it ends there."""
        row.tokens.append(token)
        row.position += 1
        if logprobs:
            own = logprobs[token].logprob
            row.logprob += own
            row.choice_logprob += own  # vLLM masks the other labels' tokens before
            count = row.request.sampling.logprobs
            if count is not None:
                ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:count]
                row.logprobs.append(TokenLogprob(token, own, tuple((key, value.logprob) for key, value in ranked)))
        row.finish = row.advance()

    def _counts(self, row: Row, cached: int) -> EngineStats:
        """Return what a row has cost. cached: tokens of its prompt that were in the prefix cache."""
        computed, steps = len(row.request.prompt_ids) - cached, max(len(row.tokens) - 1, 0)
        return EngineStats(
            prompt_tokens=computed,
            shared_prompt_tokens=cached,
            padded_prompt_tokens=computed,
            generated_tokens=len(row.tokens),
            decode_steps=steps,
            layer_steps=row.schedule.layer_steps(steps),
            full_layer_steps=steps * row.schedule.num_layers,
        )

    def _completion(self, row: Row) -> Completion:
        done = row.completion(self.cumulative_logprob)
        if done.finish_reason == FinishReason.ERROR and done.error is None:
            return replace(done, error="vLLM has ended the row before its end")
        return done


def grammar(constraint: Constraint) -> str:
    """Return a constraint as a grammar of llguidance, which vLLM has too.

    Raises UserError for a form that follows thinking.
    """
    if isinstance(constraint, ChoiceTrie):
        return trie_grammar(constraint)
    if isinstance(constraint, Grammar):
        return constraint.lark
    raise UserError(f"{constraint.name}: engine vllm has no forms behind thinking; leave reasoning out")


def trie_grammar(trie: ChoiceTrie) -> str:
    """Return a grammar of the labels' tokens, up to the token that decides the label."""
    rules, nodes = [], [trie.root]
    for number, node in enumerate(nodes):  # it grows
        ways = []
        for token, child in node.children.items():
            if child.only is not None:
                ways.append(f"<[{token}]>")
            else:
                ways.append(f"<[{token}]> n{len(nodes)}")
                nodes.append(child)
        rules.append(f"n{number}: ({' | '.join(ways)}){'' if node.label is None else '?'}")
    return "\n".join(['%llguidance {"no_forcing": true}', "start: n0", *rules])


class VllmLoop:
    """Answers calls that several threads add, with the methods of `Loop`. Rows of all calls share steps.

    Args:
        engine: the engine that answers them.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._queue: deque[Call] = deque()  # added, not begun
        self._owners: dict[int, tuple[Call, int]] = {}  # ticket -> call, and the number of its request

    def add(
        self,
        requests: Sequence[Request],
        prefix: Sequence[int] = (),
        on_batch: Callable[[Sequence[int]], None] | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> Call:
        """Queue requests, from any thread.

        Args:
            prefix: unused; vLLM finds beginnings that prompts share.
            on_batch: called with the numbers of all requests before they begin.
            on_drain: called when all requests have begun, so that those of another call find places.
        """
        call = Call(requests, (), (), (), [], on_batch, on_drain)
        self._queue.append(call)
        return call

    def finish(self, call: Call) -> None:
        """Step until a call has ended, together with the rows of all calls that are added meanwhile."""
        while len(call.completions) < len(call.requests) and call.error is None:
            try:
                while self._queue:
                    self._begin(self._queue.popleft())
                self._step(call)
            except BaseException as error:
                self.engine.cancel(list(self._owners))
                for owner in [call, *(owner for owner, _ in self._owners.values())]:
                    owner.error = error
                self._owners.clear()
                raise

    def _begin(self, call: Call) -> None:
        if call.on_batch is not None:
            call.on_batch(range(len(call.requests)))
        for number, request in enumerate(call.requests):
            try:
                self._owners[self.engine.add(request)] = call, number
            except UserError as error:
                call.completions[number] = Completion((), FinishReason.ERROR, None, error=str(error))

    def _step(self, call: Call) -> None:
        """Run one step; its seconds are those of the call that waits for it."""
        for ticket, completion, counts in self.engine.step():
            owner, number = self._owners.pop(ticket)
            owner.completions[number] = completion
            owner.stats = owner.stats.plus(counts)
        call.stats.decode_seconds += self.engine.step_seconds
        if call.on_drain is not None and len(self._owners) <= self.engine.max_rows:
            call.on_drain()
            call.on_drain = None
