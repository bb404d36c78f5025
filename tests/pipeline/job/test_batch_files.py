"""Whole jobs over OpenAI batch files."""

from __future__ import annotations

import gzip
import hashlib
import json
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from in_process import answered_rows, job_values, run_in_process
from input_files import write_values
from memory_folder import Killed
from openai.types import Completion
from openai.types.chat import ChatCompletion

from actors.engine.errors import UserError
from actors.openai_requests import CHAT, TEXT
from pipeline import job as jobs
from pipeline.answer.stats import Totals
from pipeline.commit.results import RECORD, recorded, result_problems
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.storage.folder import LocalFolder, open_folder


def request(number: int, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": {"model": "any", **body}}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REQUESTS = [
    request(0, CHAT, messages=chat("alpha"), max_tokens=3),
    request(1, TEXT, prompt="alpha bravo", max_tokens=4, top_k=-1, best_of=1, priority=0, service_tier="auto"),
    request(2, CHAT, messages=chat("bravo"), max_completion_tokens=2, logprobs=True, top_logprobs=2),
    request(3, TEXT, prompt="cheap", max_tokens=3, n=2, temperature=1.0, seed=7),
    request(4, CHAT, messages=chat("alpha"), max_token=3),
    request(5, TEXT, prompt="alpha " * 200),
    request(6, TEXT, prompt="pub", max_tokens=2, logprobs=1),
    request(7, CHAT, messages=chat("cheap pub"), max_tokens=5, stop=["e"]),
]
ERRORS = {
    4: "body: max_token is not supported; did you mean max_tokens?",
    5: "prompt of 1003 tokens leaves no room in a context of 64",
}


def config(path: Path, output: Path, checkpoint: Path, **changes: Any) -> JobConfig:
    values = job_values(path, output, checkpoint, shard_rows=3, actors={"max_batch": 8})
    return JobConfig.model_validate({**values, "input": {"path": str(path), "format": "openai_batch"}, **changes})


def test_each_request_is_answered_by_its_own_parameters(tmp_path: Path, chat_checkpoint: Path) -> None:
    """A chat and a text have the answers that a messages and a prompt column have."""
    write_values(tmp_path / "in.jsonl", REQUESTS)
    job = config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint)
    totals = run_in_process(job).totals
    assert (totals.rows, totals.answers, totals.errors) == (8, 9, 2)
    rows = answered_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"request-{number}" for number in (0, 1, 2, 3, 3, 4, 5, 6, 7)]
    assert {row["id"]: row["error"] for row in rows if row["error"]} == {
        f"request-{number}": error for number, error in ERRORS.items()
    }
    by_id = {(row["id"], row["sample_index"]): row for row in rows}
    assert by_id["request-1", 0]["generated_tokens"] == 4
    assert by_id["request-2", 0]["generated_tokens"] == len(by_id["request-2", 0]["logprobs"]) == 2
    assert len(by_id["request-2", 0]["logprobs"][0]["top"]) == 2
    assert by_id["request-0", 0]["logprobs"] is None
    for number, columns, body in (
        (0, {"messages": "m"}, {"m": chat("alpha"), "k": 3}),
        (1, {"prompt": "p"}, {"p": "alpha bravo", "k": 4}),
    ):
        write_values(tmp_path / "one.jsonl", [body])
        source = {"path": str(tmp_path / "one.jsonl"), "sampling": {"max_new_tokens": "k"}, **columns}
        output = tmp_path / f"one-{number}"
        run_in_process(config(tmp_path, output, chat_checkpoint, input=source))
        (alone,) = answered_rows(output)
        assert alone["generated_text"] == by_id[f"request-{number}", 0]["generated_text"]


def test_an_answer_has_the_form_that_its_request_asks_for(tmp_path: Path, chat_checkpoint: Path) -> None:
    """A cut-off answer is a result, as OpenAI's are, with the reason length; the part names it an error."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    other = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}
    ask = [
        request(0, CHAT, messages=chat("alpha"), max_tokens=30, response_format=form),
        request(1, CHAT, messages=chat("alpha"), max_tokens=2, response_format=form),
        request(2, CHAT, messages=chat("alpha"), response_format=other),
    ]
    write_values(tmp_path / "in.jsonl", ask)
    run_in_process(config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint))
    whole, cut = (line["response"]["body"]["choices"][0] for line in lines(tmp_path / "out" / "results.jsonl"))
    assert json.loads(whole["message"]["content"]) in ({"a": True}, {"a": False})
    assert cut["finish_reason"] == "length" and cut["message"]["content"]
    (error,) = lines(tmp_path / "out" / "errors.jsonl")
    assert error["custom_id"] == "request-2"
    assert error["response"]["body"]["error"]["message"].startswith("json_schema: ")


def test_a_custom_id_that_two_rows_share_is_refused(tmp_path: Path, chat_checkpoint: Path) -> None:
    """Ids are compared as values of their rows, not as JSON spells them; a row without one shares none, nor does
    a broken line with that of another file."""
    (tmp_path / "in").mkdir()
    write_values(tmp_path / "in" / "a.jsonl", REQUESTS[:3])
    damaged = '{"custom_id": "request-0"\n' * 2 + '{"body": {"custom_id": "request-0"}}\n'
    (tmp_path / "in" / "a.jsonl").write_text("{\n" + (tmp_path / "in" / "a.jsonl").read_text())
    spelled = json.dumps(REQUESTS[1]).replace("request-1", "request\\u002d1")
    (tmp_path / "in" / "b.jsonl").write_text(f"{damaged}{spelled}\n")
    job = config(tmp_path / "in", tmp_path / "out", chat_checkpoint)
    with pytest.raises(UserError) as refused:
        run_in_process(job)
    where = f"row 2 of {tmp_path}/in/a.jsonl and row 3 of {tmp_path}/in/b.jsonl"
    assert str(refused.value) == f"custom_id 'request-1' occurs twice: {where}; make it unique"
    assert not (tmp_path / "out").exists()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_results_and_errors_are_those_of_the_parts(tmp_path: Path, chat_checkpoint: Path) -> None:
    write_values(tmp_path / "in.jsonl", REQUESTS)
    run_in_process(config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint))
    rows = answered_rows(tmp_path / "out")
    results, errors = (lines(tmp_path / "out" / f"{name}.jsonl") for name in ("results", "errors"))
    assert [line["custom_id"] for line in results] == [f"request-{number}" for number in (0, 1, 2, 3, 6, 7)]
    assert {line["custom_id"]: line["response"]["body"]["error"]["message"] for line in errors} == {
        f"request-{number}": error for number, error in ERRORS.items()
    }
    assert {line["response"]["status_code"] for line in errors} == {400}
    for line in results:
        # the client's own types, every field checked
        kind = Completion if line["response"]["body"]["id"][:5] == "cmpl-" else ChatCompletion
        kind.model_validate(line["response"]["body"], strict=True)
        own = [row for row in rows if row["id"] == line["custom_id"]]
        body = line["response"]["body"]
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body["choices"]]
        assert texts == [row["generated_text"] for row in own]
        assert [choice["finish_reason"] for choice in body["choices"]] == [row["finish_reason"] for row in own]
        assert body["usage"]["prompt_tokens"] == own[0]["prompt_tokens"]
        assert body["usage"]["completion_tokens"] == sum(row["generated_tokens"] for row in own)
    by_id = {line["custom_id"]: line["response"]["body"]["choices"] for line in results}
    assert len(by_id["request-3"]) == 2
    content = by_id["request-2"][0]["logprobs"]["content"]
    assert len(content) == 2 and [len(token["top_logprobs"]) for token in content] == [2, 2]
    assert by_id["request-0"][0]["logprobs"] is None and len(by_id["request-6"][0]["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_a_job_killed_at_any_write_of_its_end_finishes_with_the_same_bytes(
    tmp_path: Path, chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed before the `at`-th file after the last part; then run again. Planned at the same second."""
    monkeypatch.setattr("pipeline.plan.manifest.time.time", lambda: 1_700_000_000.0)
    write_values(tmp_path / "in.jsonl", REQUESTS[:3] + REQUESTS[4:5])
    run_in_process(config(tmp_path / "in.jsonl", tmp_path / "whole", chat_checkpoint))
    job = config(tmp_path / "in.jsonl", tmp_path / "killed", chat_checkpoint)
    finalize, write, writes = jobs.finalize, LocalFolder._write, count(1)

    def dies(*arguments: Any) -> Path:
        if next(writes) == at:  # only once: a lease that is not given back is watched for a minute
            raise Killed
        return write(*arguments)

    def from_here_on(*arguments: Any) -> Totals:
        monkeypatch.setattr(LocalFolder, "_write", dies)
        return finalize(*arguments)

    monkeypatch.setattr(jobs, "finalize", from_here_on)
    with suppress(Killed):
        run_in_process(job)
        pytest.fail("it was not killed")
    monkeypatch.undo()
    assert not (tmp_path / "killed" / "_SUCCESS").exists()
    run_in_process(job)
    whole, killed = files(tmp_path / "whole"), files(tmp_path / "killed")
    assert killed.keys() == whole.keys() >= {"results.jsonl", "errors.jsonl", "_SUCCESS"}
    assert all(killed[name] == whole[name] for name in whole if name != "_SUCCESS")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("*")}
    run_in_process(job)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("*")}


def test_a_users_file_is_never_replaced(tmp_path: Path, chat_checkpoint: Path) -> None:
    write_values(tmp_path / "in.jsonl", REQUESTS[:3])
    job = config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text("mine")
    for _ in range(2):
        with pytest.raises(UserError, match=r"results\.jsonl: not written by this job; move it away and run again"):
            run_in_process(job)
    assert (tmp_path / "out" / "results.jsonl").read_text() == "mine"
    (tmp_path / "out" / "results.jsonl").rename(tmp_path / "mine")
    run_in_process(job)
    made = (tmp_path / "out" / "results.jsonl").read_bytes()
    (tmp_path / "out" / "results.jsonl").unlink()
    assert run_in_process(job).fresh_rows == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == made
    other = config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint, sampling={"max_new_tokens": 5})
    run_in_process(other, overwrite=True)
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 3


def test_any_job_writes_its_answers_as_json_lines(tmp_path: Path, checkpoint: Path) -> None:
    """Asked for later, they are written without an answer made anew."""
    write_values(tmp_path / "in.jsonl", [{"prompt": "alpha", "n": [1, {"a": None}]}, {"prompt": None}])
    source = {"path": str(tmp_path / "in.jsonl")}
    run_in_process(config(tmp_path, tmp_path / "out", checkpoint, input=source))
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    asked = {"path": str(tmp_path / "out"), "format": "jsonl"}
    job = config(tmp_path, tmp_path, checkpoint, input=source)
    job = JobConfig.model_validate({**job.model_dump(exclude_unset=True), "output": asked})
    assert run_in_process(job).fresh_rows == 0
    assert lines(tmp_path / "out" / "answers.jsonl") == answered_rows(tmp_path / "out")
    with pytest.raises(ValueError, match=r"set input\.format: openai_batch"):
        JobConfig.model_validate({**job.model_dump(exclude_unset=True), "output": {**asked, "format": "openai_batch"}})


def test_results_in_a_bucket(tmp_path: Path, chat_checkpoint: Path, s3: StorageConfig) -> None:
    folder = open_folder("s3://bucket/batch", s3)
    folder.create("in/a.jsonl.gz", gzip.compress("".join(json.dumps(one) + "\n" for one in REQUESTS).encode()))
    values = config(tmp_path, tmp_path, chat_checkpoint).model_dump(exclude_unset=True)
    values |= {
        "input": {"path": "s3://bucket/batch/in", "format": "openai_batch"},
        "output": {"path": "s3://bucket/batch/out"},
        "storage": s3.model_dump(exclude_unset=True),
    }
    run_in_process(JobConfig.model_validate(values))
    out = open_folder("s3://bucket/batch/out", s3)
    assert (out.read("results.jsonl").count(b"\n"), out.read("errors.jsonl").count(b"\n")) == (6, 2)
    assert list(result_problems(out)) == []
    out.remove("errors.jsonl")
    (problem,) = result_problems(out)
    assert problem == "s3://bucket/batch/out/errors.jsonl: was written and is gone; run the job again to write it"
    run_in_process(JobConfig.model_validate(values))
    assert list(result_problems(out)) == []


def test_a_glob_that_would_match_the_results_is_refused(tmp_path: Path, chat_checkpoint: Path) -> None:
    write_values(tmp_path / "in.jsonl", REQUESTS[:1])
    (tmp_path / "out").mkdir()
    for glob, output in (("out/*.jsonl", "out"), ("*.jsonl", ".")):
        values = config(tmp_path, tmp_path / output, chat_checkpoint).model_dump(exclude_unset=True)
        values["input"] = {"path": str(tmp_path / glob), "format": "openai_batch"}
        with pytest.raises(UserError, match="matches files in"):
            run_in_process(JobConfig.model_validate(values))


def test_results_of_parts_that_were_answered_again_replace_the_former(tmp_path: Path, chat_checkpoint: Path) -> None:
    """The record knows the former files; one of them is needed no more."""
    write_values(tmp_path / "in.jsonl", REQUESTS)
    job = config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint)
    run_in_process(job)
    out = tmp_path / "out"
    made = (out / "results.jsonl").read_bytes()
    for name in ("results.jsonl", "results-0001.jsonl"):
        (out / name).write_bytes(b"former\n")
    (out / "errors.jsonl").unlink()
    former = hashlib.sha256(b"former\n").hexdigest()
    record = dict.fromkeys(("results.jsonl", "results-0001.jsonl", "errors.jsonl"), former)
    (out / RECORD).write_text(json.dumps(record))
    run_in_process(job)
    assert (out / "results.jsonl").read_bytes() == made and not (out / "results-0001.jsonl").exists()
    assert recorded(open_folder(str(out), StorageConfig())).keys() == {"results.jsonl", "errors.jsonl"}
