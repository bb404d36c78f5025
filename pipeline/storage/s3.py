"""Accesses S3 through s3fs, with one layer of retries, a check that reads are complete, and one-line errors.

Every call of s3fs goes through `_call_s3`, which adds these features. The retries of botocore and s3fs are switched
off. Those of s3fs do not suffice: they limit the number of tries, but not the time; in reads they are nested, so that
the numbers of tries multiply; and they do not notice truncated bodies.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import random
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from pipeline import metrics
from pipeline.storage.errors import ConditionRefused, StoreFailed
from pipeline.storage.s3_errors import (
    CONDITION_CODES,
    MISSING_CREDENTIALS,
    WRONG_CREDENTIALS,
    error_code,
    error_text,
    final_error,
    is_temporary,
    no_credentials,
    response_of,
)

log = logging.getLogger(__name__)
CREDENTIALS_SECONDS = 30.0  # maximum time of retries if a credentials service fails or is slow
CONNECTIONS = 64  # maximum number of parallel connections; must exceed the number of calling threads
STORE_FAILURES = (OSError, boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError)
WRITER = "writer"  # metadata key under which each conditional put stores a random id, to recognize its object later
QUIET_SECONDS = 5.0  # no warning is logged during the first seconds of retries
WARNING_SECONDS = 60.0  # minimum time between two warnings of one client


class _Temporary(Exception):
    """A temporary failure. limit: maximum seconds of retries, if the call's `_Budget` does not allow less."""

    def __init__(self, error: Exception, limit: float = math.inf) -> None:
        super().__init__(str(error))
        self.error, self.limit = error, limit


@dataclass(frozen=True)
class _Budget:
    """Time for retries of a call and its nested calls. seconds: 0 while the store does not answer (see `_spent`)."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())


class PatientS3FileSystem(S3FileSystem):  # type: ignore[misc]
    """s3fs that retries a failed call until its time budget is spent, and never returns a truncated read.

    The wait before a retry is random, between 0 and a bound that doubles from 1/600 to 1/15 of the budget (for 300 s:
    from 0.5 s to 20 s). One try ends after 5 s without a connection or 15 s without a byte, and a call may exceed its
    budget by this time. After a call has spent its budget, each later call is tried only once until the store answers
    again, so that an outage costs the time of one budget, not of one per call.

    retry_seconds: budget of one call. contact_seconds: smaller budget for an endpoint that has never answered, because
    its URL may be wrong.

    Every failure is an OSError with a one-line message that names the URL: PermissionError if access is refused or
    credentials are missing, FileNotFoundError, FileExistsError from a conditional put, ConditionRefused if the store
    does not support conditional puts, StoreFailed for any other failure.
    """

    retries = 1

    def __init__(
        self, *args: Any, retry_seconds: float = 300.0, contact_seconds: float = math.inf, **settings: Any
    ) -> None:
        client = {"retries": {"total_max_attempts": 1, "mode": "standard"}, "max_pool_connections": CONNECTIONS}
        super().__init__(*args, config_kwargs=client, **settings)
        self.retry_seconds, self.contact_seconds = retry_seconds, contact_seconds
        self._answered = False  # whether the store has ever answered
        self._spent = False  # a call has spent its budget, and the store has not answered since
        self._warned = -WARNING_SECONDS  # time of the last warning, on the monotonic clock
        self._lacking: Any = None  # the client that found no credentials
        self._renewing = asyncio.Lock()

    async def _call_s3(self, method: str, *settings: Any, **kwargs: Any) -> Any:
        return await self._retried(_Budget(0.0 if self._spent else self.retry_seconds), method, *settings, **kwargs)

    call_s3 = sync_wrapper(_call_s3)

    async def _retried(self, budget: _Budget, method: str, *settings: Any, **kwargs: Any) -> Any:
        """Try a call until it succeeds or `budget` is spent. Return the response."""
        url = "s3://" + "/".join(filter(None, (kwargs.get("Bucket"), kwargs.get("Key") or kwargs.get("Prefix"))))
        if "IfNoneMatch" in kwargs:
            kwargs["Metadata"] = {WRITER: uuid.uuid4().hex}
        was_spent, longest, tries = self._spent, budget.seconds / 600, 0
        while True:
            try:
                tries += 1
                return await self._try(url, budget, method, *settings, **kwargs)
            except _Temporary as temporary:
                error, limit = temporary.error, min(budget.seconds, temporary.limit)
            wait, longest = random.uniform(0, longest), min(2 * longest, budget.seconds / 15)
            now = time.monotonic()
            if now + wait >= budget.began + limit:
                self._spent = True
                if isinstance(error, MISSING_CREDENTIALS):
                    raise no_credentials(url, error) from None
                failed = "still fails" if was_spent else f"failed for {limit:g} s (tries: {tries})"
                raise StoreFailed(f"{url}: the store {failed}: {error_text(error)}") from None
            metrics.add("store_retries")
            if now - budget.began > QUIET_SECONDS and now - self._warned > WARNING_SECONDS:
                self._warned = now
                log.warning("%s: the store fails; retrying for up to %g s: %s", url, limit, error_text(error))
            await asyncio.sleep(wait)

    async def _try(self, url: str, budget: _Budget, method: str, *settings: Any, **kwargs: Any) -> Any:
        """Try a call once, and return the response. Raises `_Temporary` if another try may succeed later."""
        try:
            if self._lacking is not None:
                await self._renew_credentials()
            response = await super()._call_s3(method, *settings, **kwargs)
            if method == "get_object":
                response["Body"] = _ReadBody(await _whole_body(response, kwargs.get("Range")))
            self._answered, self._spent = True, False
            return response
        except WRONG_CREDENTIALS as error:
            raise no_credentials(url, error) from None
        except MISSING_CREDENTIALS as error:
            self._lacking = self._s3
            # during planning, do not retry: probably no credentials are set. A running job had credentials before
            forgotten = isinstance(error, boto.NoCredentialsError) and self.contact_seconds < self.retry_seconds
            raise _Temporary(error, 0.0 if forgotten else CREDENTIALS_SECONDS) from None
        except STORE_FAILURES as error:
            code, temporary, has_answered = error_code(error), is_temporary(error), bool(response_of(error))
            self._answered |= has_answered
            if has_answered and not temporary:
                self._spent = False
            if "IfNoneMatch" in kwargs and code == "PreconditionFailed":
                if await self._is_own(budget, kwargs):
                    return {}  # an earlier try (perhaps by aiohttp) wrote the object, but the response was lost
                raise FileExistsError(f"{url}: exists already") from None
            if "IfNoneMatch" in kwargs and code in CONDITION_CODES:
                raise ConditionRefused(f"{url}: {error_text(error)}") from None
            if temporary:
                unreached = isinstance(error, boto.ConnectionError) and not self._answered
                raise _Temporary(error, self.contact_seconds if unreached else math.inf) from None
            if method == "head_object" and code in ("400", "403"):  # send a GET: HEAD responses have no error text
                target = {"Bucket": kwargs["Bucket"], "Key": kwargs["Key"]}
                with suppress(StoreFailed):  # ignore the error for an empty object, which lacks this range
                    await self._retried(budget, "get_object", **target, Range="bytes=0-0")
                raise _Temporary(error, CREDENTIALS_SECONDS) from None  # the GET worked, so HEAD was throttled
            raise final_error(url, method, error) from None

    async def _renew_credentials(self) -> None:
        """Create a client, which looks for credentials again, unless another call has created it."""
        async with self._renewing:
            if self._s3 is self._lacking:
                await self.set_session(refresh=True)
            self._lacking = None

    async def _is_own(self, budget: _Budget, put: Mapping[str, Any]) -> bool:
        """Return whether the existing object was written by this call, whose arguments are `put`."""
        try:
            head = await self._retried(budget, "head_object", Bucket=put["Bucket"], Key=put["Key"])
        except FileNotFoundError:
            return False
        return bool(head["Metadata"].get(WRITER) == put["Metadata"][WRITER])


class _ReadBody:
    """A response body that has been read already, with the interface of an unread body."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    async def read(self, size: int = -1) -> bytes:
        return self._data.read(size)

    def close(self) -> None:
        pass


async def _whole_body(response: Mapping[str, Any], requested: str | None) -> bytes:
    """Return the body of a response. Raises OSError if the body is truncated or is not the range `requested`."""
    body, size = response["Body"], int(response["ContentLength"])
    try:
        data: bytes = await body.read()
    finally:
        body.close()
    if requested is not None:
        answered = response.get("ContentRange") or "no range"
        received = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answered)
        first, last, total = map(int, received.groups()) if received else (0, -1, 0)
        start, _, end = requested.removeprefix("bytes=").partition("-")
        wanted = (int(start), min(int(end or total), total - 1)) if start else (max(0, total - int(end)), total - 1)
        if (first, last) != wanted or not received:
            raise OSError(f"requested {requested}, received {answered}")
        size = last - first + 1
    if len(data) != size:
        raise OSError(f"truncated: received {len(data)} of {size} bytes")
    return data
