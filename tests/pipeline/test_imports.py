"""The README's picture of imports is current, and no packages import each other in a cycle."""

from __future__ import annotations

from import_picture import BETWEEN, README, cycles, package_imports, picture


def test_no_package_imports_itself_through_others() -> None:
    assert cycles(package_imports()) == 0


def test_the_readme_shows_the_imports_as_they_are() -> None:
    match = BETWEEN.search(README.read_text())
    assert match is not None
    assert match[0] == picture(package_imports()), "run .venv/bin/python tests/import_picture.py"


def test_a_cycle_is_counted() -> None:
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == 2
