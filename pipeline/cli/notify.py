"""One POST when `run` ends (`notify` in the job file). It never fails the job, and no message shows the URL."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import typer
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from pipeline.cli.errors import INTERRUPTED, OK, ROW_ERRORS, Stopped

TRIES = 3
TRY_SECONDS = 5.0  # `ray job stop` leaves a stopped job little time
WAIT_SECONDS = 1.0  # before the second try; then twice as long
TEMPORARY_STATUS = {408, 425, 429, 500, 502, 503, 504}
STATUS = {OK: "succeeded", ROW_ERRORS: "too many row errors", INTERRUPTED: "interrupted"}  # other exit status: failed

log = logging.getLogger(__name__)


class Ending:
    """Posts how the block ended, once `address` is set.

    summary: the object that `run --json` prints; None if the job did not finish. output: its folder.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.output = ""
        self.summary: dict[str, Any] | None = None

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.address is None or not (error is None or isinstance(error, typer.Exit)):
            return
        code = OK if error is None else error.exit_code
        post(self.address, self.message(code, error.line if isinstance(error, Stopped) else None))

    def message(self, code: int, line: str | None) -> dict[str, Any]:
        """The posted object. line: the command's last line, if it failed. Chat services show its key `text`."""
        status = STATUS.get(code, "failed")
        return {
            "text": line or f"skipdecode: {status}: {self.output}",
            "status": status,
            "exit_status": code,
            "output": self.output,
            "summary": self.summary,
        }


class _Refused(Exception):
    """The server answered with another status than success; a redirect would turn the POST into a GET."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


def _is_temporary(error: BaseException) -> bool:
    return not isinstance(error, _Refused) or error.status in TEMPORARY_STATUS


def post(url: str, message: dict[str, Any]) -> None:
    """Post a JSON object, at most `TRIES` times; a failure is a warning that names the host alone."""
    import aiohttp

    @retry(
        retry=retry_if_exception(_is_temporary),
        stop=stop_after_attempt(TRIES),
        wait=wait_exponential(multiplier=WAIT_SECONDS, max=TRY_SECONDS),
        reraise=True,
    )
    async def send() -> None:
        limit = aiohttp.ClientTimeout(total=TRY_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
            session.post(url, json=message, allow_redirects=False) as response,
        ):
            if response.status >= 300:
                raise _Refused(response.status)

    try:
        asyncio.run(send())
    except Exception as error:  # whatever a URL and its server may cause: the job has ended
        # the text of another error may hold the URL
        why = str(error) if isinstance(error, _Refused) else type(error).__name__
        log.warning("notify: the outcome could not be posted to host %s: %s", urlsplit(url).hostname, why)
