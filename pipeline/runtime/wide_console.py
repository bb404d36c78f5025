"""Gives a console whose tables lose no column and no letter, in files and pipes (80 columns) too."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console) -> Console:
    """Return a console for the same output on which tables have their natural width, and lines are not wrapped."""
    return Console(file=console.file, width=1000, soft_wrap=True, highlight=False)
