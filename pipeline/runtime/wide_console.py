"""Creates consoles that print wide tables without dropping or cutting columns, to files and pipes too."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console
from rich.text import Text

from pipeline.messages import escaped


class _EscapingConsole(Console):
    """A console that prints strings and the cells of tables with `escaped`."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)


def wide_console(file: IO[str] | None = None, *, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that neither limits tables, wraps lines, reads markup nor replaces emoji codes such as :m:."""
    return _EscapingConsole(
        file=file, stderr=stderr, quiet=quiet, width=1000, soft_wrap=True, highlight=False, markup=False, emoji=False
    )
