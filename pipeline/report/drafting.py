"""What exact mode drafted, in words."""

from __future__ import annotations

from pipeline.generate.stats import DRAFTS, LOOKUPS, Totals


def drafting(totals: Totals) -> list[str]:
    """A line for each way to draft that was used: drafted, accepted and verified tokens; none but in exact mode."""
    lines = []
    for how, names in (("drafted by layers", DRAFTS), ("looked up", LOOKUPS)):
        drafted, accepted, verified = (getattr(totals, name) for name in names)
        if drafted:
            share = f"{accepted / drafted:.0%} of them accepted"
            lines.append(f"exact: {drafted:,} tokens {how}, {share}; full depth verified {verified:,}")
    return lines
