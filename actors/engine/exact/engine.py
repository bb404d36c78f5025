"""Exact mode: tokens are drafted, full depth verifies them in one pass and keeps those that it samples itself.

    draft    by γ steps of a few layers, each row's tokens sampled with its own random numbers; or looked up (`lookup`)
    verify   one pass of all layers over each row's last token and its drafts: a distribution behind each
    accept   sampled from these, token by token, as at full depth, up to the first that differs from its draft

Self-speculation: LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), Draft & Verify (Zhang et al. 2023, arXiv
2309.08168). No distributions are compared: a token is sampled from full depth's logits with the row's random number of
that position, so that it is the token of a run at full depth, whatever was drafted, for every way of sampling. A draft
that is sampled with the same random number from similar logits is often that token.
Drafts attend to full depth's keys and values and to each other's; the verifying pass overwrites theirs. A row that
accepts fewer drafts than another is behind it: the cache needs no cut, since a token attends to no slot after its own.
Which rows draft how many, and how, is `draft_length`'s choice; where nothing pays, steps are those of `Engine`. It
compares this thread's processor time, for waiting for another process is no cost of a step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from actors.engine.cache import SkipCache
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.exact.draft_length import MOST_DRAFTS, DraftLength, Plan, Round, expected_tokens
from actors.engine.exact.lookup import SIZES, Acceptance, Lookup, Match
from actors.engine.protocol import Ended, EngineProtocol
from actors.engine.row import Row, record, sample_rows
from actors.engine.sampling.sampler import greedy, sample_behind
from actors.engine.sampling.state import RowSampling
from actors.engine.schedules.schedule import Schedule


@dataclass(frozen=True)
class Drafter:
    """Layers that draft.

    Args:
        decoder: The model, or a copy with a speed adapter merged.
        schedule: Its mean depth is how many layers draft, see `draft_layers`.
    """

    decoder: Decoder
    schedule: Schedule


@dataclass
class _Drafts:
    """Of one row in one step.

    Args:
        tokens: That are verified.
        lookup: Its n-grams, if it was looked up.
        match: What was found for it, verified or not.
        looked_up: Whether `tokens` are the match's.
        accepted: How many counted.
        judged: How many lay behind accepted ones.
    """

    tokens: list[int] = field(default_factory=list)
    lookup: Lookup | None = None
    match: Match | None = None
    looked_up: bool = False
    accepted: int = 0
    judged: int = 0

    def goes_on(self, row: Row, number: int) -> bool:
        """Judge draft `number` by the row's last token; whether the token behind it counts."""
        if number == len(self.tokens):
            return False
        self.judged += 1
        right = row.tokens[-1] == self.tokens[number]
        self.accepted += right
        return right and row.finish is None


class ExactEngine(Engine):
    """`Engine` at full depth, whose steps yield several tokens a row where that is faster.

    Args:
        decoder: The model.
        schedule: Full depth.
        stop_ids: Tokens that end a row.
        drafter: Drafts beside what is looked up; None: nothing else does.
        length: Chooses how many are drafted.
        cumulative_logprob: Whether completions carry their log-probability.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        stop_ids: Collection[int],
        *,
        drafter: Drafter | None = None,
        length: DraftLength | None = None,
        cumulative_logprob: bool = True,
    ) -> None:
        super().__init__(decoder, schedule, stop_ids, cumulative_logprob=cumulative_logprob)
        assert schedule.is_full_depth
        self.drafter = drafter
        self.length = DraftLength(layers=drafter is not None) if length is None else length
        self._runs = frozenset(draft_layers(drafter.schedule) if drafter is not None else ())
        self._guesses: dict[int, RowSampling] = {}  # by ticket
        self._lookups: dict[int, Lookup] = {}  # by ticket
        self._of_all = {size: Acceptance() for size in SIZES}

    def at(self, schedule: Schedule) -> Engine:
        """See `Engine`; at full depth it drafts too."""
        if schedule != self.schedule:
            return super().at(schedule)
        self.release_memory()
        return ExactEngine(
            self.decoder,
            schedule,
            self.stop_ids,
            drafter=self.drafter,
            length=self.length,  # what was measured holds for it too
            cumulative_logprob=self.cumulative_logprob,
        )

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int, schedule: Schedule | None = None) -> int:
        """See `Engine`; drafts may lie behind a row's last token."""
        return super().row_bytes(prompt_tokens, max_new_tokens + MOST_DRAFTS, schedule)

    def _allocate(
        self,
        rows: int,
        prompt_tokens: int,
        max_new_tokens: int,
        schedule: Schedule | None,
        memory: Tensor | None,
    ) -> SkipCache:
        return super()._allocate(rows, prompt_tokens, max_new_tokens + MOST_DRAFTS, schedule, memory)

    @torch.inference_mode()
    def step(self, *, last: bool = False) -> Ended:
        """Generate at least one token for every row in flight; returns the rows that have ended."""
        ended = self.retire()
        if not self.rows:
            return ended
        plan = self.length.choose(len(self.rows))
        if not plan.count and not plan.most:
            return ended + self._plain(last)
        rows, began, spent = list(self.rows), time.perf_counter(), time.thread_time()
        drafts = self._look_up(plan)
        self.stats.decode_seconds += time.perf_counter() - began
        looked = time.thread_time() - spent
        lengths = [len(row.tokens) for row in rows]
        if plan.count or any(one.tokens for one in drafts):
            ended += self._round(plan, drafts)
        if not any(one.tokens for one in drafts):  # no row has drafts, or space for one
            ended += self._plain(last)
        if plan.most:
            self._judge(rows, drafts, lengths, looked)
        return ended

    def _plain(self, last: bool) -> Ended:
        """One token a row, as `Engine` steps."""
        rows, spent = len(self.rows), time.thread_time()
        ended = super().step(last=last)
        self.length.stepped(rows, time.thread_time() - spent)
        return ended

    def close(self) -> None:
        """See `Engine`."""
        super().close()
        self._guesses.clear()
        self._lookups.clear()

    def _keep(self, alive: Sequence[bool]) -> list[Row]:
        left = super()._keep(alive)
        for row in left:
            self._guesses.pop(row.ticket, None)
            self._lookups.pop(row.ticket, None)
        return left

    def _look_up(self, plan: Plan) -> list[_Drafts]:
        """Each row's drafts that are worth it by the plan, and by what its own drafts were worth."""
        drafts, total = [_Drafts() for _ in self.rows], plan.total
        if not plan.most:
            return drafts
        of_layers = expected_tokens(plan.count, self.length.acceptance)
        for row, one in zip(self.rows, drafts, strict=True):
            lookup = self._lookups.get(row.ticket)
            if lookup is None:
                lookup = self._lookups[row.ticket] = Lookup(row.request.prompt_ids, self._of_all)
            one.lookup = lookup
            one.match = lookup.find(row.tokens, plan.most)
            if one.match is None or total < 1:
                continue
            acceptance = lookup.acceptance(one.match)
            count = min(plan.looked_up(acceptance), _drafts_left(row))
            if count and expected_tokens(count, acceptance) >= of_layers:
                one.tokens, one.looked_up = one.match.tokens[:count], True
                total -= count
        return drafts

    def _judge(self, rows: Sequence[Row], drafts: Sequence[_Drafts], lengths: Sequence[int], seconds: float) -> None:
        """Count what the rows' matches were worth, also those of which nothing was verified: their first token."""
        looked_up = accepted = 0
        for row, one, length in zip(rows, drafts, lengths, strict=True):
            if one.lookup is None or one.match is None:
                continue
            if one.looked_up:
                one.lookup.judge(one.match, one.accepted, one.judged)
                looked_up, accepted = looked_up + len(one.tokens), accepted + one.accepted
            else:
                one.lookup.judge(one.match, int(row.tokens[length] == one.match.tokens[0]), 1)
        self.length.looked(len(rows), seconds, looked_up, accepted)

    def _round(self, plan: Plan, drafts: list[_Drafts]) -> Ended:
        """Draft, verify, and add the tokens that full depth samples; returns the rows that have ended."""
        began, spent, rows, stats = time.perf_counter(), time.thread_time(), self.rows, self.stats
        done = Round(len(rows))
        drafting = [index for index, row in enumerate(rows) if not drafts[index].looked_up and _drafts_left(row)]
        if plan.count and drafting:
            assert self.drafter is not None
            done.steps = min(plan.count, max(_drafts_left(rows[index]) for index in drafting))
            for index, tokens in zip(drafting, self._draft(self.drafter, drafting, done.steps), strict=True):
                drafts[index].tokens = tokens[: _drafts_left(rows[index])]
        if not any(one.tokens for one in drafts):
            return []
        done.draft_seconds = time.thread_time() - spent
        before = [len(row.tokens) for row in rows]
        self._accept(drafts)
        stats.decode_seconds += time.perf_counter() - began
        done.verify_seconds = time.thread_time() - spent - done.draft_seconds
        for row, one, length in zip(rows, drafts, before, strict=True):
            if one.looked_up:
                done.looked_up += len(one.tokens)
                stats.looked_up_tokens += len(one.tokens)
                stats.accepted_lookup_tokens += one.accepted
                stats.verified_lookup_tokens += len(one.tokens) + 1
            elif one.tokens:
                done.drafted, done.drafting = done.drafted + len(one.tokens), done.drafting + 1
                done.accepted, done.judged = done.accepted + one.accepted, done.judged + one.judged
                done.tokens += len(row.tokens) - length
                stats.drafted_tokens += len(one.tokens)
                stats.accepted_tokens += one.accepted
                stats.verified_tokens += len(one.tokens) + 1
        self.length.drafted(done)
        return self.retire()

    def _accept(self, drafts: Sequence[_Drafts]) -> None:
        """Verify the drafts, and keep each row's tokens up to the first that full depth samples otherwise."""
        rows, starts = self.rows, list(itertools.accumulate((len(one.tokens) + 1 for one in drafts), initial=0))
        tokens = [one.tokens for one in drafts]
        if not self.cumulative_logprob and all(row.sampling.is_argmax and not row.sampling.penalized for row in rows):
            return self._accept_likeliest(drafts, self._likeliest(tokens), starts)
        logits = self.decoder.logits(self._verify(tokens))
        running, number = list(range(len(rows))), 0
        while running:
            some, places = [rows[index] for index in running], [starts[index] + number for index in running]
            sample_rows(some, logits[self._ids(places)], logprobs=self.cumulative_logprob)
            self._count_step([self.schedule.num_layers] * len(running))
            running = [index for index in running if drafts[index].goes_on(rows[index], number)]
            number += 1

    def _accept_likeliest(self, drafts: Sequence[_Drafts], likeliest: Sequence[int], starts: Sequence[int]) -> None:
        """`_accept` for rows whose tokens are the likeliest ones; those of row i begin at starts[i]."""
        steps = 0
        for row, one, start in zip(self.rows, drafts, starts, strict=False):
            number = 0
            record([row], greedy([likeliest[start]]))
            while one.goes_on(row, number):
                number += 1
                record([row], greedy([likeliest[start + number]]))
            steps += number + 1
        self._count_step([self.schedule.num_layers] * steps)

    def _draft(self, drafter: Drafter, drafting: Sequence[int], count: int) -> list[list[int]]:
        """The next `count` tokens of these rows by the drafter's layers."""
        # without places in the cache all rows step
        members = drafting if self.decoder.stack is not None else range(len(self.rows))
        rows = [self.rows[index] for index in members]
        positions = [_position(row) for row in rows]
        per_layer = [len(rows) * (layer in self._runs) for layer in range(self.decoder.num_layers)]
        columns, decoder = [[row.tokens[-1] for row in rows]], drafter.decoder
        is_greedy = all(row.sampling.params.temperature == 0 for row in rows)
        if is_greedy and (steps := decoder.greedy_steps) is not None:
            assert self.cache is not None
            self.cache.begin_step(positions, decoder.device, members)
            columns += steps(columns[0], per_layer, self.cache, count=count)
        else:
            for number in range(count):
                places = [position + number for position in positions]
                hidden = self._step(decoder, columns[-1], places, per_layer, members)
                guesses = [self._guess(row, number) for row in rows]
                columns.append(sample_behind(decoder, hidden, guesses, logprobs=False).tokens)
        found = dict(zip(members, zip(*columns[1:], strict=True), strict=True))
        return [[max(token, 0) for token in found[index]] for index in drafting]  # not decided: any draft will do

    def _step(
        self,
        decoder: Decoder,
        tokens: Sequence[int],
        positions: Sequence[int],
        per_layer: Sequence[int],
        members: Sequence[int],
    ) -> Tensor:
        """Hidden states [B, E] behind one token of each of these rows."""
        assert self.cache is not None
        self.cache.begin_step(positions, decoder.device, None if self.decoder.stack is None else members)
        return decoder.step(self._ids(tokens)[:, None], self._places(positions)[:, None], per_layer, self.cache)

    def _verify(self, drafts: Sequence[Sequence[int]]) -> Tensor:
        """Full depth's hidden states [N, E] behind each row's last token and its drafts, row by row, the same numbers
        as single steps have.

        Without kernels that run all layers these are single steps: other kernels would round otherwise.
        """
        assert self.cache is not None
        if self.decoder.stack is None:
            everyone, counts = range(len(self.rows)), [len(tokens) + 1 for tokens in drafts]
            of_rows = [[row.tokens[-1], *tokens] for row, tokens in zip(self.rows, drafts, strict=True)]
            per_layer, steps = [len(self.rows)] * self.decoder.num_layers, []
            for number in range(max(counts)):
                column = [tokens[min(number, len(tokens) - 1)] for tokens in of_rows]  # rows with fewer: a token unread
                places = [_position(row) + number for row in self.rows]
                steps.append(self._step(self.decoder, column, places, per_layer, everyone))
            return torch.cat([torch.stack(steps, dim=1)[index, : counts[index]] for index in everyone])
        ids, positions = self._announced(drafts)
        return self.decoder.steps(self._ids(ids)[:, None], self._places(positions)[:, None], self.cache)

    def _likeliest(self, drafts: Sequence[Sequence[int]]) -> list[int]:
        """The likeliest tokens [N] by the logits of `_verify`."""
        assert self.cache is not None
        steps = self.decoder.greedy_steps
        if steps is None:
            return self.decoder.likeliest(self._verify(drafts))
        ids, _ = self._announced(drafts)
        return steps(ids, [len(ids)] * self.decoder.num_layers, self.cache, shared=True)[0]

    def _announced(self, drafts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Announce the pass of `_verify` to the cache; its tokens and their positions."""
        assert self.cache is not None
        ids, positions, owners = list[int](), list[int](), list[int]()
        for index, (row, tokens) in enumerate(zip(self.rows, drafts, strict=True)):
            first, count = _position(row), len(tokens) + 1
            ids += row.tokens[-1], *tokens
            positions += range(first, first + count)
            owners += [index] * count
        self.cache.begin_step(positions, self.decoder.device, owners)
        return ids, positions

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self.decoder.device)

    def _places(self, positions: Sequence[int]) -> Tensor:
        """Positions [B] that the model knows: drafts behind a row's last token may lie outside its context."""
        return self._ids([min(position, self.decoder.context_length - 1) for position in positions])

    def _guess(self, row: Row, number: int) -> RowSampling:
        """What a draft is sampled with: the row's own parameters and random number, without what its tokens change."""
        guess = self._guesses.get(row.ticket)
        if guess is None:
            params = replace(
                row.sampling.params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=None
            )
            guess = self._guesses[row.ticket] = RowSampling(params, row.sampling.key)
        guess.drawn = row.sampling.drawn + number
        return guess


def exact_engine(engine: EngineProtocol, drafter: EngineProtocol | None = None) -> ExactEngine | None:
    """Exact mode over the weights of an engine; None where its layers do not verify several tokens at once.

    drafter: whose schedule's layers draft, with its weights; None, or at full depth: nothing is drafted but what is
    looked up. Only one of the three may have rows in flight.
    """
    if not isinstance(engine, Engine) or engine.decoder.stack is None:
        return None
    full = replace(engine.schedule, depths=(engine.schedule.num_layers,), speedup=1.0)
    own = None
    if drafter is not None and drafter.schedule.mean_layers < full.num_layers:
        own = Drafter(drafter.decoder, drafter.schedule)
    engine.release_memory()
    logprobs = engine.cumulative_logprob
    return ExactEngine(engine.decoder, full, engine.stop_ids, drafter=own, cumulative_logprob=logprobs)


def _position(row: Row) -> int:
    """Of a row's last token, in prompt and answer."""
    return len(row.request.prompt_ids) + row.position


def _drafts_left(row: Row) -> int:
    """Drafts that may count, at most: full depth adds a token of its own."""
    return row.limit - len(row.tokens) - 1


def draft_layers(schedule: Schedule) -> tuple[int, ...]:
    """The layers of drafts: those of the schedule's mean depth over its curve, lowest first."""
    return tuple(sorted(schedule.keep_order[: schedule.mean_layers]))
