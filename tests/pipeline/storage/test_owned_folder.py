"""Only files that a folder's own record lists are replaced or removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.storage.owned_folder import OwnedFolder, check_apart


def owned(path: Path) -> OwnedFolder:
    return OwnedFolder(path, "made.json", "output")


def test_a_folder_with_files_and_no_record_is_refused(tmp_path: Path) -> None:
    folder = owned(tmp_path / "out")
    folder.check(["a"])  # it does not exist
    folder.path.mkdir()
    folder.check(["a"])  # it is empty
    (folder.path / "user.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"output: .*out holds 'user.txt' and no made.json of an earlier run; choose"):
        folder.claim(["a"])
    assert [path.name for path in folder.path.iterdir()] == ["user.txt"]


def test_only_listed_files_are_replaced_or_removed(tmp_path: Path) -> None:
    folder = owned(tmp_path / "out")
    folder.claim(["a", "b"])
    for name in ("a", "b", "c", "d"):
        (folder.path / name).write_text("x")
    with pytest.raises(ValueError, match=r"output: .*out/c exists and made.json does not list it; move it"):
        folder.claim(["a", "c"])
    folder.discard(["a", "c"])
    assert sorted(path.name for path in folder.path.iterdir()) == ["b", "c", "d", "made.json"]
    folder.save({"loss": 1.0})
    assert (folder.values()["loss"], folder.files()) == (1.0, {"b"})
    folder.discard(["a", "b", "c", "d"])
    assert sorted(path.name for path in folder.path.iterdir()) == ["c", "d", "made.json"]


@pytest.mark.parametrize(("below", "why"), [("", "File exists"), ("out", "Not a directory")])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, below: str, why: str) -> None:
    (tmp_path / "file").touch()
    folder = owned(tmp_path / "file" / below)
    assert folder.values() == {}
    with pytest.raises(ValueError, match=rf"^output: {folder.path}: cannot be made: {why}$"):
        folder.claim(["a"])


def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=r"^output: .*out: not writable$"):
        owned(tmp_path / "out").claim(["a"])


def test_a_claim_keeps_values_and_names(tmp_path: Path) -> None:
    folder = owned(tmp_path / "out")
    folder.claim(["a"])
    folder.save({"loss": 1.0})
    folder.claim(["b"])
    assert folder.values() == {"loss": 1.0, "files": ["a", "b"]}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 1}', '{"files": ["../a"]}'])
def test_a_record_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "made.json").write_text(text)
    with pytest.raises(ValueError, match=r"made.json is not a record of this version .*; remove the folder, or choose"):
        owned(tmp_path).check(["a"])


def test_paths_are_compared_after_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "in.parquet").touch()
    for folder in ("model", "link", "link/out", "."):
        with pytest.raises(ValueError, match=r"output: .* and model.path .*/model overlap; choose another"):
            check_apart("output", tmp_path / folder, {"model.path": [tmp_path / "model"]})
    check_apart("output", tmp_path / "out", {"model.path": [tmp_path / "model"], "data": [tmp_path / "in.parquet"]})
    with pytest.raises(ValueError, match="overlap"):
        check_apart("output", tmp_path, {"data": [tmp_path / "in.parquet"]})
