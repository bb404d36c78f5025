"""What networks and stores do to requests: data come whole or not at all, and what is written is written once."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
from fault_proxy import (
    DENIED,
    EXPIRED,
    LOST_ANSWER,
    PASSING,
    RESET,
    RESET_ANSWER,
    RESET_BODY,
    SHORT,
    SLOW_DOWN,
    TRUNCATED,
    Fault,
    Proxy,
    Request,
    mixed,
    refusal,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_folder import MemoryFolder, outcome
from recorded_metrics import Recorded

from pipeline import metrics
from pipeline.checkpoints.stores import BucketStore
from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files
from pipeline.input.shards import Shard, read_groups
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import STORE_ERRORS, Folder, ObjectFolder, open_folder
from pipeline.storage.parquet import parquet_bytes

pytestmark = pytest.mark.usefixtures("clock")
BUDGET = 6.0  # seconds
NAMES = {RESET: "reset", RESET_BODY: "reset in the request", LOST_ANSWER: "lost answer", RESET_ANSWER: "reset answer"}


def label(fault: str | bytes) -> str:
    return NAMES.get(fault, fault[:40]) if isinstance(fault, str) else fault.decode().split("Code>")[1][:-2]


def through(proxy: Proxy, seconds: float = BUDGET) -> StorageConfig:
    return StorageConfig(endpoint_url=proxy.url, retry_seconds=seconds)


def new_folder(storage: StorageConfig) -> Folder:
    return open_folder(f"s3://bucket/{uuid.uuid4().hex}", storage)


def first(fault: str | bytes, times: int = 3) -> object:
    """The fault on the first requests, which may be less than one call's."""
    return lambda request: fault if request.number < times else None


def every_other_read(fault: str | bytes) -> object:
    """The fault on each first try of several to read an object."""
    reads = itertools.count()

    def script(request: Request) -> Fault:
        is_read = request.method == "GET" and "list-type" not in request.target
        return fault if is_read and next(reads) % 2 == 0 else None

    return script


def begin(proxy: Proxy, script: object) -> None:
    proxy.requests.clear()
    proxy.script = script  # type: ignore[assignment]


DATA = np.random.default_rng(0).bytes(300_000)


def test_the_proxy_passes_on_a_body_in_chunks(proxy: Proxy) -> None:
    """As pyarrow's client sends a file, without its length."""
    folder = new_folder(through(proxy))
    place = urlsplit(f"{proxy.url}/{folder.url.removeprefix('s3://')}/a")
    client = http.client.HTTPConnection(place.hostname or "", place.port)
    client.request("PUT", place.path, iter([b"ab", b"c" * 100_000]), encode_chunked=True)
    assert client.getresponse().status == 200
    assert folder.read("a") == b"ab" + b"c" * 100_000


def test_retries_are_counted(proxy: Proxy) -> None:
    folder, recorded = new_folder(through(proxy)), Recorded()
    begin(proxy, first(SLOW_DOWN, 2))
    with metrics.installed(recorded):
        assert folder.create("a", b"x") and folder.read("a") == b"x"
    assert recorded.counters == {"store_retries": 2}


@pytest.mark.parametrize(
    "fault",
    [
        *PASSING,
        refusal(403, "RequestLimitExceeded"),
        refusal(403, "SlowDown"),
        refusal(400, "ThrottlingException"),
        refusal(403, "Throttling.User"),
        refusal(400, "TooManyRequestsException"),
    ],
    ids=label,
)
def test_temporary_faults_are_retried(proxy: Proxy, fault: str | bytes, s3: StorageConfig) -> None:
    folder = new_folder(through(proxy))
    direct = open_folder(folder.url, s3)
    for number in (1, 3):  # also where the answer is lost: it knows its own
        begin(proxy, first(fault, number))
        assert folder.create("a", DATA)
        begin(proxy, first(fault, number))
        assert not folder.create("a", DATA)
        if number == 1:
            direct.remove("a")
    begin(proxy, first(fault))
    assert folder.read("a") == DATA == direct.read("a")
    begin(proxy, first(fault))
    folder.replace("b/c", DATA[:1000])
    begin(proxy, first(fault))
    assert isinstance(folder, ObjectFolder) and folder.fs.info(f"{folder.path}/a")["size"] == len(DATA)  # a HEAD
    begin(proxy, first(fault))
    assert folder.names() == ["a"] and folder.names("b") == ["c"]
    assert direct.read("b/c") == DATA[:1000]
    begin(proxy, first(fault))
    folder.remove("a")
    begin(proxy, first(fault))
    folder.remove_all(["a", "b/c"])
    assert folder.names() == folder.names("b") == direct.names() == []


@pytest.mark.parametrize("fault", [TRUNCATED, RESET_ANSWER, SHORT, SLOW_DOWN], ids=label)
def test_inputs_are_read_completely(proxy: Proxy, fault: str | bytes, s3: StorageConfig) -> None:
    rows = pa.table({"text": [hashlib.sha256(str(row).encode()).hexdigest() for row in range(20_000)]})
    folder = new_folder(s3)
    folder.replace("x.parquet", parquet_bytes(rows, row_group_size=5000))

    begin(proxy, every_other_read(fault))
    listed = list_files([folder.url], through(proxy))
    (url,) = listed
    (table,) = read_groups([Shard(0, url, 0, 20_000)], ["text"], through(proxy))
    assert table.equals(rows) and proxy.done["GET", fault] >= 2


@pytest.mark.parametrize("fault", [TRUNCATED, RESET_ANSWER, SHORT], ids=label)
def test_checkpoints_are_downloaded_completely(
    proxy: Proxy, fault: str | bytes, s3: StorageConfig, tmp_path: Path
) -> None:
    folder = new_folder(s3)
    data = DATA * 60  # more than one ranged read
    folder.replace("model.bin", data)
    store = BucketStore(folder.url, through(proxy))
    files = store.files()
    begin(proxy, every_other_read(fault))
    fetched = store.download(files, tmp_path / "x") / "model.bin"
    assert fetched.read_bytes() == data and proxy.done["GET", fault] >= 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (EXPIRED, r"access refused \(ExpiredToken\): renew the credentials"),
        (DENIED, r"access refused: AccessDenied: Access Denied$"),
        (refusal(403, "InvalidAccessKeyId"), r"access refused \(InvalidAccessKeyId\): renew the credentials"),
        (refusal(403, "SignatureDoesNotMatch"), r"access refused \(SignatureDoesNotMatch\): renew the cred"),
        (refusal(403, "RequestTimeTooSkewed"), r"access refused \(RequestTimeTooSkewed\): set this machine's clock"),
    ],
    ids=lambda value: label(value) if isinstance(value, bytes) else "",
)
def test_refused_access_is_one_line_at_once(proxy: Proxy, answer: bytes, words: str) -> None:
    folder = new_folder(through(proxy))
    assert isinstance(folder, ObjectFolder)
    proxy.script = lambda request: answer
    operations = [
        lambda: folder.read("a"),
        lambda: folder.create("a", b"x"),
        lambda: folder.replace("a", b"x"),
        lambda: folder.remove("a"),
        lambda: folder.remove_all(["a"]),
        folder.names,
        lambda: folder.fs.info(folder.path),
        lambda: folder.fs.open(f"{folder.path}/a"),
    ]
    for operation in operations:
        proxy.requests.clear()
        with pytest.raises(PermissionError, match=words) as caught:
            operation()
        assert str(caught.value).startswith("s3://bucket") and "test" not in str(caught.value)
        assert len(proxy.requests) <= 3  # boto looks for the region after a HEAD of 400


@pytest.mark.parametrize("answer", [refusal(400, "MissingContentMD5"), refusal(501, "NotImplemented")], ids=label)
def test_a_store_that_cannot_remove_many_objects_at_once_removes_each(proxy: Proxy, answer: bytes) -> None:
    folder = new_folder(through(proxy))
    for name in ("a", "s/b", "c"):
        folder.replace(name, b"x")
    begin(proxy, lambda request: answer if request.method == "POST" else None)
    folder.remove_all(["a", "s/b", "s/gone"])
    assert folder.names() == ["c"] and folder.names("s") == []


def test_a_bucket_that_is_not_there_is_named(s3: StorageConfig) -> None:
    folder = open_folder("s3://no-such-bucket/out", s3)
    operations = (lambda: folder.read("a"), lambda: folder.create("a", b""), lambda: folder.remove("a"))
    for operation in (folder.names, *operations):
        with pytest.raises(OSError, match=r"^s3://no-such-bucket: no such bucket$"):
            operation()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "replace", "remove", "remove_all", "read", "names"]),
        st.sampled_from(["a", "b", "s/a"]),
        st.binary(max_size=3000),
    ),
    max_size=12,
)


@given(steps=STEPS, seed=st.integers(0, 2**32))
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_under_any_mix_of_faults_a_folder_is_a_dictionary(
    proxy: Proxy, s3: StorageConfig, steps: list[tuple[str, str, bytes]], seed: int
) -> None:
    """Each call does what it says, or raises and has done it or nothing."""
    folder = new_folder(through(proxy, 1.0))
    direct = open_folder(folder.url, s3)
    proxy.script = mixed(seed, 0.4)
    model = MemoryFolder()
    for step, name, data in steps:
        try:
            assert outcome(folder, step, name, data) == outcome(model, step, name, data)
        except STORE_ERRORS as error:
            if not isinstance(error, StoreFailed):
                raise
            left = [*direct.names(), *(f"s/{name}" for name in direct.names("s"))]
            model = MemoryFolder({f"root/{name}": direct.read(name) for name in left})
    proxy.script = lambda request: None
    assert all(outcome(direct, "read", name, b"") == outcome(model, "read", name, b"") for name in ("a", "b", "s/a"))
