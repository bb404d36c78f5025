"""Any text for a job file: the command runs it, or refuses it in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.job import JobConfig

FUZZ: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**400]),
    st.floats(),
    TEXT,
    st.dates(),
    st.sampled_from(
        ["\0", "s3://", "s3://b", "file://", "gs://x", "{{", "{% for", "x" * 5000, "*", "[", "..", "/", "~", "a@b"]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(SCALARS, below, max_size=3), max_leaves=6
)


def known_keys() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, field in JobConfig.model_fields.items():
        below = getattr(field.annotation, "model_fields", None)
        found += [(name,)] + [(name, one) for one in below or ()]
    return found


KEYS = st.sampled_from(known_keys())
NEAR = KEYS.flatmap(
    lambda key: st.tuples(st.just(key[:-1]), st.sampled_from([key[-1][:-1], f"{key[-1]}s", key[-1].upper()]))
)


@st.composite
def job_files(draw: st.DrawFn) -> str | bytes:
    """Text of a job file: a good one with a few values changed, or something else altogether."""
    way = draw(st.integers(0, 9))
    if way == 0:
        return draw(TEXT)
    if way == 1:
        return draw(st.binary(max_size=40))
    if way == 2:
        return yaml.safe_dump(draw(VALUES), allow_unicode=draw(st.booleans()))
    values: dict[str, Any] = {"input": {"path": "IN"}, "output": {"path": "OUT"}, "model": {"path": "MODEL"}}
    for _ in range(draw(st.integers(1, 2))):
        key = draw(KEYS)
        if draw(st.integers(0, 3)) == 0:
            above, name = draw(NEAR)
            key = (*above, name)
        if key in (("output",), ("output", "path")):
            continue  # somebody's folder
        node = values
        for name in key[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        else:
            node[key[-1]] = draw(VALUES)
    return str(yaml.safe_dump(values))


@settings(max_examples=100, **FUZZ)
@given(text=job_files())
@example(text=f"? {'x' * 5000}\n: 1\n")
def test_the_command_refuses_it_in_one_line_and_exits_2(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz-command"
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "in.parquet")  # no rows: it ends at plan
    path = folder / "job.yaml"
    if isinstance(text, str):
        for name, place in (("IN", folder / "in.parquet"), ("OUT", folder / "out"), ("MODEL", checkpoint)):
            text = text.replace(f"path: {name}\n", f"path: {place}\n")
        text = text.encode()
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "empty")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setattr("ray.init", lambda *_, **__: pytest.fail("too late"))
        result = CliRunner().invoke(app, ["run", str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), result.output
    assert len([line for line in result.stderr.splitlines() if line.startswith("skipdecode: ")]) == 1, result.stderr
    assert len(result.stderr) < 2000
    assert "Traceback" not in result.output
    assert not (folder / "out").exists()
