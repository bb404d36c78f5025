"""An S3 server in this process: moto's, which otherwise looks through all of its services for each request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

BUCKET = "bucket"
requests: list[str] = []  # that servers of this process have answered since it was cleared: method and path
seconds: list[float] = []  # processor time of each answer


def with_atomic_creates(app: WSGIApplication) -> WSGIApplication:
    """The same server, one conditional put at a time: moto's check and write are two steps, S3's are one."""
    lock = threading.Lock()

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        began = time.thread_time()
        with lock if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            answer = app(environ, start_response)
        seconds.append(time.thread_time() - began)
        return answer

    return call


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
    app = with_atomic_creates(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    yield url
    server.shutdown()
    thread.join()


def empty() -> None:
    """Remove all objects: the server reads all names of the bucket to list a folder."""
    requests.clear()
    for bucket in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values():
        bucket.keys.clear()
