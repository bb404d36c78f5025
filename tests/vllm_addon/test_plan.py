"""Which tokens run a layer, and the attention metadata of those tokens; no vLLM is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import any_schedule
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LAYERS
from torch import Tensor

from actors.engine.schedule.schedule import Schedule
from actors.vllm.plan import PassPlan, cut_metadata


@dataclass
class Metadata:
    """The fields of vLLM's CommonAttentionMetadata that a text model sets, and one that it does not."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None
    req_idx: np.ndarray | None = None
    from_the_future: Tensor | None = None
    _cache: Tensor | None = None


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Prompt length, tokens computed before the pass, and tokens of the pass, of each request."""
    numbers = st.integers(1, 6)
    return [(draw(numbers), draw(st.integers(0, 9)), draw(numbers)) for _ in range(draw(st.integers(1, 5)))]


def metadata(batch: list[tuple[int, int, int]]) -> Metadata:
    """As vLLM builds it; slots and block tables are numbers that name their token and request."""
    counts = [count for _, _, count in batch]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    ends = torch.tensor([before + count for _, before, count in batch], dtype=torch.int32)
    positions = [before + step for _, before, count in batch for step in range(count)]
    owners = [number for number, (_, _, count) in enumerate(batch) for _ in range(count)]
    return Metadata(
        starts,
        starts,
        ends,
        len(batch),
        sum(counts),
        max(counts),
        int(ends.max()),
        torch.arange(len(batch))[:, None] * 10 + torch.arange(3),
        torch.tensor([owner * 100 + position for owner, position in zip(owners, positions, strict=True)]),
        positions=torch.tensor(positions),
        is_prefilling=torch.tensor([before < prompt for prompt, before, _ in batch]),
        seq_lens_cpu_upper_bound=ends,
        req_idx=np.arange(len(batch)) + 7,
        _cache=ends,
    )


def plan(schedule: Schedule, batch: list[tuple[int, int, int]], common: Metadata) -> PassPlan:
    starts, ends = common.query_start_loc.numpy().astype(int), common.seq_lens.numpy().astype(int)
    prompts = np.array([prompt for prompt, _, _ in batch])
    depth = len(schedule.prompt_layers)
    return PassPlan(np.asarray(schedule.depths), depth, starts, ends, prompts, torch.device("cpu"))


@given(any_schedule(), batches())
def test_metadata_of_a_subset_is_that_of_a_pass_without_the_other_tokens(
    schedule: Schedule, batch: list[tuple[int, int, int]]
) -> None:
    common = metadata(batch)
    made = plan(schedule, batch, common)
    for layer in range(LAYERS):
        rank = schedule.ranks[layer]
        counts = []
        for prompt, before, count in batch:
            positions = range(before, before + count)
            sets = [schedule.prompt_layers if p < prompt else schedule.layers(p - prompt) for p in positions]
            counts.append(sum(layer in run for run in sets))
        assert made.runs_all(rank) == (sum(counts) == common.num_actual_tokens)
        subset = made.subset(rank)
        if subset is None:
            assert not any(counts)
            continue
        rows = [number for number, count in enumerate(counts) if count]
        wanted = metadata([(batch[number][0], batch[number][1], counts[number]) for number in rows])
        got = cut_metadata(common, subset, made.ends)
        names = [f"{number * 100 + batch[number][1] + step}" for number in rows for step in range(counts[number])]
        assert [str(slot) for slot in got.slot_mapping.tolist()] == names
        assert torch.equal(got.block_table_tensor, common.block_table_tensor[rows])
        assert got.req_idx.tolist() == [number + 7 for number in rows]
        assert got._cache is None
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "positions", "seq_lens_cpu_upper_bound"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            assert getattr(got, name) == getattr(wanted, name), name


def test_an_unknown_field_with_a_value_is_refused() -> None:
    schedule = Schedule(LAYERS, (3, 1), tuple(range(LAYERS)))
    batch = [(2, 1, 1), (2, 3, 1)]
    common = metadata(batch)
    subset = plan(schedule, batch, common).subset(3)
    assert subset is not None
    ends = common.seq_lens.numpy()
    assert cut_metadata(common, subset, ends).num_reqs == 1
    with pytest.raises(NotImplementedError, match=r"CommonAttentionMetadata\.from_the_future is set"):
        cut_metadata(replace(common, from_the_future=torch.zeros(2)), subset, ends)
    with pytest.raises(NotImplementedError, match="causal is set for each request"):
        cut_metadata(replace(common, causal=torch.ones(2)), subset, ends)
