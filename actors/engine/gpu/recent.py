"""The last tokens of rows that the host watches, and what belongs to each, from the GPU to their `Row`s.

Shapes: R rows, B lanes, N watched rows, V vocabulary size, W tokens: more than a row samples between two polls, K
likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.row import Row
from actors.engine.types import MOST_LOGPROBS, TokenLogprob

Places = tuple[Tensor, Tensor]
OWN, MASKED, TOP = 0, 1, 2  # places of log-probabilities: the token's, the same among allowed ones, the likeliest ones'


class RecentLogprobs:
    """Log-probabilities of the last tokens of R slots and of slot R; those of token t lie at t % W.

    Attributes:
        values: float32 [R + 1, W, 2 + K], nats.
        ids: int32 [R + 1, W, K], the likeliest tokens.
    """

    def __init__(self, rows: int, window: int, vocabulary: int, device: torch.device) -> None:
        self.window, self.most = window, min(MOST_LOGPROBS, vocabulary)
        self.values = torch.zeros(rows + 1, window, TOP + self.most, device=device)
        self.ids = torch.zeros(rows + 1, window, self.most, dtype=torch.int32, device=device)

    def places(self, slots: Tensor, counts: Tensor) -> Places:
        """Where token number `counts` [B] of each slot [B] is stored. A row that has ended writes behind its last
        token; nobody reads that place."""
        return slots, counts % self.window

    def write(self, places: Places, own: Tensor, masked: Tensor | None) -> None:
        """Log-probabilities [B] of tokens."""
        scores = own[:, None] if masked is None else torch.stack((own, masked), dim=1)
        self.values[:, :, : scores.shape[1]].index_put_(places, scores)

    def write_top(self, places: Places, logits: Tensor, tokens: Tensor, own: Tensor) -> None:
        """The likeliest tokens under the model's distribution, whose logits are [B, V]; own: `write`'s, of tokens [B].

        Always K of them, so that ties do not depend on how many another row wants.
        """
        highest, ids = logits.topk(self.most, dim=-1)
        token, score = tokens[:, None], own[:, None]
        likeliest = highest.float() - (logits.gather(1, token).float() - score)
        likeliest = torch.where(ids == token, score, likeliest)  # the same number, also where rounding differs
        self.values[:, :, TOP:].index_put_(places, likeliest)
        self.ids.index_put_(places, ids.int())


@dataclass
class Recent:
    """What N rows have sampled last, oldest token first.

    Args:
        tokens: int64 [N, W].
        values: float32 [N, W, 2 + K], see `RecentLogprobs`.
        ids: int32 [N, W, K]; None where no row wants them.
    """

    tokens: Tensor
    values: Tensor
    ids: Tensor | None

    def to_host(self) -> Recent:
        """Copies on the host; they are complete when the device has run all work launched before."""

        def copied(part: Tensor) -> Tensor:
            return part.to("cpu", non_blocking=True, copy=True)

        return Recent(copied(self.tokens), copied(self.values), None if self.ids is None else copied(self.ids))

    def record(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Add to each row, from copies on the host, its tokens that it does not have yet, up to the one that ends it.

        counts: tokens of each row on the GPU.
        """
        news = [count - len(row.tokens) for row, count in zip(rows, counts, strict=True)]
        new = max(news)
        if new < 1:
            return
        assert new < self.tokens.shape[1], "a row has sampled more tokens than are kept"
        most = TOP + max(row.request.sampling.logprobs or 0 for row in rows)
        tokens, values = self.tokens[:, -new:].tolist(), self.values[:, -new:, :most].tolist()
        ids = None if self.ids is None else self.ids[:, -new:].tolist()
        for index, row in enumerate(rows):
            for place in range(new - news[index], new):
                if row.finish is not None:
                    break
                _add(row, tokens[index][place], values[index][place], [] if ids is None else ids[index][place])


def _add(row: Row, token: int, scores: Sequence[float], ids: Sequence[int]) -> None:
    """Record a row's next token with its log-probabilities, and whether it ends the row."""
    row.tokens.append(token)
    row.logprob += scores[OWN]
    most = row.request.sampling.logprobs
    if most is not None:
        likeliest = zip(ids[:most], scores[TOP : TOP + most], strict=True)
        row.logprobs.append(TokenLogprob(token, scores[OWN], tuple(likeliest)))
    if row.sampling.allowed is not None and row.sampling.allowed.scored:
        row.choice_logprob += scores[MASKED]
    row.finish = row.advance()
