"""S3 through s3fs with one layer of retries, reads that are whole, and errors of one line.

Every call of s3fs goes through `_call_s3`; that is where all of this is done. botocore and s3fs try once.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
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

log = logging.getLogger(__name__)
PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504}  # 409: two at once, S3 says try again
PASSING_CODES = {
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
}  # though the status is 400
REFUSED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}  # though the status is 400
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.MetadataRetrievalError,
    boto.ProfileNotFound,
    boto.SSOError,
)
STORE_FAILURES = (OSError, boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError)
WRITER = "writer"  # metadata of an object made by a conditional put: which one
SILENT_SECONDS = 5.0  # of trying before anybody is told, and once a minute then
TELL_SECONDS = 60.0


class PatientS3FileSystem(S3FileSystem):  # type: ignore[misc]
    """s3fs that tries a call again until its budget is over, and never takes a truncated read for data.

    retry_seconds: for which one call is tried. The wait before the next try is drawn between 0 and a bound that
    doubles from 1/600 of the budget up to 1/15 of it (from 0.5 s to 20 s of 300 s). One try ends after 5 s without
    a connection or 15 s without a byte, so a call may outlast its budget by as much.

    Raises OSError of one line that names the URL: PermissionError if access is refused, FileNotFoundError if there is
    no such object, FileExistsError if a conditional put finds one. `conditional_puts` says whether the store takes
    these: whoever finds that it does not sets it to False.
    """

    retries = 1

    def __init__(self, *args: Any, retry_seconds: float = 300.0, **settings: Any) -> None:
        super().__init__(*args, config_kwargs={"retries": {"total_max_attempts": 1, "mode": "standard"}}, **settings)
        self.retry_seconds = retry_seconds
        self.conditional_puts = True
        self._told = -TELL_SECONDS  # on the monotonic clock

    async def _call_s3(self, method: str, *settings: Any, **kwargs: Any) -> Any:
        url = "s3://" + "/".join(filter(None, (kwargs.get("Bucket"), kwargs.get("Key") or kwargs.get("Prefix"))))
        if "IfNoneMatch" in kwargs:
            kwargs["Metadata"] = {WRITER: uuid.uuid4().hex}
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                answer = await super()._call_s3(method, *settings, **kwargs)
                if method == "get_object":
                    answer["Body"] = _Held(await _whole(answer, kwargs.get("Range")))
                return answer
            except NO_CREDENTIALS as error:
                raise PermissionError(
                    f"{url}: no credentials found ({type(error).__name__}): give them in one of the usual AWS places"
                ) from None
            except STORE_FAILURES as error:
                if _code(error) == "PreconditionFailed" and "IfNoneMatch" in kwargs:
                    if await self._wrote(kwargs):
                        return {}  # an earlier try did it and its answer was lost; aiohttp may try again unasked
                    raise FileExistsError(f"{url}: is there already") from None
                wait = self._wait(attempt, began)
                if not _passing(error):
                    if method == "head_object" and _code(error) in ("400", "403"):  # without a body to say why
                        await self._call_s3("get_object", Bucket=kwargs["Bucket"], Key=kwargs["Key"], Range="bytes=0-0")
                    raise _told(url, method, error) from None
                if wait is None:
                    raise OSError(
                        f"{url}: the store failed for {self.retry_seconds:g} s, the last of {attempt + 1} tries with "
                        f"{_flat(error)}"
                    ) from None
                now = time.monotonic()
                if now - began > SILENT_SECONDS and now - self._told > TELL_SECONDS:
                    self._told = now
                    log.warning("%s: trying for up to %g s: %s", url, self.retry_seconds, _flat(error))
                await asyncio.sleep(wait)

    call_s3 = sync_wrapper(_call_s3)

    def _wait(self, attempt: int, began: float) -> float | None:
        """Seconds before the next try; None if the budget is over. Drawn, so that many clients do not come at once."""
        wait = random.uniform(0, self.retry_seconds * min(2.0 ** min(attempt, 10) / 600, 1 / 15))
        return wait if time.monotonic() + wait < began + self.retry_seconds else None

    async def _wrote(self, put: Mapping[str, Any]) -> bool:
        """Whether the object is the one that this very put has made."""
        try:
            head = await self._call_s3("head_object", Bucket=put["Bucket"], Key=put["Key"])
        except FileNotFoundError:
            return False
        return bool(head["Metadata"].get(WRITER) == put["Metadata"][WRITER])


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
    return not isinstance(error, boto.BotoCoreError) or isinstance(
        error,
        boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | boto.FlexibleChecksumError,
    )


def _told(url: str, method: str, error: Exception) -> Exception:
    """An error that no further try will mend, for people; the store's own where a program asks for its kind."""
    code = _code(error)
    if code == "RequestTimeTooSkewed":
        return PermissionError(f"{url}: access refused ({code}): set this machine's clock, it differs from the store's")
    if isinstance(error, PermissionError) or code in REFUSED_CODES or (method.startswith("head_") and code == "400"):
        if code in ("AccessDenied", "InvalidObjectState"):  # these say what is missing
            return PermissionError(f"{url}: access refused: {_flat(error)}")
        return PermissionError(f"{url}: access refused ({code}): renew the credentials")
    if code == "NoSuchBucket":
        return OSError(f"s3://{url.split('/')[2]}: no such bucket")
    return error


def _flat(error: BaseException) -> str:
    """What went wrong, on one short line."""
    said = _response(error).get("Error", {})
    text = f"{said.get('Code')}: {said.get('Message')}" if said else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
