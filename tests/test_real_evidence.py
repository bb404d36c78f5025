"""The parts of the evidence on a published model: pruning, the least time of a run, topics, values stated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ideal import Least, Shape, least, taken_off
from prune_layers import prune
from real_data import TOPICS, Similar, topic_of
from real_model import values_of, values_stated
from roofline import Ceilings, Counter
from roofline import least as counted
from tiny_models import LAYERS, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

CATEGORIES = Path("../shared/data/banking77/categories.json")


@torch.inference_mode()
def test_a_pruned_model_is_the_base_without_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base: PreTrainedModel = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    monkeypatch.setattr("prune_layers.AutoTokenizer", _NoTokenizer)
    prune(tmp_path / "base", tmp_path / "out", [5, 0, 2])
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert pruned.config.num_hidden_layers == 3
    ids = torch.arange(3, 20)[None]
    hidden = base.model.embed_tokens(ids)
    rotary = base.model.rotary_emb(hidden, torch.arange(17)[None])
    for number in (0, 2, 5):
        hidden = base.model.layers[number](hidden, position_embeddings=rotary)
    torch.testing.assert_close(pruned(ids).logits, base.lm_head(base.model.norm(hidden)))


class _NoTokenizer:
    @classmethod
    def from_pretrained(cls, *args: object, **keys: object) -> _NoTokenizer:
        return cls()

    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.parametrize("speedup", [1.0, 2.0])
@pytest.mark.parametrize("ends", [(9, 9, 9), (9, 4, 1)])
def test_the_least_time_is_that_of_the_passes_that_the_engine_runs(speedup: float, ends: tuple[int, ...]) -> None:
    """Equal to the count of a real run where all rows end together; below it where the engine waits for ended rows."""
    decoder, ceilings = Decoder(tiny_model("llama")), Ceilings(flops=100.0, bandwidth=7.0)
    counter = Counter(ceilings)
    counter.watch(decoder)
    schedule = ScheduleSpec(speedup=speedup, horizon=6).build(LAYERS)
    rows = [Request([5 + row] * 7, SamplingParams(max_new_tokens=end), row) for row, end in enumerate(ends)]
    generate(Engine(decoder, schedule, ()), rows, budget_bytes=2**40, max_rows=8)
    parts = counter.take()
    found = least([(7, end) for end in ends], schedule, Shape.of(decoder.model.config), ceilings, 4, 8)
    assert found.prefill == pytest.approx(counted(parts, "prefill"))
    if len(set(ends)) == 1:
        assert found.decode == pytest.approx(counted(parts, "decode"))
    else:
        assert 0.5 * counted(parts, "decode") < found.decode <= counted(parts, "decode") * (1 + 1e-9)


def test_the_ideal_is_the_measured_time_without_the_skipped_layers() -> None:
    full, half = Least(prefill=2.0, decode=5.0, head=1.0), Least(prefill=2.0, decode=3.0, head=1.0)
    assert taken_off(10.0, 21.0, full, full) == (31.0, 21.0)
    assert taken_off(10.0, 21.0, full, half) == (21.0, 11.0)  # 20 s of layers at 1x, half of them left, and the head
    one_token = Least(prefill=1.0, decode=0.0, head=0.0)
    assert taken_off(10.0, 0.0, Least(2.0, 0.0, 0.0), one_token) == (5.0, 0.0)


def test_a_shared_beginning_is_computed_for_no_row() -> None:
    shape, ceilings = Shape(layer=1000, head=10, width=4, cached=2), Ceilings(flops=1.0, bandwidth=1e12)
    schedule = ScheduleSpec().build(3)
    whole = least([(10, 1)] * 4, schedule, shape, ceilings, 4, 2)
    shared = least([(10, 1)] * 4, schedule, shape, ceilings, 4, 2, shared=6)
    assert shared.prefill < 0.5 * whole.prefill
    assert shared.decode == whole.decode == 0


def test_values_are_counted_word_for_word() -> None:
    prompt = "name[The Eagle], priceRange[£20-25], familyFriendly[yes], near[Café Rouge]"
    assert values_of(prompt) == ["The Eagle", "£20-25", "Café Rouge"]
    assert values_stated([prompt, prompt], ["the eagle near Café Rouge", ""]) == (2, 6)


def test_the_most_similar_text_comes_first() -> None:
    similar = Similar(["my card was stolen", "when does my card arrive", "exchange rate for euros"])
    assert similar.nearest(["the card has not arrived, when will it arrive", "euros rate"], 2)[0][0] == 1
    assert similar.nearest(["the card was stolen"], 1) == [[0]]


@pytest.mark.skipif(not CATEGORIES.is_file(), reason=f"{CATEGORIES} is not there")
def test_every_intent_has_a_topic() -> None:
    topics = [topic_of(intent) for intent in json.loads(CATEGORIES.read_text())]
    assert set(topics) == set(TOPICS)
    assert min(topics.count(topic) for topic in TOPICS) >= 4
