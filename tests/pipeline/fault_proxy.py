"""A proxy on loopback between a client and an S3 server, which does to requests what networks and stores do."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HELD = {"connection", "transfer-encoding", "keep-alive", "content-length", "expect"}


@dataclass(frozen=True)
class Request:
    """number: of those that have come, from 0. target: path and query. conditional: a put with If-None-Match."""

    number: int
    method: str
    target: str
    conditional: bool = False


def refusal(status: int, code: str, message: str = "no") -> bytes:
    """An answer of the store's own that is an error."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


SLOW_DOWN = refusal(503, "SlowDown", "Please reduce your request rate.")
EXPIRED = refusal(400, "ExpiredToken", "The provided token has expired.")
DENIED = refusal(403, "AccessDenied", "Access Denied")

# what may be done to a request; bytes are an answer in the store's place
RESET = "reset before the store sees it"
RESET_BODY = "reset in the middle of the request's body"
LOST_ANSWER = "reset after the store has done it"
RESET_ANSWER = "reset in the middle of the answer's body"
TRUNCATED = "the answer ends before its Content-Length"
SHORT = "the answer is cut short, its Content-Length too"
DELAY = "delay"
Fault = str | bytes | None
Script = Callable[[Request], Fault]

PASSING: tuple[str | bytes, ...] = (
    SLOW_DOWN,
    refusal(500, "InternalError"),
    RESET,
    RESET_BODY,
    LOST_ANSWER,
    RESET_ANSWER,
    TRUNCATED,
    DELAY,
)


@dataclass
class Proxy:
    """script: asked of each request what to do to it. done: how often each fault was met, by method."""

    url: str
    script: Script = lambda request: None
    requests: list[Request] = field(default_factory=list)
    done: Counter[tuple[str, str | bytes]] = field(default_factory=Counter)
    delay: float = 0.02
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, method: str, target: str, conditional: bool) -> Fault:
        with self.lock:
            request = Request(len(self.requests), method, target, conditional)
            self.requests.append(request)
            fault = self.script(request)
            if fault is not None:
                self.done[method, fault] += 1
            return fault


def mixed(seed: int, share: float, faults: tuple[str | bytes, ...] = PASSING, burst: int = 3) -> Script:
    """Faults on about a share of the requests, in bursts of one kind and up to `burst` requests."""
    draw = random.Random(seed)
    left: list[str | bytes] = []

    def script(request: Request) -> Fault:
        if left:
            return left.pop()
        if draw.random() < share:
            left.extend([draw.choice(faults)] * draw.randint(0, burst - 1))
            return left.pop() if left else draw.choice(faults)
        return None

    return script


@contextmanager
def fault_proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy before the server at a URL; it passes everything on until it is given a script."""
    there = urlsplit(upstream)
    assert there.hostname is not None

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def _answer(self) -> None:
            chunked = self.headers.get("Transfer-Encoding") == "chunked"  # as pyarrow's client puts
            size = 0 if chunked else int(self.headers.get("Content-Length", 0))
            fault = proxy.decide(self.command, self.path, "If-None-Match" in self.headers)
            if fault == RESET:
                return self._reset()
            if fault == RESET_BODY:
                self.rfile.read(size // 2)
                return self._reset()
            body = b"".join(self._chunks()) if chunked else self.rfile.read(size)
            if isinstance(fault, bytes):
                if self.command == "HEAD":  # has no body, whatever its length
                    fault = fault.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
                self.wfile.write(fault)
                return None
            if fault == DELAY:
                time.sleep(proxy.delay)
            server = http.client.HTTPConnection(there.hostname or "", there.port, timeout=600)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HELD}
            server.request(self.command, self.path, body or None, {**headers, "Content-Length": str(len(body))})
            answer = server.getresponse()
            data = answer.read()
            length = answer.headers.get("Content-Length", str(len(data)))
            server.close()
            if fault == LOST_ANSWER:
                return self._reset()
            if fault == SHORT and data:
                data = data[: len(data) // 2]
                length = str(len(data))
            head = [f"HTTP/1.1 {answer.status} {answer.reason}"]
            head += [f"{name}: {value}" for name, value in answer.headers.items() if name.lower() not in HELD]
            if answer.status != 204:
                head.append(f"Content-Length: {length}")
            self.wfile.write("\r\n".join(head).encode() + b"\r\n\r\n")
            if fault == TRUNCATED and data:
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return None
            if fault == RESET_ANSWER and data:
                self.wfile.write(data[: len(data) // 2])
                return self._reset()
            self.wfile.write(data)
            return None

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _reset(self) -> None:
            """Close without the end that TCP gives a connection: the client sees it reset."""
            self.close_connection = True
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def shutdown_request(self, request: object) -> None:
            assert isinstance(request, socket.socket)
            if request.fileno() != -1:
                super().shutdown_request(request)

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    poll = {"poll_interval": 0.02}  # seconds that the end takes
    thread = threading.Thread(target=server.serve_forever, kwargs=poll, name="fault proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
