"""What it costs when the store, its endpoint or its credentials fail: a budget once, and one line that says which."""

from __future__ import annotations

import datetime
import pickle
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fault_proxy import DENIED, RESET, SLOW_DOWN, TRUNCATED, Fault, Proxy, Request, fault_proxy, refusal
from in_process import invoke, job_values
from moved_clock import Clock

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard, read_groups
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import Folder, make_writable, open_folder
from pipeline.storage.parquet import parquet_bytes

TAKEN = refusal(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def proxy(s3: StorageConfig) -> Iterator[Proxy]:
    """A proxy of the test alone: a client knows of its URL's outages."""
    assert s3.endpoint_url
    with fault_proxy(s3.endpoint_url) as proxy:
        yield proxy


def new_folder(url: str, seconds: float) -> Folder:
    return open_folder(f"s3://bucket/{uuid.uuid4().hex}", StorageConfig(endpoint_url=url, retry_seconds=seconds))


def passes(request: Request) -> Fault:
    return None


@pytest.mark.parametrize(
    ("fault", "operation", "words"),
    [
        (SLOW_DOWN, lambda folder: folder.create("a", b"x"), "SlowDown"),
        (RESET, lambda folder: folder.read("a"), "endpoint URL"),
        (TRUNCATED, lambda folder: folder.names(), ""),
    ],
    ids=["SlowDown", "reset", "truncated"],
)
def test_a_spent_budget_is_one_line_with_url_and_cause(
    proxy: Proxy, clock: Clock, fault: Fault, operation: Callable[[Folder], object], words: str
) -> None:
    folder = new_folder(proxy.url, 15)
    proxy.script = lambda request: fault
    began = clock.now
    with pytest.raises(StoreFailed) as caught:
        operation(folder)
    assert 14 <= clock.now - began <= 15
    message = str(caught.value)
    assert message.startswith(f"{folder.url}") and "failed for 15 s" in message and words in message
    assert "\n" not in message and len(message) < 400
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is StoreFailed and str(copy) == message


def test_an_outage_costs_one_budget_and_not_one_a_call(proxy: Proxy, clock: Clock) -> None:
    folder = new_folder(proxy.url, 15)
    folder.replace("b", b"y")
    began = clock.now

    def put_head_get(request: Request) -> Fault:  # the put looks whose object it is, with a HEAD, then a GET
        if request.method == "HEAD":
            return refusal(403, "X")
        return TAKEN if request.method == "PUT" and clock.now > began + 11 else SLOW_DOWN

    proxy.script = put_head_get
    with pytest.raises(StoreFailed, match="failed for 15 s"):
        folder.create("a", b"x")
    assert 14 <= clock.now - began <= 15
    proxy.script = lambda request: SLOW_DOWN
    operations: list[Callable[[], object]] = [folder.names, lambda: folder.read("b"), lambda: folder.remove("b")]
    operations += [lambda: folder.replace("c", b"z"), lambda: folder.create("d", b"x")]
    for operation in operations:  # and no layer multiplies the tries of another
        proxy.requests.clear()
        with pytest.raises(StoreFailed, match=r": the store still fails: SlowDown"):
            operation()
        assert len(proxy.requests) == 1
    proxy.script = passes
    assert folder.read("b") == b"y"
    proxy.requests.clear()
    proxy.script = lambda request: SLOW_DOWN if request.number < 2 else None  # trusted again
    assert folder.read("b") == b"y" and len(proxy.requests) == 3


def test_an_answer_that_refuses_is_an_answer(proxy: Proxy) -> None:
    folder = new_folder(proxy.url, 0.5)
    proxy.script = lambda request: SLOW_DOWN
    with pytest.raises(StoreFailed, match=r"failed for 0\.5 s"):
        folder.names()
    proxy.script = lambda request: DENIED
    with pytest.raises(PermissionError):
        folder.names()
    proxy.requests.clear()
    proxy.script = lambda request: SLOW_DOWN if request.number < 1 else None
    assert folder.names() == []


def test_an_outage_while_reading_is_not_reported_as_damage(proxy: Proxy, s3: StorageConfig) -> None:
    folder = new_folder(proxy.url, 0.2)
    folder.replace("x.parquet", parquet_bytes(pa.table({"text": ["x"] * 100})))
    shard = Shard(0, f"{folder.url}/x.parquet", 0, 100)
    storage = StorageConfig(endpoint_url=proxy.url, retry_seconds=0.2)
    proxy.script = lambda request: SLOW_DOWN if request.method == "GET" else None
    with pytest.raises(StoreFailed, match=rf"^{shard.url}: the store failed for") as caught:
        list(read_groups([shard], ["text"], storage))
    assert "damaged" not in str(caught.value)


def test_every_final_error_names_the_url(proxy: Proxy) -> None:
    folder = new_folder(proxy.url, 5)
    with pytest.raises(FileNotFoundError, match=rf"^{folder.url}/a: "):
        folder.read("a")
    for code in ("InvalidDigest", "NobodyKnows"):
        proxy.requests.clear()
        proxy.script = lambda request, code=code: refusal(400, code)  # type: ignore[misc]
        for operation, where in ((folder.names, folder.url), (lambda: folder.create("a", b""), f"{folder.url}/a")):
            with pytest.raises(StoreFailed, match=rf"^{where}/?: {code}: no$"):
                operation()
        assert len(proxy.requests) == 2  # also a conditional put is not taken for one that was refused as such
    proxy.script = lambda request: refusal(411, "MissingContentLength")
    with pytest.raises(StoreFailed, match=r"MissingContentLength: no; .* AWS_REQUEST_CHECKSUM_CALCULATION=when_req"):
        folder.create("a", b"")


@pytest.mark.parametrize("answer", [refusal(501, "NotImplemented"), refusal(400, "InvalidRequest")])
def test_a_store_that_refuses_conditions_is_refused(proxy: Proxy, answer: bytes) -> None:
    proxy.script = lambda request: answer if request.conditional else None
    folder = new_folder(proxy.url, 5)
    with pytest.raises(UserError, match=rf"output\.path: the store of {folder.url} has no conditional puts"):
        make_writable(folder)
    assert folder.names("_job") == []
    with pytest.raises(StoreFailed):
        folder.create("a", b"1")
    proxy.script = lambda request: refusal(400, "InvalidRequest") if request.method == "PUT" else None
    with pytest.raises(StoreFailed, match="InvalidRequest: no"):
        make_writable(folder)


def test_a_job_on_a_store_without_conditions_is_refused_before_its_lease(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy.script = lambda request: refusal(501, "NotImplemented") if request.conditional else None
    folder = new_folder(proxy.url, 5)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    storage = {"endpoint_url": proxy.url}
    result = invoke(tmp_path, job_values(tmp_path / "in.parquet", folder.url, checkpoint, storage=storage))
    assert result.exit_code == 2 and "output.path" in result.stderr, result.output
    assert folder.names("_job") == folder.names("_job/lease") == []


def test_missing_credentials_are_refused_at_once_and_waited_for_in_a_job_that_runs(
    s3: StorageConfig, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert s3.endpoint_url
    storage = StorageConfig(endpoint_url=s3.endpoint_url, retry_seconds=300.5)  # a client of its own
    began = clock.now
    with pytest.raises(PermissionError, match=f"no credentials found on host {socket.gethostname()} "):
        open_folder("s3://bucket/none", storage).names()
    assert clock.now == began
    folder = open_folder("s3://bucket/none", storage.after_planning())
    text = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"
    clock.in_sleep = lambda: (tmp_path / "credentials").write_text(text)
    assert folder.names() == []
    assert began < clock.now < began + 30


@contextmanager
def self_signed(folder: Path) -> Iterator[str]:
    """URL of an HTTPS server whose certificate nobody has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_self_signed_certificate_is_reported_without_retries(s3: StorageConfig, clock: Clock, tmp_path: Path) -> None:
    with self_signed(tmp_path) as url:
        folder = new_folder(url, 30)
        began = clock.now
        with pytest.raises(StoreFailed, match=rf"^{folder.url}/: SSL validation failed"):
            folder.names()
        assert clock.now == began


def test_an_endpoint_that_was_never_reached_is_reported_soon(proxy: Proxy, clock: Clock) -> None:
    def folder_at(url: str, running: bool) -> Folder:
        storage = StorageConfig(endpoint_url=url, retry_seconds=30 + uuid.uuid4().int % 1000 / 1e6, contact_seconds=0.2)
        return open_folder(f"s3://bucket/{uuid.uuid4().hex}", storage.after_planning() if running else storage)

    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid"):
        with pytest.raises(StoreFailed, match=rf"failed for 0\.2 s.*{url}"):
            folder_at(url, running=False).names()
    for running in (True, False):  # in a job that runs, or once it has answered, an endpoint is waited for
        folder = folder_at(proxy.url, running)
        if not running:
            folder.names()
        end = clock.now + 0.6
        proxy.script = lambda request, end=end: RESET if clock.now < end else None  # type: ignore[misc]
        assert folder.names() == []
        proxy.script = passes
