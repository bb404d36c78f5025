"""The project's weight: lines, keys and files a folder. A change that raises a ceiling says why in its commit."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = {".py", ".cpp", ".h", ".html", ".css"}
FILES_A_FOLDER = 12


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in PRODUCT]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize(
    ("folders", "ceiling"),
    [
        (("pipeline", "actors"), 28_931),
        (("actors/vllm",), 1_868),
        (("tests",), 35_846),
    ],
)
def test_lines(folders: tuple[str, ...], ceiling: int) -> None:
    assert lines(files(*folders)) <= ceiling


def test_keys() -> None:
    text = (ROOT / "configs" / "README.md").read_text()
    keys = [
        line for table in re.findall(r"<!-- keys -->(.*?)<!-- /keys -->", text, re.S) for line in table.splitlines()
    ]
    assert 100 < sum(line.startswith("| `") for line in keys) <= 129


def test_files_a_folder() -> None:
    modules = Counter(path.parent for path in files("pipeline", "actors"))
    assert {str(folder): count for folder, count in modules.items() if count > FILES_A_FOLDER} == {}
