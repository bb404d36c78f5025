"""How a command ends that fails: one line, and the exit status that says of which kind it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from pipeline.messages import without_secrets

OK, FAILED, BAD_CONFIG, ROW_ERRORS, INTERRUPTED, LEASE = 0, 1, 2, 3, 4, 5
RETRY_ADVICE = re.compile(r"Failed to .+ after \d+/\d+ attempts")


def stop(code: int, message: str) -> typer.Exit:
    """To be raised after the one line is told."""
    typer.echo(f"skipdecode: {without_secrets(' '.join(message.split()))}", err=True)
    return typer.Exit(code)


@contextmanager
def job_errors(job: Path, output: str, again: str, goes_on: str, verbose: bool) -> Iterator[None]:
    """What a job may raise, as one line and the exit status that says of which kind it is."""
    import ray

    from pipeline.commit.finalize import RowsMissing
    from pipeline.commit.lease import LeaseHeld, LeaseLost
    from pipeline.incremental.ledger import ConcurrentRun
    from pipeline.runtime.signals import Interrupted
    from pipeline.storage.folder import STORE_ERRORS

    try:
        yield
    except Interrupted as error:
        raise stop(INTERRUPTED, f"interrupted ({error}); {again} finishes the job") from None
    except (LeaseHeld, LeaseLost, ConcurrentRun) as error:
        raise stop(LEASE, f"another run holds {output}: {error}") from None
    # before ValueError: Ray's error of a task is also an instance of what the task raised
    except (RowsMissing, ray.exceptions.RayError, *STORE_ERRORS) as error:
        if verbose:
            logging.exception("job failed")
        raise stop(FAILED, f"failed: {cause(error)}; {again} {goes_on}") from None
    except ValueError as error:
        if verbose:
            logging.exception("bad configuration or input")
        raise stop(BAD_CONFIG, f"{job}: {error}".replace(f"{job}: {job}: ", f"{job}: ")) from None


def cause(error: BaseException) -> str:
    """The last line of an error that Ray may have wrapped, without the advice on retries that Ray Data adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [number for number, line in enumerate(lines) if RETRY_ADVICE.match(line)]
    lines = lines[: advice[0]] or lines if advice else lines
    return lines[-1] if lines else type(error).__name__
