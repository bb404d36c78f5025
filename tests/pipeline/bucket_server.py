"""An S3 server in this process: moto's, which otherwise looks through all of its services for each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

BUCKET = "bucket"


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
    server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    yield url
    server.shutdown()
    thread.join()


def empty() -> None:
    """Remove all objects: the server reads all names of the bucket to list a folder."""
    for bucket in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values():
        bucket.keys.clear()
