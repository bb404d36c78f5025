"""Outputs that commit caefb62 wrote are read, continued or refused in one line: an upgrade loses nobody's work.

The folder caefb62 holds what that commit left in an S3 bucket, so that no path of the machine that wrote it is needed:
a finished job (its records in a segment), the same job stopped after two of four shards, and a scheduled job with two
runs over the folder inbox.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.job import StorageConfig

FIXTURES = Path(__file__).parent / "caefb62"
ROOT = "s3://bucket/upgrade"
Run = Callable[..., Any]


@pytest.fixture
def bucket(s3: StorageConfig) -> Any:
    """A client of the bucket, into which the fixtures have just been uploaded."""
    client = boto3.client("s3", endpoint_url=s3.endpoint_url)
    for path in FIXTURES.rglob("*"):
        if path.is_file() and "checkpoint" not in path.parts:
            key = f"upgrade/{path.relative_to(FIXTURES)}"
            client.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    yield client
    for entry in client.list_objects_v2(Bucket="bucket")["Contents"]:
        client.delete_object(Bucket="bucket", Key=entry["Key"])


@pytest.fixture
def command(bucket: Any, s3: StorageConfig, in_process: None, tmp_path: Path) -> Run:
    """Run `skipdecode run` with the job file of the fixtures, for one of their outputs."""
    job = tmp_path / "job.yaml"

    def run(output: str, *changes: str, **sections: Any) -> Any:
        values = {
            "input": {"path": f"{ROOT}/in", "id": "id"},
            "output": {"path": f"{ROOT}/{output}", "keep": ["area"]},
            "model": {"path": str(FIXTURES / "checkpoint"), "dtype": "float32"},
            "schedule": {"speedup": 2, "agreement_rows": 0},
            "sampling": {"max_new_tokens": 8, "temperature": 0.7, "seed": 3},
            "actors": {"threads": 1},
            "shard_rows": 3,
            "max_error_rate": 0.5,
            "storage": {"endpoint_url": s3.endpoint_url},
        }
        for name, section in sections.items():
            values[name] |= section
        job.write_text(yaml.safe_dump(values))
        return CliRunner().invoke(app, ["run", str(job), *changes])

    return run


def report(output: str, s3: StorageConfig, *options: str) -> Any:
    return CliRunner().invoke(app, ["report", f"{ROOT}/{output}", "--endpoint-url", str(s3.endpoint_url), *options])


def contents(bucket: Any, prefix: str) -> dict[str, bytes]:
    """Files below a folder of the bucket, by name."""
    entries = bucket.list_objects_v2(Bucket="bucket", Prefix=f"upgrade/{prefix}/").get("Contents", [])
    keys = [entry["Key"] for entry in entries]
    return {key.split("/", 2)[2]: bucket.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}


def rows(bucket: Any, output: str) -> list[dict[str, Any]]:
    parts = {name: data for name, data in contents(bucket, output).items() if name.endswith(".parquet")}
    return [
        row
        for name in sorted(parts)
        if not name.startswith("_")
        for row in pq.read_table(io.BytesIO(parts[name])).to_pylist()
    ]


@pytest.mark.parametrize("output", ["finished", "half", "nightly/2026-11-25T14-26-19Z"])
def test_an_earlier_output_is_reported_and_verified(output: str, bucket: Any, s3: StorageConfig) -> None:
    before = contents(bucket, output)
    shown = report(output, s3)
    assert shown.exit_code == 0 and "rows in" in shown.stdout, shown.output
    verified = report(output, s3, "--verify")
    assert verified.exit_code == 0, verified.output
    assert contents(bucket, output) == before


def test_an_earlier_finished_job_run_again_changes_nothing(command: Run, bucket: Any) -> None:
    before = contents(bucket, "finished")
    result = command("finished")
    assert result.exit_code == 0, result.output
    assert contents(bucket, "finished") == before


def test_an_earlier_half_done_job_is_finished(command: Run, bucket: Any) -> None:
    before, expected = contents(bucket, "half"), rows(bucket, "finished")
    result = command("half", "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert (outcome["fresh_rows"], outcome["rows"]) == (6, 12)
    after = contents(bucket, "half")
    assert all(after[name] == before[name] for name in ("part-000000.parquet", "part-000001.parquet"))
    found = rows(bucket, "half")
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    assert [row["generated_text"] for row in found] == [row["generated_text"] for row in expected]
    assert "_SUCCESS" in after


def test_a_job_that_goes_on_under_other_versions_says_so_in_one_line(
    command: Run, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = "upgrade/half/_job/runs.json"
    (run,) = json.loads(contents(bucket, "half")["_job/runs.json"])
    run["versions"] |= {"torch": "1.0", "ray": "2.0", "skipdecode": "0.0.1"}
    bucket.put_object(Bucket="bucket", Key=key, Body=json.dumps([run]).encode())
    assert command("half").exit_code == 0
    (line,) = [record.getMessage() for record in caplog.records if "other versions" in record.getMessage()]
    assert all(f"{name} -> " in line for name in ("torch 1.0", "ray 2.0", "skipdecode 0.0.1"))


def test_an_earlier_finished_job_whose_part_is_lost_answers_it_again(command: Run, bucket: Any) -> None:
    expected = rows(bucket, "finished")
    bucket.delete_object(Bucket="bucket", Key="upgrade/finished/part-000001.parquet")
    results = [command("finished", "--json") for _ in range(2)]
    outcome = json.loads(next(result for result in results if result.exit_code == 0).stdout)
    assert outcome["rows"] == 12
    assert [row["generated_text"] for row in rows(bucket, "finished")] == [row["generated_text"] for row in expected]


def test_another_job_over_an_earlier_output_is_refused_by_name(command: Run) -> None:
    result = command("half", sampling={"seed": 4})
    assert result.exit_code == 2 and "differs in sampling.seed" in result.stderr, result.output


def test_an_earlier_scheduled_job_goes_on(command: Run, bucket: Any, s3: StorageConfig) -> None:
    section = {"path": f"{ROOT}/inbox", "since": "last_success"}
    nothing = command("nightly", input=section)
    assert nothing.exit_code == 0 and "nothing new since run 2" in nothing.stdout, nothing.output
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": ["c-0"], "prompt": ["name[Aromi]"], "area": ["south"]}), sink)
    bucket.put_object(Bucket="bucket", Key="upgrade/inbox/c.parquet", Body=sink.getvalue())
    result = command("nightly", "--json", input=section)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["run"], run["rows"], run["state"]) == (3, 1, "success")
    shown = report("nightly", s3)
    assert shown.exit_code == 0 and "3 files and 8 rows answered in 3 runs" in shown.stdout, shown.output
