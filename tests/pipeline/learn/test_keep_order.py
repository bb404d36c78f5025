"""The measured keep order, against elimination by explicit forward passes, one row and one set of layers at a time.

`keep_order: measured`: measured once for a checkpoint and its rows, and read from the cache after that.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from oracle import oracle_logits, oracle_logits_each
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder, part
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from pipeline.learn import keep_order
from pipeline.learn.keep_order import ROWS, LayerRanking, Row, measured_order, rank_layers

FULL = ScheduleSpec().build(LAYERS)


def own_answers(decoder: Decoder, count: int = 4) -> list[Row]:
    """Prompts with what the model at full depth answers them, of different lengths."""
    rng, rows = random.Random(5), []
    for _ in range(count):
        prompt: list[int] = rng.choices(range(3, VOCAB), k=rng.randint(2, 6))
        response: list[int] = []
        for _ in range(rng.randint(2, 6)):
            response.append(int(oracle_logits(decoder, FULL, prompt, response).argmax()))
        rows.append((prompt, response))
    return rows


def without(bypassed: list[int]) -> Schedule:
    kept = [layer for layer in range(LAYERS) if layer not in bypassed]
    return Schedule(LAYERS, (len(kept),), (*kept, *bypassed), warmup=0)


def slow_divergence(decoder: Decoder, rows: list[Row], bypassed: list[int]) -> float:
    """Nats per response token that is an input, from the definition."""
    nats: list[float] = []
    for prompt, response in rows:
        inputs = response[:-1]
        full = oracle_logits_each(decoder, FULL, prompt, inputs)[1:].log_softmax(-1).double()
        less = oracle_logits_each(decoder, without(bypassed), prompt, inputs)[1:].log_softmax(-1).double()
        nats += (full.exp() * (full - less)).sum(-1).tolist()
    return sum(nats) / len(nats)


@torch.inference_mode()
def slow_influence(decoder: Decoder, rows: list[Row], bypassed: list[int]) -> dict[int, float]:
    """1 - cos of every layer that runs, summed over the same tokens, from the definition."""
    influence = dict.fromkeys(range(LAYERS), 0.0)
    for prompt, response in rows:
        ids = torch.tensor([[*prompt, *response[:-1]]])
        hidden, rotary = decoder.embed(ids, torch.arange(ids.shape[1])[None])
        for layer in range(LAYERS):
            columns = list(range(len(prompt) if layer in bypassed else ids.shape[1]))
            keys, queries = torch.tensor(columns), torch.tensor(columns)[:, None]
            visible = (keys > queries - (decoder.windows[layer] or 99)) & (keys <= queries)
            before = hidden.clone()
            rope = part(rotary[layer], columns=columns)
            hidden[:, columns] = decoder.run_layer(layer, hidden[:, columns], rope, visible[None, None])
            cosines = torch.cosine_similarity(before, hidden, dim=-1)[0, len(prompt) :]
            influence[layer] += float((1 - cosines).sum())
    return influence


def slow_ranking(decoder: Decoder, rows: list[Row], warmup: int, candidates: int) -> LayerRanking:
    remaining, bypassed, divergence = list(range(warmup, LAYERS)), [], []
    at_full_depth = slow_influence(decoder, rows, [])
    while len(remaining) > 1 and (not divergence or divergence[-1] <= keep_order.LOST):
        influence = slow_influence(decoder, rows, bypassed)
        tried = sorted(remaining, key=lambda layer: influence[layer])[:candidates]
        nats = {layer: slow_divergence(decoder, rows, [*bypassed, layer]) for layer in tried}
        least = min(nats, key=lambda layer: nats[layer])
        remaining.remove(least)
        bypassed.append(least)
        divergence.append(nats[least])
    remaining.sort(key=lambda layer: -at_full_depth[layer])
    return LayerRanking((*range(warmup), *remaining, *reversed(bypassed)), tuple(divergence))


@pytest.mark.parametrize(
    ("family", "warmup", "candidates", "prepared", "lost"),
    [
        ("llama", 0, LAYERS, True, 1e9),
        ("gemma2", 1, 3, False, 1e9),
        ("gpt-neox", 0, 2, False, 0.5),
        ("mistral", 2, 3, True, 1e9),
        ("qwen2", 0, LAYERS, False, 1.0),
    ],
)
def test_the_order_is_that_of_explicit_elimination(
    family: str, warmup: int, candidates: int, prepared: bool, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_order, "LOST", lost)
    monkeypatch.setattr(keep_order, "CANDIDATES", candidates)
    monkeypatch.setattr(keep_order, "ROWS_PER_PASS", 3)
    decoder = Decoder(tiny_model(family))
    rows = own_answers(decoder)
    expected = slow_ranking(decoder, rows, warmup, candidates)
    if prepared:
        decoder = fastest_decoder(decoder.model)
    got = rank_layers(decoder, rows, warmup=warmup)
    assert got.keep_order == expected.keep_order
    assert got.divergence == pytest.approx(expected.divergence, rel=1e-3, abs=1e-5)
    assert len(got.divergence) == LAYERS - warmup - 1 or got.divergence[-1] > lost
    Schedule(LAYERS, (LAYERS, 2), got.keep_order, warmup)


def test_layers_without_effect_go_first_and_of_equal_layers_the_higher_is_kept_longer() -> None:
    decoder = Decoder(tiny_model("llama"))
    for layer in (1, 2, 4):
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # the layer is then an exact identity
            decoder.blocks[layer].get_submodule(name).weight.data.zero_()
    rows = own_answers(decoder)
    ranking = rank_layers(decoder, rows)
    assert ranking.keep_order[-3:] == (4, 2, 1)
    assert ranking.divergence[:3] == pytest.approx((0, 0, 0), abs=1e-5) and ranking.divergence[3] > 1e-3
    assert rank_layers(decoder, rows, warmup=LAYERS).keep_order == tuple(range(LAYERS))
    assert rank_layers(decoder, rows, warmup=LAYERS - 1).keep_order == tuple(range(LAYERS))


def test_a_step_tries_the_given_number_of_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep_order, "LOST", 1e9)
    monkeypatch.setattr(keep_order, "CANDIDATES", 2)
    decoder = Decoder(tiny_model("llama"))
    rows = own_answers(decoder, 1)
    divergence = Mock(wraps=keep_order._divergence)
    monkeypatch.setattr(keep_order, "_divergence", divergence)
    ranking = rank_layers(decoder, [*rows, ([3], []), ([], [3]), ([3], [4])])
    tried = [call.args[1] for call in divergence.mock_calls]
    assert len(tried) == 2 * (LAYERS - 1) and capsys.readouterr().err.count("min left") == LAYERS - 1
    assert set(ranking.keep_order[1:]) <= set(tried)
    with pytest.raises(ValueError, match="no row has a prompt and a response"):
        rank_layers(decoder, [([3], []), ([], [3]), ([3], [4])])
    assert keep_order.batches([([3, 5], [4])], VOCAB) == [[([3], [5, 4])]]


def test_rows_beyond_the_bounds_on_memory_are_left_out_but_never_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [([3] * 4, [5] * 4)] * 5
    assert [len(batch) for batch in keep_order.batches(rows, VOCAB)] == [5]
    for name, most, kept in (("PROMPT_TOKENS", 12, 3), ("PROBABILITIES", 7 * VOCAB, 2), ("PROBABILITIES", 1, 1)):
        monkeypatch.setattr(keep_order, name, most)
        assert [len(batch) for batch in keep_order.batches(rows, VOCAB)] == [kept]


@pytest.mark.parametrize(
    ("order", "most", "warmup"),
    [((0, 5, 1, 2, 3, 4), 3, 1), ((1, 0, 2, 5, 4, 3), 2, 2), ((5, 0, 1, 2, 3, 4), 3, 0), ((0, 1, 2, 3, 4, 5), 1, 1)],
)
def test_the_warm_up_is_the_lowest_layers_that_begin_the_order(order: tuple[int, ...], most: int, warmup: int) -> None:
    assert LayerRanking(order, ()).warmup(most) == warmup
    Schedule(LAYERS, (LAYERS,), order, warmup)


IDENTITY = {"files": {"model.safetensors": "c0ffee"}}


def random_rows(count: int, seed: int = 1) -> list[Row]:
    rng = random.Random(seed)
    return [(rng.choices(range(3, VOCAB), k=4), rng.choices(range(3, VOCAB), k=3)) for _ in range(count)]


@pytest.fixture
def load() -> Mock:
    """A function that loads the model."""
    return Mock(return_value=Decoder(tiny_model("llama")))


def measured(load: Mock, cache: Path, **changes: Any) -> tuple[tuple[int, ...], int]:
    given = {"identity": IDENTITY, "rows": random_rows(3), "warmup": None, **changes}
    return measured_order(load=load, cache=str(cache), **given)


def test_the_second_call_reads_the_cache_and_loads_nothing(load: Mock, tmp_path: Path) -> None:
    order, warmup = measured(load, tmp_path)
    assert measured(load, tmp_path) == (order, warmup) and load.call_count == 1
    ranking = rank_layers(load(), random_rows(3))
    assert (order, warmup) == (ranking.keep_order, ranking.warmup(1))


@pytest.mark.parametrize("change", [{"identity": {"files": {}}}, {"rows": random_rows(3, seed=2)}, {"warmup": 2}])
def test_what_the_order_depends_on_measures_again(load: Mock, tmp_path: Path, change: dict[str, Any]) -> None:
    measured(load, tmp_path)
    order, warmup = measured(load, tmp_path, **change)
    assert load.call_count == 2
    if "warmup" in change:
        assert (set(order[:2]), warmup) == ({0, 1}, 2)


@pytest.mark.parametrize("text", ["", "[]", '{"keep_order": [0, 0, 1], "warmup": 1}', '{"keep_order": [0, 1]}'])
def test_a_damaged_record_is_measured_again(
    load: Mock, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = measured(load, tmp_path)
    (record,) = (tmp_path / "keep-orders").iterdir()
    record.write_text(text)
    assert measured(load, tmp_path) == found and load.call_count == 2
    assert "measuring the order again" in caplog.text
    assert measured(load, tmp_path) == found and load.call_count == 2


def test_rows_are_evenly_spaced(load: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = Mock(return_value=LayerRanking(tuple(range(LAYERS)), ()))
    monkeypatch.setattr(keep_order, "rank_layers", ranked)
    many = random_rows(3 * ROWS)
    assert measured(load, tmp_path, rows=many) == (tuple(range(LAYERS)), 1)
    assert ranked.call_args.args[1] == many[::3]
