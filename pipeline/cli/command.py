"""What all commands share: options, process settings, and one line and an exit status for every error."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pythonjsonlogger.json import JsonFormatter

from actors.engine.errors import UserError, flat
from pipeline.messages import install_command, without_secrets, write_log
from pipeline.runtime.announce import EVENT, announce, announce_to_log

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")
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
USER_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "  # so begins the last line of a UserError's traceback
UNTYPED = ("actors", "botocore", "pipeline", "ray")  # errors of these packages are clear without their type's name


@dataclass
class Advice:
    """Texts that the last line of a failed command adds to the error."""

    file: str = ""  # file that a UserError is about; set once it is loaded, because loading names the file itself
    output: str = ""  # the folder whose lease another run may hold
    failed: str = ""  # what the user should do after an error, as a clause
    interrupted: str = "run the same command again"
    out_of_memory: str = ""  # what the user should lower after torch has run out of memory, as a clause
    verbose: bool = False  # print the traceback too

    def load(self, model: type[Model], file: Path, changes: list[str] | None) -> Model:
        """Return a configuration file's values. Later UserErrors name this file."""
        from pipeline.config.load import load_config

        config = load_config(model, file, changes or [])
        self.file = str(file)
        return config


def stop(code: int, message: str) -> typer.Exit:
    """Print the command's last line, and return the exception to raise."""
    line = f"skipdecode: {without_secrets(flat(message))}"
    announce(line, "end", logging.ERROR, exit_status=code)
    return typer.Exit(code)


@contextmanager
def command(verbose: bool = False, log_json: bool = False, **clauses: str) -> Iterator[Advice]:
    """Set the process up, and end the command with one line and an exit status after any exception in the block.

    Exit status 2: a `UserError`, also one raised in a Ray task, or a missing optional package. 4: a signal. 5: another
    run holds the output. 1: any other error; the line names a log file with its traceback. clauses: fields of `Advice`.
    """
    setup(verbose, log_json)
    advice = Advice(**clauses, verbose=verbose)
    try:
        yield advice
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        signal = f" ({error})" if str(error) else ""
        next_step = getattr(error, "advice", None) or advice.interrupted  # a spent budget has its own advice
        raise stop(INTERRUPTED, f"interrupted{signal}; {next_step}") from None
    except Exception as error:
        if advice.verbose:
            logging.exception("the command failed")
        raise _end(error, advice) from None


def _end(error: Exception, advice: Advice) -> typer.Exit:
    if (wrong := user_error(error)) is not None:
        return stop(BAD_CONFIG, ": ".join(filter(None, (advice.file, str(wrong)))))
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if extra := EXTRAS.get(package):
        return stop(BAD_CONFIG, f"{package} is not installed: {install_command(extra)}")
    if not isinstance(error, ImportError) and _is_held(error):
        return stop(LEASE, f"another run holds {advice.output}: {error}")
    torch, log = sys.modules.get("torch"), write_log(error)
    clauses = [f"failed: {_described(error)}"]
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        clauses = [f"failed: {str(error).partition('. ')[0]}", advice.out_of_memory]
    clauses += [advice.failed, f"traceback: {log}" if log else "--verbose prints the traceback"]
    return stop(FAILED, "; ".join(filter(None, clauses)))


def user_error(error: BaseException) -> UserError | None:
    """Return the exception if it is a `UserError`, or the `UserError` of a Ray task that it wraps; else None."""
    cause = getattr(error, "cause", None)  # Ray's error of a task is also an instance of the task's exception
    if isinstance(cause, BaseException):
        return user_error(cause)
    if isinstance(error, UserError):
        return error
    text = cause_line(error)  # Ray keeps only the text of an error in an actor's constructor
    return UserError(text.removeprefix(USER_ERROR)) if text.startswith(USER_ERROR) else None


def cause_line(error: BaseException) -> str:
    """Return the last line of an error that Ray may have wrapped, without the advice on retries that Ray Data adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [number for number, line in enumerate(lines) if RETRY_ADVICE.match(line)]
    lines = lines[: advice[0]] or lines if advice else lines
    return lines[-1] if lines else type(error).__name__


def _described(error: BaseException) -> str:
    """Return `cause_line`, with the type's name in front if the text alone is unclear, as for a KeyError."""
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError | RuntimeError) or package in UNTYPED or not str(error).strip():
        return cause_line(error)
    return f"{type(error).__name__}: {cause_line(error)}"


def _is_held(error: BaseException) -> bool:
    from pipeline.commit.lease import LeaseHeld, LeaseLost
    from pipeline.incremental.ledger import ConcurrentRun

    return isinstance(error, LeaseHeld | LeaseLost | ConcurrentRun)


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
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
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=level, handlers=[handler], force=True)
        logging.captureWarnings(True)
    else:
        lines = "%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"
        logging.basicConfig(level=level, format=lines, stream=sys.stderr)
    for name in ("pipeline.plan.memory", "pipeline.checkpoints.stores"):  # loggers whose messages are always shown
        logging.getLogger(name).setLevel(logging.INFO)
    values = {  # set before the libraries are imported, so that they are quiet
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        # the CPUs of a killed job stay reserved until its request expires; a live job renews it every 10 s
        "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "30",
    }
    if not os.environ.get("RAY_ADDRESS"):  # a Ray of our own is for this machine's loopback and for this user alone
        values |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    if not verbose:
        values["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    for name, value in values.items():
        os.environ.setdefault(name, value)


class JsonLines(JsonFormatter):
    """Formats log records as JSON: event, level, logger, message, time (UTC), exception (a traceback), own fields."""

    def __init__(self) -> None:
        super().__init__(
            ("levelname", "name", "message"),
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            timestamp="time",
            defaults={EVENT: "log"},
        )
