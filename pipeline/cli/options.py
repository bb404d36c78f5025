"""Options that several commands share, and the process settings that every command needs."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key of the file. Repeatable.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages and tracebacks.")]


def setup(verbose: bool) -> None:
    """Configure logging and the environment variables that libraries read when they are imported."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s" if not verbose else "%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in ("pipeline.plan.memory", "pipeline.checkpoints.download_progress"):  # always shown
        logging.getLogger(name).setLevel(logging.INFO)
    # quiet before they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
