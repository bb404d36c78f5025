"""Which operations the end of a step needs, for the rows in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SamplingVariant:
    """Operations at the end of a step that the rows in flight need; each variant has CUDA graphs of its own.

    Args:
        random: A row has a temperature.
        narrowed: A row with a temperature has top-k, top-p or min-p.
        barred: A row has a least number of new tokens, before which its stop tokens are barred.
        penalized: A row has penalties.
        masked: A row has a mask, which the host writes before each of its tokens.
        logprobs: Log-probabilities are computed.
        watched: A row is watched, see `DeviceRows.is_watched`.
        top: A watched row wants the likeliest tokens.
    """

    random: bool
    narrowed: bool
    barred: bool
    penalized: bool
    masked: bool
    logprobs: bool
    watched: bool
    top: bool

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are sampled from other logits than the model's."""
        return self.penalized or self.barred or self.masked

    @property
    def plain(self) -> bool:
        """Whether the step ends with an argmax alone."""
        return not (self.changes_logits or self.random or self.logprobs)

    def of_drafts(self) -> SamplingVariant:
        """The variant of drafts, without what changes no token and what hangs on a row's earlier tokens."""
        return replace(self, penalized=False, masked=False, logprobs=False, watched=False, top=False)
