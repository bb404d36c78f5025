"""Gives a console whose tables lose no column in files and pipes."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console, columns: int = 120) -> Console:
    """Return a console for the same output, at least this wide (pipes report 80 columns), without wrapping."""
    return Console(file=console.file, width=max(console.width, columns), soft_wrap=True, highlight=False)
