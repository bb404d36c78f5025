"""Exact mode: few layers draft tokens, full depth verifies them in one pass and keeps those that it samples itself.

    draft    γ steps of a few layers, each row's tokens sampled with its own random numbers
    verify   one pass of all layers over the last token and the γ drafts: γ + 1 distributions a row
    accept   sampled from these, token by token, as at full depth, up to the first that differs from its draft

Self-speculation: LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), Draft & Verify (Zhang et al. 2023, arXiv
2309.08168). No distributions are compared: a token is sampled from full depth's logits with the row's random number of
that position, so that it is the token of a run at full depth, whatever was drafted, for every way of sampling. A draft
that is sampled with the same random number from similar logits is often that token.
Drafts attend to full depth's keys and values and to each other's; the verifying pass overwrites theirs. A row that
accepts fewer drafts than another is behind it: the cache needs no cut, since a token attends to no slot after its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.engine.cache import SkipCache
from actors.engine.decoder import Decoder
from actors.engine.draft_length import MOST_DRAFTS, DraftLength
from actors.engine.engine import Engine
from actors.engine.protocol import Ended
from actors.engine.row import Row, sample_rows
from actors.engine.row_sampling import RowSampling
from actors.engine.sampling import sample_behind
from actors.engine.schedule import Schedule


class ExactEngine(Engine):
    """`Engine` at full depth, whose steps yield several tokens a row where that is faster.

    Args:
        decoder: The model.
        schedule: Full depth.
        stop_ids: Tokens that end a row.
        drafter: The same model, or with a speed adapter merged.
        drafts: The schedule whose layers draft, see `draft_layers`.
        length: Chooses γ.
        cumulative_logprob: Whether completions carry their log-probability.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        stop_ids: Collection[int],
        *,
        drafter: Decoder,
        drafts: Schedule,
        length: DraftLength | None = None,
        cumulative_logprob: bool = True,
    ) -> None:
        super().__init__(decoder, schedule, stop_ids, cumulative_logprob=cumulative_logprob)
        assert schedule.is_full_depth and drafts.num_layers == schedule.num_layers
        self.drafter, self.drafts = drafter, drafts
        self.length = DraftLength() if length is None else length
        self._runs = frozenset(draft_layers(drafts))
        self._guesses: dict[int, RowSampling] = {}

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
            drafts=self.drafts,
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
        rows = len(self.rows)
        count = self.length.choose(rows)
        if count > 0 and (left := max(row.limit - len(row.tokens) for row in self.rows)) > 1:
            self._round(min(count, left - 1))
            return ended + self.retire()
        began = time.perf_counter()
        ended += super().step(last=last)
        self.length.stepped(rows, time.perf_counter() - began)
        return ended

    def close(self) -> None:
        """See `Engine`."""
        super().close()
        self._guesses.clear()

    def _keep(self, alive: Sequence[bool]) -> list[Row]:
        left = super()._keep(alive)
        for row in left:
            self._guesses.pop(row.ticket, None)
        return left

    def _round(self, count: int) -> None:
        """Draft `count` tokens for every row, verify them, and add those that full depth samples."""
        began = time.perf_counter()
        rows = self.rows
        positions = [len(row.request.prompt_ids) + row.position for row in rows]
        columns = [[row.tokens[-1] for row in rows]]  # of tokens: the last one of each row, and its drafts
        for number in range(count):
            columns.append(self._draft(columns[-1], [position + number for position in positions], number))
        drafted = time.perf_counter()
        logits = self._verify(columns, positions)
        running, accepted, judged = list(range(len(rows))), 0, 0
        before = sum(len(row.tokens) for row in rows)
        for number in range(count + 1):
            chosen = logits[:, number] if len(running) == len(rows) else logits[running, number]
            sample_rows([rows[index] for index in running], chosen.contiguous(), logprobs=self.cumulative_logprob)
            self._count_step([self.schedule.num_layers] * len(running))
            if number == count:
                break
            going = [index for index in running if rows[index].finish is None]
            running = [index for index in going if rows[index].tokens[-1] == columns[number + 1][index]]
            accepted, judged = accepted + len(running), judged + len(going)
            if not running:
                break
        ended = time.perf_counter()
        tokens = sum(len(row.tokens) for row in rows) - before
        self.length.drafted(
            len(rows), count, drafted - began, ended - drafted, accepted=accepted, judged=judged, tokens=tokens
        )
        stats = self.stats
        stats.drafted_tokens += count * len(rows)
        stats.accepted_tokens += accepted
        stats.verified_tokens += (count + 1) * len(rows)
        stats.decode_seconds += ended - began

    def _draft(self, tokens: Sequence[int], positions: Sequence[int], number: int) -> list[int]:
        """The drafter's next token of each row behind these tokens; number: of earlier drafts in this round."""
        per_layer = [len(self.rows) * (layer in self._runs) for layer in range(self.decoder.num_layers)]
        hidden = self._step(self.drafter, tokens, positions, per_layer)
        guesses = [self._guess(row, number) for row in self.rows]
        return sample_behind(self.drafter, hidden, guesses, logprobs=False).tokens

    def _step(
        self, decoder: Decoder, tokens: Sequence[int], positions: Sequence[int], per_layer: Sequence[int]
    ) -> Tensor:
        """Hidden states [B, E] behind one token a row."""
        assert self.cache is not None
        self.cache.begin_step(positions, decoder.device)
        return decoder.step(self._ids(tokens)[:, None], self._places(positions)[:, None], per_layer, self.cache)

    def _verify(self, columns: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        """Full depth's logits [B, S, V] behind each of S tokens a row, the same numbers as S steps have.

        Without kernels that run all layers these are S steps: other kernels would round otherwise.
        """
        assert self.cache is not None
        if self.decoder.stack is None:
            everyone = [len(self.rows)] * self.decoder.num_layers
            steps = [
                self._step(self.decoder, column, [position + number for position in positions], everyone)
                for number, column in enumerate(columns)
            ]
            return torch.stack([self.decoder.logits(hidden) for hidden in steps], dim=1)
        self.cache.begin_step(positions, self.decoder.device, len(columns))
        ids = torch.stack([self._ids(column) for column in columns], dim=1)
        places = [self._places([position + number for position in positions]) for number in range(len(columns))]
        return self.decoder.steps(ids, torch.stack(places, dim=1), self.cache)

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


def draft_layers(schedule: Schedule) -> tuple[int, ...]:
    """The layers of drafts: those of the schedule's mean depth over its curve, lowest first."""
    return tuple(sorted(schedule.keep_order[: schedule.mean_layers]))
