"""Options that several commands share, and the process settings that every command needs."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from pipeline.runtime.announce import announce_to_log

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key of the file. Repeatable.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages and tracebacks.")]


LogJson = Annotated[
    bool, typer.Option("--log-json", help="Write log and progress to standard error as JSON, one object a line.")
]


def setup(verbose: bool, log_json: bool = False) -> None:
    """Configure logging and the environment variables that libraries read when they are imported."""
    level = logging.INFO if verbose else logging.WARNING
    announce_to_log(log_json)
    if log_json:
        from pipeline.cli.json_log import json_handler

        logging.basicConfig(level=level, handlers=[json_handler()], force=True)
        logging.captureWarnings(True)
    else:
        lines = "%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"
        logging.basicConfig(level=level, format=lines, stream=sys.stderr)
    for name in ("pipeline.plan.memory", "pipeline.checkpoints.download_progress"):  # always shown
        logging.getLogger(name).setLevel(logging.INFO)
    # quiet before they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # of a job that is killed: until then Ray Data keeps its CPUs from other jobs; a job renews its request each 10 s
    os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
    if not os.environ.get("RAY_ADDRESS"):  # a Ray of our own is for this machine's loopback and for this user alone
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
