"""Files and batches by OpenAI's own client; the jobs run in processes of their own, without Ray."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest
from http_server import Running, running
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.errors import UserError
from pipeline.config.load import validated
from pipeline.config.serve import ServeConfig
from pipeline.serving.batches import ENDED, BatchRunner, check_lines
from pipeline.serving.files_api import create_files_app
from pipeline.serving.plan import batch_job
from pipeline.serving.store import Store

ENDPOINT: Any = "/v1/chat/completions"
_CLIENT = httpx2.Client(timeout=60)


def lines(count: int, url: str = ENDPOINT, **body: Any) -> bytes:
    content = {"messages": [{"role": "user", "content": "name[Zizzi]"}], "max_tokens": 6, **body}
    return b"".join(
        json.dumps({"custom_id": f"r{row}", "method": "POST", "url": url, "body": content}).encode() + b"\n"
        for row in range(count)
    )


def runner_of(checkpoint: Path, folder: Path, command: tuple[str, ...], **environment: str) -> BatchRunner:
    values = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "batches": {"folder": str(folder)},
        "sampling": {"temperature": 0.0},
    }
    config = validated(ServeConfig, values, "serve")
    job = partial(batch_job, config)

    def in_shards(requests: str, output: str) -> Any:
        return job(requests, output).model_copy(update={"shard_rows": 2})

    return BatchRunner(Store(folder), in_shards, 1, {"OMP_NUM_THREADS": "1", **environment}, (*command, "run"))


@pytest.fixture(scope="module")
def server(
    chat_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, forked: tuple[str, ...]
) -> Iterator[Running]:
    runner = runner_of(chat_checkpoint, tmp_path_factory.mktemp("batches") / "new", forked)
    with running(chat_checkpoint, batches=create_files_app(runner, 20_000)) as server:
        yield server
    runner.close()


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wait(client: openai.OpenAI, key: str, *until: str) -> Any:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(key)).status not in until:
        assert time.monotonic() < deadline and batch.status != "failed", batch
        time.sleep(0.1)
    return batch


def test_a_batch_is_uploaded_polled_and_downloaded(client: openai.OpenAI) -> None:
    requests = lines(5) + lines(1, temperature=-1).replace(b'"r0"', b'"wrong"')
    file = client.files.create(file=("mine.jsonl", requests), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(requests), "mine.jsonl", "batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"by": "test"}
    )
    batch = wait(client, batch.id, "completed")
    assert batch.request_counts is not None and batch.metadata == {"by": "test"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
    answers = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"r{row}" for row in range(5)]
    direct = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "name[Zizzi]"}], max_tokens=6, temperature=0
    )
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    (error,) = [json.loads(line) for line in client.files.content(str(batch.error_file_id)).text.splitlines()]
    assert error["custom_id"] == "wrong" and error["response"]["status_code"] == 400
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert file.id in [one.id for one in client.files.list(limit=2)]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_file_that_no_batch_may_have_fails_with_its_lines(client: openai.OpenAI) -> None:
    requests = lines(1) + b"[1]\n" + lines(1) + lines(1, url="/v1/embeddings").replace(b'"r0"', b'"r9"')
    file = client.files.create(file=("mine.jsonl", requests), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    until = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch.id)).status != "failed":
        assert time.monotonic() < until
        time.sleep(0.05)
    assert batch.errors is not None and batch.errors.data is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
    ]


def test_refusals(server: Running, client: openai.OpenAI) -> None:
    def said(error: openai.APIStatusError) -> str:
        return f"{error.status_code} {error.body['message']}"  # type: ignore[index]

    with pytest.raises(openai.BadRequestError) as wrong:
        client.files.create(file=io.BytesIO(b"{}"), purpose="fine-tune")
    assert "must be 'batch'" in said(wrong.value)
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=io.BytesIO(b"x" * 30_000), purpose="batch")
    assert said(large.value) == "413 the file is larger than 20000 bytes"
    with pytest.raises(openai.NotFoundError) as gone:
        client.batches.create(input_file_id="file-nothing", endpoint=ENDPOINT, completion_window="24h")
    assert "there is no 'file-nothing'" in said(gone.value)
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id="x", endpoint="/v1/embeddings", completion_window="24h")
    for path in ("files/../../etc/passwd", "files/file-1/content", "batches/batch-2", "batches?limit=many"):
        assert httpx2.get(f"{server.url}/v1/{path}").status_code in (400, 404)
    assert httpx2.post(f"{server.url}/v1/files", content=b"x").status_code == 400
    assert httpx2.put(f"{server.url}/v1/files").status_code == 405


KEYS = st.one_of(
    st.sampled_from(["file-" + "0" * 24, "batch-" + "a" * 24, "..", "%00", "%2e%2e%2fetc", "file-", "é", "cancel"]),
    st.text(st.characters(codec="utf-8", exclude_characters="/?#\\"), min_size=1, max_size=12).map(quote),
)
PATHS = st.one_of(
    st.sampled_from(["files", "batches", "files/", "batches//cancel"]),
    st.builds(
        "{}/{}{}".format, st.sampled_from(["files", "batches"]), KEYS, st.sampled_from(["", "/content", "/cancel"])
    ),
)
QUERIES = st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose"]), st.text(max_size=6), max_size=2)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from([ENDPOINT])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=5,
)
NAMES = st.sampled_from(["input_file_id", "endpoint", "completion_window", "metadata", "other"])
BODIES = st.one_of(
    st.binary(max_size=40),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(NAMES, VALUES).map(lambda value: json.dumps({"endpoint": ENDPOINT, **value}).encode()),
    st.builds(
        b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n--b%b'.__mod__,
        st.tuples(
            st.sampled_from([b"file", b"purpose", b"", b"\xff"]),
            st.sampled_from([b"", b'; filename="x"', b'; filename="../\xff\x00"', b"; filename"]),
            st.binary(max_size=20),
            st.sampled_from([b"--\r\n", b"", b"\r\n", b"-"]),
        ),
    ),
)
KINDS = st.sampled_from(["application/json", "multipart/form-data; boundary=b", "multipart/form-data", "text/\xe9", ""])


@settings(max_examples=150)
@given(st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]), PATHS, QUERIES, BODIES, KINDS)
def test_nothing_gives_a_500(
    server: Running, method: str, path: str, query: dict[str, str], body: bytes, kind: str
) -> None:
    headers = {"Content-Type": kind.encode("latin-1")}
    reply = _CLIENT.request(method, f"{server.url}/v1/{path}", params=query, content=body, headers=headers)
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400 and method != "HEAD":
        assert reply.json()["error"]["message"]


def test_a_stopped_servers_batch_is_finished_by_the_next_one(
    chat_checkpoint: Path, tmp_path: Path, forked: tuple[str, ...]
) -> None:
    first = runner_of(chat_checkpoint, tmp_path / "store", forked, SLOW_COMMITS="0.6")
    keys = []
    for _ in range(2):
        source = tmp_path / "requests.jsonl"
        source.write_bytes(lines(8))
        file = first.store.add_file(source, "requests.jsonl", "batch")
        keys.append(first.create(file["id"], ENDPOINT, "24h", None)["id"])
        first.store.remove_file(file["id"])  # a batch has its own
    assert first.cancel(keys[1])["status"] == "cancelled"  # type: ignore[index]
    parts = first.store.batch_folder(keys[0]) / "answers"
    _until(lambda: len(list(parts.glob("part-*.parquet"))) >= 1)
    before = {path.name: path.read_bytes() for path in parts.glob("part-*.parquet")}
    first.close()
    assert first.store.batch(keys[0])["status"] == "in_progress"  # type: ignore[index]
    second = runner_of(chat_checkpoint, tmp_path / "store", forked)
    _until(lambda: second.store.batch(keys[0])["status"] == "completed")  # type: ignore[index]
    assert {name: (parts / name).read_bytes() for name in before} == before
    record = second.store.batch(keys[0])
    assert record is not None and record["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    second.close()


@pytest.mark.slow
def test_a_running_batch_is_cancelled(chat_checkpoint: Path, tmp_path: Path, forked: tuple[str, ...]) -> None:
    runner = runner_of(chat_checkpoint, tmp_path / "store", forked, SLOW_COMMITS="1")
    source = tmp_path / "requests.jsonl"
    source.write_bytes(lines(8))
    file = runner.store.add_file(source, "requests.jsonl", "batch")
    key = runner.create(file["id"], ENDPOINT, "24h", None)["id"]
    _until(lambda: list((runner.store.batch_folder(key) / "answers").glob("part-*.parquet")))
    assert runner.cancel(key)["status"] == "cancelling"  # type: ignore[index]
    _until(lambda: runner.store.batch(key)["status"] == "cancelled")  # type: ignore[index]
    runner.close()


# stand-ins for the job, which say how often they were started
IMPORTING = "import time; time.sleep(100)"  # no handler of signals yet
HELD = "import sys; sys.exit(5)"
HELD_ONCE = """
import json, sys
if open("STARTS").read() == "x":
    sys.exit(5)
print(json.dumps({"errors": 0}))
"""


def begun(folder: Path, job: str) -> tuple[BatchRunner, str, Path]:
    """A runner whose only batch was started once at least, its key, and the file with a letter for each start."""
    starts, script = folder / "starts", folder / "job.py"
    script.write_text(f"open({str(starts)!r}, 'a').write('x')\n" + job.replace("STARTS", str(starts)))
    runner = runner_of(folder / "checkpoint", folder / "store", (sys.executable, "-S", str(script)))
    source = folder / "requests.jsonl"
    source.write_bytes(lines(2))
    file = runner.store.add_file(source, "requests.jsonl", "batch")
    key = runner.create(file["id"], ENDPOINT, "24h", None)["id"]
    _until(lambda: starts.exists() and starts.read_text())
    return runner, key, starts


def status_of(runner: BatchRunner, key: str) -> Any:
    return runner.store.batch(key)["status"]  # type: ignore[index]


def test_a_batch_whose_job_handles_no_signals_yet_is_cancelled(tmp_path: Path) -> None:
    runner, key, _ = begun(tmp_path, IMPORTING)
    runner.cancel(key)
    _until(lambda: status_of(runner, key) in ENDED)
    assert status_of(runner, key) == "cancelled"
    runner.close()


def test_a_server_stopped_before_a_job_handles_signals_leaves_its_batch_to_the_next_one(tmp_path: Path) -> None:
    runner, key, _ = begun(tmp_path, IMPORTING)
    runner.close()
    assert status_of(runner, key) == "in_progress"


def test_a_batch_whose_job_outlived_its_server_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.batches.HELD_SECONDS", 0.05)
    runner, key, starts = begun(tmp_path, HELD_ONCE)
    _until(lambda: status_of(runner, key) in ENDED)
    assert status_of(runner, key) == "completed" and starts.read_text() == "xx"
    runner.close()


@pytest.mark.parametrize(("stop", "status"), [("cancel", "cancelled"), ("close", "in_progress")])
def test_a_batch_that_waits_for_a_job_is_stopped_at_once(tmp_path: Path, stop: str, status: str) -> None:
    runner, key, _ = begun(tmp_path, HELD)
    _until(lambda: not runner._running)
    began = time.monotonic()
    if stop == "cancel":
        runner.cancel(key)
        _until(lambda: status_of(runner, key) in ENDED)
    runner.close()
    assert status_of(runner, key) == status and time.monotonic() - began < 10


def _until(reached: Any) -> None:
    deadline = time.monotonic() + 100
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="holds other files"):
        Store(tmp_path)


def test_lines_are_counted_and_at_most_ten_errors_listed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1\n" * 20)
    assert (check_lines(file, ENDPOINT)[0], len(check_lines(file, ENDPOINT)[1])) == (20, 10)
    file.write_bytes(b"\n")
    assert check_lines(file, ENDPOINT)[1][0]["code"] == "empty_file"
