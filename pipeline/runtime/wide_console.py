"""Makes consoles that print wide tables without dropping or cutting columns, even into files and pipes."""

from __future__ import annotations

from rich.console import Console


def wide(console: Console) -> Console:
    """Return a console with the same output file. Tables have their natural width, lines are not wrapped, and text in
    square brackets is printed as it is."""
    return Console(file=console.file, width=1000, soft_wrap=True, highlight=False, markup=False)
