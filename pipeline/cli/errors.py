"""How a command that fails ends: one line on standard error, and the exit status of its kind of failure."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from actors.engine.errors import UserError, flat
from pipeline.error_log import write_log
from pipeline.messages import without_secrets
from pipeline.runtime.announce import announce

OK, FAILED, BAD_CONFIG, ROW_ERRORS, INTERRUPTED, LEASE = 0, 1, 2, 3, 4, 5
RETRY_ADVICE = re.compile(r"Failed to .+ after \d+/\d+ attempts")
EXTRAS = {  # package -> extra
    "deltalake": "tables",
    "peft": "tune",
    "pyiceberg": "tables",
    "rouge_score": "eval",
    "sacrebleu": "eval",
    "sqlalchemy": "tables",
}
USER_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "  # how a traceback's last line begins
UNTYPED = ("actors", "botocore", "pipeline", "ray")  # their errors need no type name to be understood


@dataclass
class Advice:
    """What a command's last line adds to an error.

    file: configuration file that a UserError concerns; set once it is loaded, as loading names the file itself.
    output: the folder whose lease another run may hold.
    failed, interrupted: what to do next, a clause each.
    out_of_memory: what to lower after torch has run out of memory, a clause.
    verbose: print the traceback too.
    """

    file: str = ""
    output: str = ""
    failed: str = ""
    interrupted: str = "run the same command again"
    out_of_memory: str = ""
    verbose: bool = False


def stop(code: int, message: str) -> typer.Exit:
    """Print the command's last line; the exception to raise."""
    line = f"skipdecode: {without_secrets(flat(message))}"
    announce(line, "end", logging.ERROR, exit_status=code)
    return typer.Exit(code)


@contextmanager
def errors_as_exit_status(advice: Advice) -> Iterator[None]:
    """End the command with one line and an exit status after any exception.

    2: a `UserError`, also one raised in a Ray task, or a missing optional package. 4: a signal. 5: another run holds
    the output. 1: everything else; its traceback goes to a log file, which the line names.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        signal = f" ({error})" if str(error) else ""
        next_step = getattr(error, "advice", None) or advice.interrupted  # a spent budget has an advice of its own
        raise stop(INTERRUPTED, f"interrupted{signal}; {next_step}") from None
    except Exception as error:
        if advice.verbose:
            logging.exception("the command failed")
        raise _end(error, advice) from None


def _end(error: Exception, advice: Advice) -> typer.Exit:
    wrong = user_error(error)
    if wrong is not None:
        return stop(BAD_CONFIG, ": ".join(filter(None, (advice.file, str(wrong)))))
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return stop(
            BAD_CONFIG, f"{package} is not installed: pip install '.[{EXTRAS[package]}]' in skipdecode's folder"
        )
    if not isinstance(error, ImportError) and _is_held(error):
        return stop(LEASE, f"another run holds {advice.output}: {error}")
    clauses = [f"failed: {_described(error)}", advice.failed]
    if _is_out_of_memory(error):
        clauses = [f"failed: {str(error).partition('. ')[0]}", advice.out_of_memory, advice.failed]
    log = write_log(error)
    clauses.append(f"traceback: {log}" if log else "--verbose prints the traceback")
    return stop(FAILED, "; ".join(filter(None, clauses)))


def user_error(error: BaseException) -> UserError | None:
    """The `UserError` that an exception is, or that it brings from a Ray task; None if there is none."""
    cause = getattr(error, "cause", None)  # Ray's error of a task is also an instance of what the task raised
    if isinstance(cause, BaseException):
        return user_error(cause)
    if isinstance(error, UserError):
        return error
    text = cause_line(error)  # Ray keeps only the text of an error in an actor's constructor
    return UserError(text.removeprefix(USER_ERROR)) if text.startswith(USER_ERROR) else None


def cause_line(error: BaseException) -> str:
    """The last line of an error that Ray may have wrapped, without the advice on retries that Ray Data adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [number for number, line in enumerate(lines) if RETRY_ADVICE.match(line)]
    lines = lines[: advice[0]] or lines if advice else lines
    return lines[-1] if lines else type(error).__name__


def _described(error: BaseException) -> str:
    """`cause_line`, after the name of the type where the text alone could not be understood, such as of a KeyError."""
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError | RuntimeError) or package in UNTYPED or not str(error).strip():
        return cause_line(error)
    return f"{type(error).__name__}: {cause_line(error)}"


def _is_held(error: BaseException) -> bool:
    from pipeline.commit.lease import LeaseHeld, LeaseLost
    from pipeline.incremental.ledger import ConcurrentRun

    return isinstance(error, LeaseHeld | LeaseLost | ConcurrentRun)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
