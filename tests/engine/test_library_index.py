"""The list of what transformers' models define: from the cache it is what the library makes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils import import_utils

from actors.engine.checkpoint.library_index import kept

MODELS = Path(transformers.__file__).parent / "models"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "transformers"


def never(*_: Any) -> Any:
    raise AssertionError("made anew")


define: Callable[..., Any] = inspect.unwrap(import_utils.define_import_structure)  # the library's, without its cache


def test_it_is_the_librarys_and_made_once(cache: Path) -> None:
    for path, prefix in ((MODELS, "models"), (MODELS / "__init__.py", None)):
        wanted = define(path, prefix)
        assert kept(define)(path, prefix) == wanted
        again = kept(never)(path, prefix)
        assert again == wanted
        again[frozenset()].clear()  # the library extends what it gets
        assert kept(never)(path, prefix) == wanted
    assert len(list(cache.iterdir())) == 1
    part = MODELS / "llama" / "__init__.py"
    assert kept(define)(part) == define(part) and len(list(cache.iterdir())) == 1


def test_a_changed_file_or_a_damaged_record_is_a_new_list(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "new").mkdir(parents=True)
    module = folder / "new" / "modeling_new.py"
    module.write_text('__all__ = ["First"]\n')
    calls: list[Any] = []

    def counted(path: Any) -> Any:
        calls.append(path)
        import_utils.create_import_structure_from_path.cache_clear()
        return define(path)

    def names() -> set[str]:
        return {name for modules in kept(counted)(folder).values() for of in modules.values() for name in of}

    assert names() == names() == {"First"} and len(calls) == 1
    module.write_text('__all__ = ["First", "Second"]\n')
    assert names() == names() == {"First", "Second"} and len(calls) == 2
    for text in ("", "{}", "[]", '{"models": 1}', '{"models": [[["torch"], 1]]}', json.dumps({"models": [1]})):
        for record in cache.iterdir():
            record.write_text(text)
        assert names() == {"First", "Second"}
    assert len(calls) == 8


def test_without_a_cache_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "file"))
    assert kept(define)(MODELS) == define(MODELS)


SCRIPT = """
import sys
from actors.engine.checkpoint.library_index import keep_index
keep_index()
keep_index()
from transformers import AutoConfig, LlamaForCausalLM
keep_index()
left = [one for one in sys.meta_path if type(one).__module__ == "actors.engine.checkpoint.library_index"]
print(left, LlamaForCausalLM.__name__)
"""


def test_the_library_imports_with_it(cache: Path) -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
        assert done.stdout == "[] LlamaForCausalLM\n", done.stderr
        assert len(list(cache.iterdir())) == 1
