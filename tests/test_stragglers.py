"""What the straggler benchmark counts, against sums by hand."""

from __future__ import annotations

import pytest
from output_length import LengthPredictor, explained
from stragglers import Measured, by, full_batch, medians, run, ways
from tiny_models import VOCAB, tiny_model
from workloads import Workload

from actors.engine.decoder import Decoder
from actors.engine.types import EngineStats

PROMPTS = [2, 6, 3, 5, 4]
NEW = [4, 2, 7, 3, 5]
AT_ONCE = 2


def rows() -> Workload:
    return Workload("made up", [[5 + row] * length for row, length in enumerate(PROMPTS)], NEW, max(NEW))


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("arrival", [[0, 1], [2, 3], [4]]),
        ("bucketing", [[1, 3], [4, 2], [0]]),
        ("compaction", [[1, 3], [4, 2], [0]]),
        ("predicted", [[0, 1], [2, 3], [4]]),
        ("oracle", [[2, 4], [0, 3], [1]]),
    ],
)
def test_batches_padding_and_idle_steps(name: str, batches: list[list[int]]) -> None:
    way = ways(rows(), [5.0, 4.0, 3.0, 2.0, 1.0])[name]
    one = run(Decoder(tiny_model("llama")), rows(), 2.0, 4, way, AT_ONCE)
    steps = [max(NEW[row] for row in batch) - 1 for batch in batches]
    assert len(one.steps) == sum(steps)
    assert one.stats.decode_steps == sum(new - 1 for new in NEW)
    idle = sum(many * len(batch) for many, batch in zip(steps, batches, strict=True)) - one.stats.decode_steps
    assert one.idle_row_steps == (idle if name in ("arrival", "bucketing") else 0)
    assert one.stats.padded_prompt_tokens == sum(max(PROMPTS[row] for row in batch) * len(batch) for batch in batches)
    assert 0 < one.retire < one.decode


def test_time_lost() -> None:
    stats = EngineStats(prompt_tokens=60, padded_prompt_tokens=80, decode_steps=90)
    one = Measured(seconds=9.0, prefill=4.0, decode=5.0, retire=0.5, steps=[2.0, 3.0], stats=stats, idle_row_steps=10)
    assert one.without_padding == pytest.approx(3.0 + 4.5 - 0.5)
    slower = Measured(
        seconds=19.0, prefill=6.0, decode=9.0, retire=0.5, steps=[4.0, 5.0], stats=stats, idle_row_steps=10
    )
    middle = medians([one, slower, slower])
    assert (middle.seconds, middle.prefill, middle.steps) == (19.0, 6.0, [4.0, 5.0])


def test_a_full_batch_has_the_prompts_that_steps_read() -> None:
    full = full_batch(rows(), AT_ONCE, VOCAB)
    read = sum(prompt * (new - 1) for prompt, new in zip(PROMPTS, NEW, strict=True)) / sum(new - 1 for new in NEW)
    assert [len(ids) for ids in full.prompts] == [round(read)] * AT_ONCE
    assert full.new == [max(NEW)] * AT_ONCE
    assert full.prompts[0] != full.prompts[1]  # equal prompts would be computed once


def test_predicted_lengths() -> None:
    predictor = LengthPredictor((10.0, 0.0, 0.0, 2.0), most_prompt=64)
    assert predictor.predict(["name[a], food[b]", "plain"]) == [14.0, 10.0]
    assert by([14.0, 10.0, 14.0]) == [0, 2, 1]
    assert explained([1.0, 2.0, 3.0], [1, 2, 3]) == 1
    assert explained([2.0, 2.0, 2.0], [1, 2, 3]) == 0
