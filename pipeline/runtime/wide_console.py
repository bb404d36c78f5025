"""Creates consoles that print wide tables without dropping or cutting columns, to files and pipes too."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console) -> Console:
    """Return a console that prints to the same file, but neither limits tables, wraps lines nor reads markup."""
    return Console(file=console.file, width=1000, soft_wrap=True, highlight=False, markup=False)
