"""`keep_order: measured`: measured once for a checkpoint and its rows, and read from the cache after that."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine.decoder import Decoder
from pipeline.learn import keep_order
from pipeline.learn.keep_order import ROWS, Row, measured_order, rank_layers

IDENTITY = {"files": {"model.safetensors": "c0ffee"}}


def rows(count: int, seed: int = 1) -> list[Row]:
    rng = random.Random(seed)
    return [(rng.choices(range(3, VOCAB), k=4), rng.choices(range(3, VOCAB), k=3)) for _ in range(count)]


class Model:
    """Counts how often it is loaded."""

    def __init__(self) -> None:
        self.loads = 0
        self.decoder = Decoder(tiny_model("llama"))

    def __call__(self) -> Decoder:
        self.loads += 1
        return self.decoder


def measured(model: Model, cache: Path, **changes: Any) -> tuple[tuple[int, ...], int]:
    given = {"identity": IDENTITY, "rows": rows(3), "warmup": None, **changes}
    return measured_order(load=model, cache=str(cache), **given)


def test_the_second_call_reads_the_cache_and_loads_nothing(tmp_path: Path) -> None:
    model = Model()
    order, warmup = measured(model, tmp_path)
    ranking = rank_layers(model.decoder, rows(3))
    assert (order, warmup) == (ranking.keep_order, ranking.warmup(1))
    assert measured(model, tmp_path) == (order, warmup) and model.loads == 1


@pytest.mark.parametrize("change", [{"identity": {"files": {}}}, {"rows": rows(3, seed=2)}, {"warmup": 2}])
def test_what_the_order_depends_on_measures_again(tmp_path: Path, change: dict[str, Any]) -> None:
    model = Model()
    measured(model, tmp_path)
    order, warmup = measured(model, tmp_path, **change)
    assert model.loads == 2
    if "warmup" in change:
        assert (set(order[:2]), warmup) == ({0, 1}, 2)


@pytest.mark.parametrize("text", ["", "[]", '{"keep_order": [0, 0, 1], "warmup": 1}', '{"keep_order": [0, 1]}'])
def test_a_damaged_record_is_measured_again(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    found = measured(model, tmp_path)
    (record,) = (tmp_path / "keep-orders").iterdir()
    record.write_text(text)
    assert measured(model, tmp_path) == found and model.loads == 2
    assert "measuring the order again" in caplog.text
    assert measured(model, tmp_path) == found and model.loads == 2


def test_rows_are_evenly_spaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = keep_order.rank_layers, []

    def ranked(decoder: Decoder, chosen: list[Row], **given: Any) -> Any:
        seen.extend(chosen)
        return plain(decoder, chosen[:2], **given)

    monkeypatch.setattr(keep_order, "rank_layers", ranked)
    many = rows(3 * ROWS)
    order, warmup = measured(Model(), tmp_path, rows=many)
    assert seen == many[::3]
    assert sorted(order) == list(range(LAYERS)) and warmup <= 1
