"""Creates consoles that print wide tables without dropping or cutting columns, to files and pipes too."""

from __future__ import annotations

from typing import IO

from rich.console import Console


def wide_console(file: IO[str] | None = None, *, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that neither limits tables, wraps lines, reads markup nor replaces emoji codes such as :m:."""
    return Console(
        file=file, stderr=stderr, quiet=quiet, width=1000, soft_wrap=True, highlight=False, markup=False, emoji=False
    )
