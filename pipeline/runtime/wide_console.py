"""Makes consoles that print wide tables without dropping or cutting columns, even into files and pipes."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console) -> Console:
    """Return a console that prints to the same file, without limiting tables, wrapping lines, or reading markup."""
    return Console(file=console.file, width=1000, soft_wrap=True, highlight=False, markup=False)
