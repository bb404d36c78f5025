"""The actor, without Ray around it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from part_builders import part_spec

from actors.answers import Prompt
from actors.generator import Generator, RowsAtWork
from pipeline.generate import stage as generate


def test_a_model_is_loaded_and_run_in_one_thread(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread asks: OpenMP's threads of two callers get in each other's way."""
    seen: list[int] = []

    class Watched(Generator):
        def __init__(self, *args: Any, **settings: Any) -> None:
            seen.append(threading.get_ident())
            super().__init__(*args, **settings)

        def run(self, work: RowsAtWork) -> None:
            seen.append(threading.get_ident())
            super().run(work)

    monkeypatch.setattr(generate, "Generator", Watched)
    settings = {"checkpoint": str(checkpoint), "dtype": "float32", "device": "cpu"}
    actor = generate.ShardGenerator(settings, part_spec())
    with ThreadPoolExecutor(1) as other:
        other.submit(actor._answer, [Prompt([1, 9, 3], "in/a.parquet", 0)]).result()
    assert len(seen) == 2 and len(set(seen)) == 1
