"""S3 through s3fs with one layer of retries, reads that are whole, and errors of one line.

Every call of s3fs goes through `_call_s3`; that is where all of this is done. botocore and s3fs try once.
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
from typing import Any

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from pipeline.runtime.under_way import is_under_way
from pipeline.storage.errors import ConditionRefused, NoSuchBucket, StoreFailed

log = logging.getLogger(__name__)
PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504}  # 409: two at once, S3 says try again
PASSING_CODES = {
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
}  # though the status is 400
REFUSED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}  # though the status is 400
CONDITION_CODES = {"NotImplemented", "InvalidArgument", "InvalidRequest"}  # of stores without conditional puts
# the service that gives them may answer late
MISSING_CREDENTIALS = (boto.NoCredentialsError, boto.CredentialRetrievalError, boto.MetadataRetrievalError)
WRONG_CREDENTIALS = (boto.PartialCredentialsError, boto.TokenRetrievalError, boto.ProfileNotFound, boto.SSOError)
CREDENTIALS_SECONDS = 30.0  # of the budget that missing credentials are waited for
CONTACT_SECONDS = 20.0  # of the budget for an endpoint that has never been reached: it may be mistyped
CONNECTIONS = 64  # at once; more than there are threads that call
STORE_FAILURES = (OSError, boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError)
WRITER = "writer"  # metadata of an object made by a conditional put: which one
SILENT_SECONDS = 5.0  # of trying before anybody is told, and once a minute then
TELL_SECONDS = 60.0


class PatientS3FileSystem(S3FileSystem):  # type: ignore[misc]
    """s3fs that tries a call again until its budget is over, and never takes a truncated read for data.

    retry_seconds: for which one call is tried. The wait before the next try is drawn between 0 and a bound that
    doubles from 1/600 of the budget up to 1/15 of it (from 0.5 s to 20 s of 300 s). One try ends after 5 s without
    a connection or 15 s without a byte, so a call may outlast its budget by as much. Once a budget is over, calls
    get one try each until the store answers: an outage costs one budget, not one a call. Missing credentials are
    waited for, and an endpoint never reached is tried, for a part of it.

    Raises OSError of one line that names the URL: PermissionError if access is refused, FileNotFoundError if there is
    no such object, FileExistsError if a conditional put finds one, ConditionRefused if the store does not take these,
    else StoreFailed.
    """

    retries = 1

    def __init__(self, *args: Any, retry_seconds: float = 300.0, **settings: Any) -> None:
        client = {"retries": {"total_max_attempts": 1, "mode": "standard"}, "max_pool_connections": CONNECTIONS}
        super().__init__(*args, config_kwargs=client, **settings)
        self.retry_seconds = retry_seconds
        self._answered = False  # the store, ever
        self._spent = False  # a budget, and nothing has been answered since
        self._told = -TELL_SECONDS  # on the monotonic clock
        self._renewing = asyncio.Lock()

    async def _call_s3(self, method: str, *settings: Any, **kwargs: Any) -> Any:
        return await self._tried(_Tries(self.retry_seconds, self._spent), method, *settings, **kwargs)

    call_s3 = sync_wrapper(_call_s3)

    async def _tried(self, tries: _Tries, method: str, *settings: Any, **kwargs: Any) -> Any:
        """The answer to a call, within what is left of its tries, which the calls that it needs share."""
        url = "s3://" + "/".join(filter(None, (kwargs.get("Bucket"), kwargs.get("Key") or kwargs.get("Prefix"))))
        if "IfNoneMatch" in kwargs:
            kwargs["Metadata"] = {WRITER: uuid.uuid4().hex}
        lacking: Any = None  # the client that has no credentials
        while True:
            client = self._s3
            try:
                if lacking is not None:
                    await self._renew(lacking)
                    client, lacking = self._s3, None
                answer = await super()._call_s3(method, *settings, **kwargs)
                if method == "get_object":
                    answer["Body"] = _Held(await _whole(answer, kwargs.get("Range")))
                self._answered, self._spent = True, False
                return answer
            except WRONG_CREDENTIALS as error:
                raise _no_credentials(url, error) from None
            except MISSING_CREDENTIALS as error:
                wait = tries.wait(CREDENTIALS_SECONDS)
                if wait is None:
                    self._spent = True
                    raise _no_credentials(url, error) from None
                lacking = client or self._s3
                failure: Exception = error
            except STORE_FAILURES as error:
                failure, code, passing = error, _code(error), _passing(error)
                self._answered |= bool(_response(error))
                if _response(error) and not passing:
                    self._spent = False
                if "IfNoneMatch" in kwargs and code == "PreconditionFailed":
                    if await self._wrote(tries, kwargs):
                        return {}  # an earlier try did it and its answer was lost; aiohttp may try again unasked
                    raise FileExistsError(f"{url}: is there already") from None
                if "IfNoneMatch" in kwargs and code in CONDITION_CODES:
                    raise ConditionRefused(f"{url}: {_flat(error)}") from None
                if not passing:
                    if method == "head_object" and code in ("400", "403"):  # without a body to say why
                        object_ = {"Bucket": kwargs["Bucket"], "Key": kwargs["Key"]}
                        await self._tried(tries, "get_object", **object_, Range="bytes=0-0")
                    raise _final(url, method, error) from None
                wait = tries.wait(CONTACT_SECONDS if self._is_unreached(error) else math.inf)
                if wait is None:
                    self._spent = True
                    raise StoreFailed(f"{url}: the store {tries.describe()} {_flat(error)}") from None
            now = time.monotonic()
            if now - tries.began > SILENT_SECONDS and now - self._told > TELL_SECONDS:
                self._told = now
                log.warning("%s: trying for up to %g s: %s", url, tries.seconds, _flat(failure))
            await asyncio.sleep(wait)

    def _is_unreached(self, error: BaseException) -> bool:
        """Whether there may be no store at all: nobody has reached it yet. In a job under way, its driver has."""
        return isinstance(error, boto.ConnectionError) and not self._answered and not is_under_way()

    async def _renew(self, lacking: Any) -> None:
        """Look for credentials anew: the client keeps that it has none. Once for all calls that had this client."""
        async with self._renewing:
            if self._s3 is lacking:
                await self.set_session(refresh=True)

    async def _wrote(self, tries: _Tries, put: Mapping[str, Any]) -> bool:
        """Whether the object is the one that this very put has made."""
        try:
            head = await self._tried(tries, "head_object", Bucket=put["Bucket"], Key=put["Key"])
        except FileNotFoundError:
            return False
        return bool(head["Metadata"].get(WRITER) == put["Metadata"][WRITER])


class _Tries:
    """The tries of one call: how many have failed, since when (monotonic clock), and whether one more is due.

    budget: seconds; 0 is one try, as if it was spent by an earlier call. seconds: the part of it that the last
    failure allows.
    """

    def __init__(self, budget: float, spent: bool) -> None:
        self.budget = self.seconds = 0 if spent else budget
        self.spent = spent
        self.began = time.monotonic()
        self.failed = 0

    def wait(self, most: float) -> float | None:
        """Seconds before the next try; None if the budget, or `most` seconds of it, are over.

        Drawn, so that many clients do not come at once.
        """
        wait = random.uniform(0, self.budget * min(2.0 ** min(self.failed, 10) / 600, 1 / 15))
        self.failed += 1
        self.seconds = min(self.budget, most)
        return wait if time.monotonic() + wait < self.began + self.seconds else None

    def describe(self) -> str:
        if self.spent:
            return "fails still:"
        return f"failed for {self.seconds:g} s, the last of {self.failed} tries with"


class _Held:
    """A body that has been read, for callers that read it."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    async def read(self, size: int = -1) -> bytes:
        return self._data.read(size)

    def close(self) -> None:
        pass


async def _whole(answer: Mapping[str, Any], wanted: str | None) -> bytes:
    """The body of an answer, of a range if one was wanted; OSError if it is not all of it."""
    body = answer["Body"]
    try:
        data: bytes = await body.read()
    finally:
        body.close()
    size = int(answer["ContentLength"])
    if wanted is not None:
        told = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.get("ContentRange") or "")
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
        if told is None or asked is None:
            raise OSError(f"asked for {wanted}, got {answer.get('ContentRange') or 'no range'}")
        first, last, total = map(int, told.groups())
        if asked[1]:
            right = first == int(asked[1]) and last == min(int(asked[2] or total), total - 1)
        else:
            right = first == max(0, total - int(asked[2])) and last == total - 1
        if not right:
            raise OSError(f"asked for {wanted}, got {told[0]}")
        size = last - first + 1
    if len(data) != size:
        raise OSError(f"truncated: {len(data)} of {size} bytes came")
    return data


def _response(error: BaseException) -> Mapping[str, Any]:
    """The store's answer; empty if there was none. s3fs makes OSErrors of boto's and keeps these as the cause."""
    for one in (error, error.__cause__):
        if isinstance(one, boto.ClientError):
            response: Mapping[str, Any] = one.response
            return response
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _passing(error: BaseException) -> bool:
    """Whether the same call may well succeed later."""
    response = _response(error)
    if response:
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode") in PASSING_STATUS or (
            _code(error) in PASSING_CODES
        )
    if isinstance(error, boto.SSLError):
        return not isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorCertificateError)
    return not isinstance(error, boto.BotoCoreError) or isinstance(
        error,
        boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | boto.FlexibleChecksumError,
    )


def _no_credentials(url: str, error: Exception) -> Exception:
    return PermissionError(
        f"{url}: no credentials found ({type(error).__name__}): give them in one of the usual AWS places"
    )


def _final(url: str, method: str, error: Exception) -> Exception:
    """An error that no further try will mend, for people, of a kind that programs ask for."""
    code = _code(error)
    if code == "RequestTimeTooSkewed":
        return PermissionError(f"{url}: access refused ({code}): set this machine's clock, it differs from the store's")
    if isinstance(error, PermissionError) or code in REFUSED_CODES or (method.startswith("head_") and code == "400"):
        if code in ("AccessDenied", "InvalidObjectState"):  # these say what is missing
            return PermissionError(f"{url}: access refused: {_flat(error)}")
        return PermissionError(f"{url}: access refused ({code}): renew the credentials")
    if code == "NoSuchBucket":
        return NoSuchBucket(f"s3://{url.split('/')[2]}: no such bucket")
    if code == "PreconditionFailed" or isinstance(error, boto.ParamValidationError):
        return error  # s3fs makes more of these
    for kind in (FileNotFoundError, FileExistsError):
        if isinstance(error, kind):
            return kind(f"{url}: {_flat(error)}")
    return StoreFailed(f"{url}: {_flat(error)}")


def _flat(error: BaseException) -> str:
    """What went wrong, on one short line."""
    said = _response(error).get("Error", {})
    text = f"{said.get('Code')}: {said.get('Message')}" if said else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
