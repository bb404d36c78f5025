"""Defines `skipdecode serve`, which answers requests over HTTP like OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from actors.engine.errors import UserError
from pipeline.cli.command import Changes, Verbose, command

# limits to raise: with the defaults (5 and 10 s), Ray Serve kills a proxy that starts slowly on a busy machine
TIME_LIMITS = ("READY_CHECK", "HEALTH_CHECK")


def serve(
    file: Annotated[
        Path | None, typer.Argument(metavar="[SERVE.yaml]", help="The serving file; not needed with --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="CHECKPOINT", help="Checkpoint to serve (model.path).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; default 8000.")] = None,
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Serve completions and chats of a model over HTTP with Ray Serve, until a signal ends the process."""
    with command(verbose, interrupted="the server has stopped") as advice:
        from pipeline.config.load import changed, load_values, validated
        from pipeline.config.serve import ServeConfig

        if file is None and model is None:
            raise UserError("give --model CHECKPOINT, or a serving file")
        values = {} if file is None else load_values(file)
        if {"input", "output"} <= values.keys():
            raise UserError(f"{file}: this is a job file; answer its rows with `skipdecode run`")
        options = {"model.path": model, "port": port}
        given = [f"{key}={value!r}" for key, value in options.items() if value is not None]
        config = validated(ServeConfig, changed(values, [*given, *(changes or [])]), str(file or "serve"))
        advice.file = str(file or "")

        for name in TIME_LIMITS:  # set before the import of Ray Serve, which reads these variables
            os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "60")

        from pipeline.serve import run_server

        run_server(config, verbose=verbose)
