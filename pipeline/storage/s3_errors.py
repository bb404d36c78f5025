"""Decides which errors of botocore and s3fs are temporary, and turns all other errors into OSErrors."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp
from botocore import exceptions as boto

from actors.engine.errors import flat
from pipeline.storage.errors import NoSuchBucket, StoreFailed

TEMPORARY_STATUS = {408, 409, 429, 500, 502, 503, 504}  # 409: a conflict of requests, which S3 asks clients to retry
# codes of temporary errors with status 400
TEMPORARY_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
THROTTLED = re.compile("SlowDown|Throttl|LimitExceeded|TooManyRequests|ThroughputExceeded|PriorRequestNotComplete")
REFUSED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
EXPLAINED_CODES = {"AccessDenied", "InvalidObjectState"}  # error codes whose messages name the missing permission
CONDITION_CODES = {"NotImplemented", "InvalidArgument", "InvalidRequest"}  # codes of stores that lack conditional puts
NO_TRAILERS = {"XAmzContentSHA256Mismatch", "MissingContentLength", "NotImplemented"}  # botocore sends some over HTTPS
MISSING_CREDENTIALS = (boto.NoCredentialsError, boto.CredentialRetrievalError, boto.MetadataRetrievalError)
WRONG_CREDENTIALS = (boto.PartialCredentialsError, boto.TokenRetrievalError, boto.ProfileNotFound, boto.SSOError)
TEXT = 200  # maximum number of characters of an error's text


def response_of(error: BaseException) -> Mapping[str, Any]:
    """Return the store's response; empty if there is none. An error of s3fs holds botocore's error as `__cause__`."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, boto.ClientError):
            response: Mapping[str, Any] = candidate.response
            return response
    return {}


def error_code(error: BaseException) -> str:
    """Return the store's error code; empty if the store sent no response."""
    return str(response_of(error).get("Error", {}).get("Code", ""))


def error_text(error: BaseException) -> str:
    """Return one line that says what failed: at most `TEXT` characters, and advice for some errors."""
    details = response_of(error).get("Error", {})
    text = f"{details.get('Code')}: {details.get('Message')}" if details else str(error)
    advice = "; if the store supports no checksums in trailers, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    return (flat(text)[:TEXT] or type(error).__name__) + (advice if details.get("Code") in NO_TRAILERS else "")


def is_temporary(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    response = response_of(error)
    if response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = error_code(error)  # some stores throttle a call with status 400 or 403
        return status in TEMPORARY_STATUS or code in TEMPORARY_CODES or THROTTLED.search(code) is not None
    if isinstance(error, boto.SSLError):
        return not isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorCertificateError)
    return not isinstance(error, boto.BotoCoreError) or isinstance(
        error, boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | boto.FlexibleChecksumError
    )


def no_credentials(url: str, error: Exception) -> PermissionError:
    """Return the error for missing credentials. It names this host, which may be any node of a cluster."""
    return PermissionError(
        f"{url}: no credentials found on host {socket.gethostname()} ({type(error).__name__}): give this host AWS "
        "credentials in its environment, in ~/.aws or by an instance role; every node of a cluster needs credentials"
    )


def final_error(url: str, method: str, error: Exception) -> Exception:
    """Return the error to raise for a failure that is not temporary: an OSError with a one-line message."""
    code = error_code(error)
    if code == "RequestTimeTooSkewed":
        return PermissionError(f"{url}: access refused ({code}): set this machine's clock to the store's time")
    if isinstance(error, PermissionError) or code in REFUSED_CODES or (method.startswith("head_") and code == "400"):
        if code in EXPLAINED_CODES:
            return PermissionError(f"{url}: access refused: {error_text(error)}")
        return PermissionError(f"{url}: access refused ({code}): renew the credentials")
    if code == "NoSuchBucket":
        return NoSuchBucket(f"s3://{url.split('/')[2]}: no such bucket")
    if code == "PreconditionFailed" or isinstance(error, boto.ParamValidationError):
        return error  # unchanged, because s3fs handles these errors
    for kind in (FileNotFoundError, FileExistsError):
        if isinstance(error, kind):
            return kind(f"{url}: {error_text(error)}")
    return StoreFailed(f"{url}: {error_text(error)}")
