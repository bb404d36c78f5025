"""`skipdecode tune`: train a checkpoint for a schedule."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.errors import BAD_CONFIG, FAILED, INTERRUPTED, cause, stop
from pipeline.cli.options import Changes, Verbose, setup


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="TUNE.yaml", help="The recipe.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Adapt a checkpoint to a schedule or to any speed; the same command again goes on where it stopped."""
    setup(verbose)
    from pipeline.config.load import load_config
    from pipeline.config.tune import TuneConfig

    try:
        config = load_config(TuneConfig, recipe, changes or [])
        from transformers.utils.logging import disable_progress_bar

        from pipeline.tune.run import tune as train

        disable_progress_bar()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = train(config, str(recipe))
    except ImportError as error:
        raise stop(BAD_CONFIG, f"{error.name} is not installed: pip install -c constraints.txt -e '.[tune]'") from None
    except ValueError as error:
        if verbose:
            logging.exception("bad configuration or input")
        raise stop(BAD_CONFIG, f"{recipe}: {error}".replace(f"{recipe}: {recipe}: ", f"{recipe}: ")) from None
    except (OSError, RuntimeError) as error:  # such as out of memory, or a worker's end
        if verbose:
            logging.exception("training failed")
        raise stop(FAILED, f"failed: {cause(error)}; the same command goes on from the last saved step") from None
    except KeyboardInterrupt:
        raise stop(INTERRUPTED, "interrupted; the same command goes on from the last saved step") from None
    typer.echo(f"checkpoint: {folder}")
