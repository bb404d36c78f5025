"""A console whose tables lose no column where output goes to a file or a pipe."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console, columns: int = 120) -> Console:
    """Return the same output, at least so wide (a pipe reports 80 columns), without wrapping or coloured numbers."""
    return Console(file=console.file, width=max(console.width, columns), soft_wrap=True, highlight=False)
