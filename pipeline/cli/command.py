"""Defines the options, process settings, error messages and exit statuses that all commands share."""

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
from pipeline.messages import escaped, install_command, without_secrets, write_log
from pipeline.runtime.announce import EVENT, EscapingFormatter, announce, announce_to_log

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")
FAILED, BAD_CONFIG, ROW_ERRORS, INTERRUPTED, LEASE = 1, 2, 3, 4, 5  # exit statuses
RETRY_ADVICE = re.compile(r"Failed to .+ after \d+/\d+ attempts")
EXTRAS = {  # optional package -> extra of `skipdecode` that installs it
    "peft": "tune",
    "rouge_score": "eval",
    "sacrebleu": "eval",
}
USER_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "  # start of the last line in a UserError's traceback
UNTYPED = ("actors", "botocore", "pipeline", "ray")  # packages whose error messages are clear without the type


@dataclass
class Advice:
    """Texts that the last line of a failed command adds to the error message."""

    file: str = ""  # prefix of UserErrors; empty until the file is loaded, because loading errors name the file
    output: str = ""  # folder to name if another run holds its lease
    failed: str = ""  # clause that says what to do after an error other than a UserError
    interrupted: str = "run the same command again"
    out_of_memory: str = ""  # clause that says which settings to lower if torch runs out of memory

    def load(self, model: type[Model], file: Path, changes: list[str] | None) -> Model:
        """Load and return a configuration. Later UserErrors begin with the name of its file."""
        from pipeline.config.load import load_config

        config = load_config(model, file, changes or [])
        self.file = str(file)
        return config


def echo(text: object) -> None:
    """Print text to standard output, with escapes for control characters of rows, file names and checkpoints."""
    print(escaped(str(text)))


def stop(code: int, message: str) -> typer.Exit:
    """Print `message` as the command's last line. Return the exception that ends the command with status `code`."""
    line = f"skipdecode: {without_secrets(flat(message))}"
    announce(line, "end", logging.ERROR, exit_status=code)
    return typer.Exit(code)


@contextmanager
def command(verbose: bool = False, log_json: bool = False, **clauses: str) -> Iterator[Advice]:
    """Set up the process. If the `with` block raises an exception, end the command with one line and an exit status.

    Exit status 2: a `UserError` (in a Ray task too), or a missing optional package. 4: a signal. 5: another run holds
    the output. 1: any other error; the line names a log file with the traceback. clauses: fields of `Advice`.
    """
    setup(verbose, log_json)
    advice = Advice(**clauses)
    try:
        yield advice
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        signal = f" ({error})" if str(error) else ""
        raise stop(INTERRUPTED, f"interrupted{signal}; {advice.interrupted}") from None
    except Exception as error:
        if verbose:
            logging.exception("the command failed")
        raise _end(error, advice) from None


def _end(error: Exception, advice: Advice) -> typer.Exit:
    if (wrong := user_error(error)) is not None:
        return stop(BAD_CONFIG, ": ".join(filter(None, (advice.file, str(wrong)))))
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if extra := EXTRAS.get(package):
        return stop(BAD_CONFIG, f"{package} is not installed: {install_command(extra)}")
    if not isinstance(error, ImportError):
        from pipeline.commit.lease import LeaseHeld, LeaseLost

        if isinstance(error, LeaseHeld | LeaseLost):
            return stop(LEASE, f"another run holds {advice.output}: {error}")
    torch, log = sys.modules.get("torch"), write_log(error)
    clauses = [f"failed: {_described(error)}"]
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        clauses = [f"failed: {str(error).partition('. ')[0]}", advice.out_of_memory]
    clauses += [advice.failed, f"traceback: {log}" if log else "--verbose prints the traceback"]
    return stop(FAILED, "; ".join(filter(None, clauses)))


def user_error(error: BaseException) -> UserError | None:
    """Return `error` if it is a `UserError`, or the `UserError` that Ray wrapped in `error`; else None."""
    cause = getattr(error, "cause", None)  # checked first, because Ray's error for a UserError is a UserError too
    if isinstance(cause, BaseException):
        return user_error(cause)
    if isinstance(error, UserError):
        is_advised = any(map(RETRY_ADVICE.match, str(error).splitlines()))
        return UserError(cause_line(error)) if is_advised else error
    text = cause_line(error)  # Ray keeps only the text of an error in an actor's constructor
    return UserError(text.removeprefix(USER_ERROR)) if text.startswith(USER_ERROR) else None


def cause_line(error: BaseException) -> str:
    """Return the last line of an error's message, which in Ray's errors is the cause. Skip Ray Data's retry advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [number for number, line in enumerate(lines) if RETRY_ADVICE.match(line)]
    lines = lines[: advice[0]] or lines if advice else lines
    return lines[-1] if lines else type(error).__name__


def _described(error: BaseException) -> str:
    """Return `cause_line(error)`, after the error's type if the line is unclear without it (as for a KeyError)."""
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError | RuntimeError) or package in UNTYPED or not str(error).strip():
        return cause_line(error)
    return f"{type(error).__name__}: {cause_line(error)}"


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key of the file. Repeatable.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages and tracebacks.")]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Write log and progress to standard error as JSON, one object per line.")
]


def setup(verbose: bool, log_json: bool = False) -> None:
    """Configure logging, and set the environment variables that libraries read when they are imported."""
    level = logging.INFO if verbose else logging.WARNING
    announce_to_log(log_json)
    lines = "%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_json else EscapingFormatter(lines))
    logging.basicConfig(level=level, handlers=[handler], force=log_json)
    logging.captureWarnings(True)
    # always show their INFO messages
    for name in ("pipeline.plan.memory", "pipeline.checkpoints.resolve", "pipeline.prepare.prompt_spec"):
        logging.getLogger(name).setLevel(logging.INFO)
    values = {  # libraries read these variables on import; most of them make the libraries print less
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        # time after which Ray frees a killed job's CPUs; a running job renews its request for CPUs every 10 s
        "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "30",
    }
    if not os.environ.get("RAY_ADDRESS"):  # then this process starts Ray, which listens only on loopback
        values |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    if not verbose:
        values["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    for name, value in values.items():
        os.environ.setdefault(name, value)


class JsonLines(JsonFormatter):
    """Formats a log record as JSON: event, level, logger, message, time (UTC), exception (traceback), extra fields."""

    def __init__(self) -> None:
        super().__init__(
            ("levelname", "name", "message"),
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            timestamp="time",
            defaults={EVENT: "log"},
        )

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))
