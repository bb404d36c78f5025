"""The IAM policies: every S3 call that a job makes is allowed, and nothing beyond them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import boto3
import bucket_server
import pyarrow as pa
import pytest
import s3fs
from infra_files import INFRA

from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.shards import cut_shards, read_groups
from pipeline.storage.folder import make_writable, open_folder
from pipeline.storage.parquet import parquet_bytes

BUCKET = "example-bucket"
NEEDS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
}


def policy(name: str) -> list[dict[str, Any]]:
    """The statements, each value a list."""
    statements: list[dict[str, Any]] = json.loads((INFRA / name).read_text())["Statement"]
    for one in statements:
        for key in ("Action", "Resource"):
            one[key] = one[key] if isinstance(one[key], list) else [one[key]]
    return statements


def allowed(action: str, key: str) -> bool:
    """Whether iam-policy.json allows an action on a key, or for ListBucket on a prefix, of the bucket."""
    arn = f"arn:aws:s3:::{BUCKET}" + ("" if action == "s3:ListBucket" else f"/{key}")
    for one in policy("iam-policy.json"):
        prefixes = one.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
        fits = any(fnmatchcase(arn, pattern) for pattern in one["Resource"])
        listed = action != "s3:ListBucket" or any(fnmatchcase(key, pattern) for pattern in prefixes)
        if action in one["Action"] and fits and listed:
            return True
    return False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Calls on a bucket with one input file: the API's name and its key or prefix."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made: list[tuple[str, str]] = []
    send = s3fs.S3FileSystem._call_s3

    async def recorded(self: Any, method: str, *arguments: Any, **given: Any) -> Any:
        merged = {key: value for one in arguments if isinstance(one, dict) for key, value in one.items()} | given
        assert merged["Bucket"] == BUCKET
        made.append((method, merged.get("Key", merged.get("Prefix", ""))))
        return await send(self, method, *arguments, **given)

    with bucket_server.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        data = parquet_bytes(pa.table({"prompt": ["a", "b"]}))
        client.put_object(Bucket=BUCKET, Key="prompts/in.parquet", Body=data)
        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", recorded)
        s3fs.S3FileSystem.clear_instance_cache()
        yield made
        s3fs.S3FileSystem.clear_instance_cache()


def test_every_call_of_a_job_is_allowed(calls: list[tuple[str, str]]) -> None:
    storage = StorageConfig()
    for given in ("s3://example-bucket/prompts/", "s3://example-bucket/prompts/*.parquet"):
        ((url, (size, version)),) = list_files([given], storage).items()
    file, _ = read_footer(url, size, version, storage)
    assert sum(table.num_rows for table in read_groups(cut_shards([file], 1, 2**20), ["prompt"], storage)) == 2
    folder = open_folder("s3://example-bucket/answers/run-1", storage)
    assert folder.names() == []
    make_writable(folder)
    assert folder.create("part-000000.parquet", b"x" * 2**21)
    folder.replace("_job/lease/000001.json", b"{}")
    assert folder.read("_job/lease/000001.json") == b"{}"
    folder.remove("_job/lease/000001.json")
    assert folder.names() == ["part-000000.parquet"]
    assert {name for name, _ in calls} <= set(NEEDS)
    refused = sorted({(name, key) for name, key in calls if not allowed(NEEDS[name], key)})
    assert refused == []
    # nothing in the policy but what is used, and the clearing up after a put that was cut off
    used = {NEEDS[name] for name, _ in calls} | {"s3:AbortMultipartUpload"}
    assert {action for one in policy("iam-policy.json") for action in one["Action"]} == used


@pytest.mark.parametrize(
    ("action", "key"),
    [
        ("s3:PutObject", "prompts/in.parquet"),
        ("s3:DeleteObject", "checkpoints/model/model.safetensors"),
        ("s3:GetObject", "other/secret"),
        ("s3:ListBucket", ""),
        ("s3:ListBucket", "other/"),
        ("s3:DeleteBucket", ""),
    ],
)
def test_what_a_job_has_no_need_of_is_refused(action: str, key: str) -> None:
    assert not allowed(action, key)


@pytest.mark.parametrize("name", ["iam-policy.json", "iam-launcher-policy.json"])
def test_policies_name_actions_and_resources(name: str) -> None:
    assert json.loads((INFRA / name).read_text())["Version"] == "2012-10-17"
    for one in policy(name):
        assert set(one) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert one["Effect"] == "Allow"
        assert all(re.fullmatch(r"(s3|ec2|iam):[A-Z]\w+", action) for action in one["Action"])
        if "*" in one["Resource"]:  # EC2 has no narrower resource for these
            assert all(action.startswith("ec2:Describe") for action in one["Action"])
        for action in one["Action"]:
            if action in ("ec2:CreateTags", "ec2:TerminateInstances", "iam:PassRole"):
                assert one["Condition"], action
