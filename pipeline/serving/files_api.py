"""`/v1/files` and `/v1/batches` over HTTP.

Sources: https://platform.openai.com/docs/api-reference/files and .../batch
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from actors.serving.errors import ApiError
from actors.serving.http import read_json
from pipeline.serving.batches import BatchRunner, is_endpoint

BODY_BYTES = 2**20
MOST_LISTED = 100
log = logging.getLogger(__name__)


def create_files_app(runner: BatchRunner, max_file_bytes: int) -> Starlette:
    """The application. max_file_bytes: of an upload."""
    store = runner.store

    def known(record: dict[str, Any] | None, key: str) -> dict[str, Any]:
        if record is None:
            raise ApiError(404, f"there is no {key!r}")
        return record

    async def upload(request: Request) -> Response:
        async with request.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file is missing: send it as multipart/form-data")
            if purpose != "batch":
                raise ApiError(400, f"purpose = {str(purpose)[:100]!r}: must be 'batch'")
            if (file.size or 0) > max_file_bytes:
                raise ApiError(413, f"the file is larger than {max_file_bytes} bytes", "request_too_large")
            with tempfile.NamedTemporaryFile(dir=store.root / "files", delete=False) as target:
                while part := await file.read(2**20):
                    await run_in_threadpool(target.write, part)
        name = Path(file.filename or "requests.jsonl").name
        return JSONResponse(await run_in_threadpool(store.add_file, Path(target.name), name, purpose))

    async def files(request: Request) -> Response:
        return JSONResponse(_page(request, await run_in_threadpool(store.files)))

    async def file(request: Request) -> Response:
        key = request.path_params["key"]
        record = known(store.file(key), key)
        if request.method == "DELETE":
            store.remove_file(key)
            return JSONResponse({"id": key, "object": "file", "deleted": True})
        return JSONResponse(record)

    async def content(request: Request) -> Response:
        key = request.path_params["key"]
        known(store.file(key), key)
        return FileResponse(store.content(key), media_type="application/octet-stream")

    async def create(request: Request) -> Response:
        body = await read_json(request, BODY_BYTES)
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        key, endpoint, window = (body.get(name) for name in ("input_file_id", "endpoint", "completion_window"))
        if not is_endpoint(endpoint):
            raise ApiError(400, f"endpoint = {str(endpoint)[:100]!r} is not supported in batches")
        missing = ApiError(404 if isinstance(key, str) else 400, f"input_file_id: there is no {str(key)[:100]!r}")
        if not isinstance(key, str) or store.file(key) is None:
            raise missing
        metadata = body.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise ApiError(400, "metadata must be an object")
        try:
            made = await run_in_threadpool(runner.create, key, str(endpoint), str(window or "24h")[:100], metadata)
        except FileNotFoundError:  # deleted since
            raise missing from None
        return JSONResponse(made)

    async def batches(request: Request) -> Response:
        return JSONResponse(_page(request, await run_in_threadpool(store.batches)))

    async def batch(request: Request) -> Response:
        key = request.path_params["key"]
        return JSONResponse(known(store.batch(key), key))

    async def cancel(request: Request) -> Response:
        key = request.path_params["key"]
        return JSONResponse(known(runner.cancel(key) if store.batch(key) else None, key))

    return Starlette(
        routes=[
            Route("/v1/files", upload, methods=["POST"]),
            Route("/v1/files", files, methods=["GET"]),
            Route("/v1/files/{key}", file, methods=["GET", "DELETE"]),
            Route("/v1/files/{key}/content", content, methods=["GET"]),
            Route("/v1/batches", create, methods=["POST"]),
            Route("/v1/batches", batches, methods=["GET"]),
            Route("/v1/batches/{key}", batch, methods=["GET"]),
            Route("/v1/batches/{key}/cancel", cancel, methods=["POST"]),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _not_found, Exception: _failed},
    )


def _page(request: Request, records: list[dict[str, Any]]) -> dict[str, Any]:
    """A page of a list, behind the record that `after` names."""
    limit = request.query_params.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 9 or int(limit) < 1:
        raise ApiError(400, f"limit = {limit[:100]!r}: must be a whole number of at least 1")
    after = request.query_params.get("after")
    keys = [record["id"] for record in records]
    first = keys.index(after) + 1 if after in keys else 0
    count = min(int(limit), MOST_LISTED)
    page = records[first : first + count]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + count < len(records),
    }


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
    return ApiError(error.status_code, message).response()


def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}").response()
