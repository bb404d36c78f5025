"""Teacher forcing without padding: the same states as `teacher_forcing`, each prompt computed once for all schedules.

Tokens form a tree: the tokens that all prompts begin with, then each prompt's own ones, then the response once for each
schedule. A token attends to the tokens above it and to the earlier ones of its own branch, as at inference.
Shapes: N tokens, G groups (prompts), K keys of a group, E hidden size, S schedules, M response tokens of all pairs,
H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.engine.decoder import Decoder, part
from actors.engine.packed_attention import Attendance
from actors.engine.schedule import Schedule

Pair = Mapping[str, Any]  # `input_ids`, prompt and response, and `prompt_tokens`
SHARED = -1  # branch of the tokens above all branches
LEAST_SAVED = 16  # tokens; for fewer a pass of their own costs more


@dataclass(frozen=True)
class _Tokens:
    """N tokens of one level of the tree, [N] each: group, branch within it, and number of layers to run."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    branches: Tensor
    depths: Tensor


@dataclass
class _Above:
    """Keys and values [G, H, K, D] by layer of a tree's upper levels; positions and valid: [G, K]."""

    states: dict[int, tuple[Tensor, Tensor]]
    positions: Tensor
    valid: Tensor


def predicting_states(
    decoder: Decoder,
    pairs: Sequence[Pair],
    schedules: Sequence[Schedule],
    *,
    prompt_gradient: bool = True,
    recompute: bool = False,
) -> Tensor:
    """Hidden states [S, M, E] before the final norm that predict each response token under each schedule.

    Args:
        decoder: its model's attention is that of `packed_attention`.
        pairs: prompts and responses, at least one.
        schedules: they must run the same layers over prompts.
        prompt_gradient: whether gradients flow through all prompt tokens; else through each prompt's last one alone.
        recompute: keep only each layer's input for the backward pass (gradient checkpointing).
    """
    assert len({schedule.prompt_layers for schedule in schedules}) == 1
    device = decoder.device
    prompt_layers = schedules[0].prompt_layers
    shared = shared_tokens(pairs)
    above = None
    with nullcontext() if prompt_gradient else torch.no_grad():
        prefix = _prompts([pairs[0]["input_ids"][:shared]], 0)
        own = _prompts([pair["input_ids"][shared : pair["prompt_tokens"] - 1] for pair in pairs], shared)
        for tokens, groups in ((prefix, 1), (own, len(pairs))):
            if len(tokens.ids):
                # a layer of the prompt's set has rank 0, others a rank that no depth exceeds
                ranks = torch.ones(1, decoder.num_layers, dtype=torch.long)
                ranks[:, list(prompt_layers)] = 0
                _, above = _run(decoder, tokens, ranks, groups, above, device, recompute)
    ranks = torch.tensor([schedule.ranks for schedule in schedules])
    hidden, _ = _run(decoder, _responses(pairs, schedules), ranks, len(pairs), above, device, recompute)
    return hidden.view(len(schedules), -1, hidden.shape[-1])


def response_labels(pairs: Sequence[Pair]) -> Tensor:
    """[M], the responses' tokens, in the order of `predicting_states`."""
    return torch.tensor([token for pair in pairs for token in pair["input_ids"][pair["prompt_tokens"] :]])


def shared_tokens(pairs: Sequence[Pair]) -> int:
    """How many tokens of the prompts are computed once for all pairs; never a prompt's last one."""
    # the least and the greatest of all lists differ where any two do
    prompts = [pair["input_ids"][: pair["prompt_tokens"] - 1] for pair in pairs]
    least, greatest = min(prompts), max(prompts)
    shared = next((place for place, (a, b) in enumerate(zip(least, greatest)) if a != b), len(least))  # noqa: B905
    return shared if shared * (len(pairs) - 1) >= LEAST_SAVED else 0


def micro_batches(pairs: Sequence[Pair], schedules: int, tokens: int) -> Iterator[Sequence[Pair]]:
    """Cut pairs, in their order, into batches of about equal size, of at most `tokens` tokens where a pair allows."""
    shared = shared_tokens(pairs)
    costs = [
        pair["prompt_tokens"] - 1 - shared + schedules * (len(pair["input_ids"]) - pair["prompt_tokens"])
        for pair in pairs
    ]
    room = max(tokens - shared, tokens // 4, 1)
    each = sum(costs) / -(-sum(costs) // room)
    first, cost = 0, 0
    for number, more in enumerate(costs):
        if number > first and (cost + more > room or cost + more / 2 > each):
            yield pairs[first:number]
            first, cost = number, 0
        cost += more
    yield pairs[first:]


def _prompts(rows: Sequence[Sequence[int]], start: int) -> _Tokens:
    """Tokens of each group, at positions from `start` on."""
    lengths = torch.tensor([len(row) for row in rows])
    count = int(lengths.sum())
    positions = [start + place for row in rows for place in range(len(row))]
    return _Tokens(
        ids=torch.tensor([token for row in rows for token in row], dtype=torch.long),
        positions=torch.tensor(positions, dtype=torch.long),
        groups=torch.repeat_interleave(lengths),
        branches=torch.zeros(count, dtype=torch.long),
        depths=torch.ones(count, dtype=torch.long),
    )


def _responses(pairs: Sequence[Pair], schedules: Sequence[Schedule]) -> _Tokens:
    """For each schedule and pair the prompt's last token and the response, whose last token is never an input."""
    ids: list[int] = []
    positions: list[int] = []
    groups: list[int] = []
    branches: list[int] = []
    depths: list[int] = []
    for branch, schedule in enumerate(schedules):
        for group, pair in enumerate(pairs):
            first = pair["prompt_tokens"] - 1
            tokens = pair["input_ids"][first:-1]
            ids += tokens
            positions += range(first, first + len(tokens))
            groups += [group] * len(tokens)
            branches += [branch] * len(tokens)
            depths.append(len(schedule.prompt_layers))
            depths += [schedule.depth(place) for place in range(len(tokens) - 1)]
    return _Tokens(*(torch.tensor(values) for values in (ids, positions, groups, branches, depths)))


def _run(
    decoder: Decoder,
    tokens: _Tokens,
    ranks: Tensor,
    groups: int,
    above: _Above | None,
    device: torch.device,
    recompute: bool,
) -> tuple[Tensor, _Above]:
    """One level of the tree: hidden states [1, N, E], and the keys and values of this level and those above.

    ranks: [branches, layers]; a layer runs for the tokens of greater depth.
    """
    hidden, rotary = decoder.embed(tokens.ids[None].to(device), tokens.positions[None].to(device))
    runs = tokens.depths[None] > ranks.T[:, tokens.branches]  # [layers, N]
    states: dict[int, tuple[Tensor, Tensor]] = {}
    layouts: dict[tuple[bytes, int | None], tuple[Tensor | None, Attendance]] = {}
    for layer in range(decoder.num_layers):
        if not runs[layer].any():
            continue
        window = decoder.windows[layer]
        key = (runs[layer].numpy().tobytes(), window)
        if key not in layouts:
            layouts[key] = _layout(tokens, runs[layer], groups, above, window, device)
        index, layout = layouts[key]
        attendance = Attendance(
            layout.tokens, layout.places, layout.visible, None if above is None else above.states[layer]
        )

        def run(
            inputs: Tensor, attendance: Attendance = attendance, layer: int = layer, index: Tensor | None = index
        ) -> tuple[Tensor, Tensor, Tensor]:
            turned = rotary[layer] if index is None else part(rotary[layer], columns=index)
            output = decoder.run_layer(layer, inputs, turned, attendance)
            assert attendance.states is not None
            return output, *attendance.states

        inputs = hidden if index is None else hidden.index_select(1, index)
        output, keys, values = checkpoint(run, inputs, use_reentrant=False) if recompute else run(inputs)
        hidden = output if index is None else hidden.index_copy(1, index, output)
        states[layer] = keys, values
    _, whole = _layout(tokens, torch.ones_like(runs[0]), groups, above, None, device)
    own = torch.zeros(len(whole.tokens), dtype=torch.bool, device=device)
    own[whole.places] = True
    positions = tokens.positions.to(device)[whole.tokens].view(groups, -1)
    return hidden, _Above(states, *_with_above(positions, own.view(groups, -1), above))


def _layout(
    tokens: _Tokens, runs: Tensor, groups: int, above: _Above | None, window: int | None, device: torch.device
) -> tuple[Tensor | None, Attendance]:
    """Index of the tokens that run, None for all, and the keys that they attend to, without `earlier`."""
    index = runs.nonzero()[:, 0]
    group, branch, position = (values[index] for values in (tokens.groups, tokens.branches, tokens.positions))
    counts = torch.bincount(group, minlength=groups)
    order = group.argsort(stable=True)
    slots = torch.empty_like(group)
    slots[order] = torch.arange(len(index)) - (counts.cumsum(0) - counts)[group[order]]
    columns = int(counts.max())
    places = group * columns + slots
    padded = torch.zeros(groups * columns, dtype=torch.long)
    padded[places] = torch.arange(len(index))
    real = torch.zeros(groups * columns, dtype=torch.bool)
    real[places] = True
    padded, places, real, branch, position = (
        values.to(device) for values in (padded, places, real.view(groups, -1), branch, position)
    )
    branches, positions = branch[padded].view(groups, -1), position[padded].view(groups, -1)
    key_positions, valid = _with_above(positions, real, above)
    before = key_positions.shape[1] - columns
    key_branches = torch.cat([branches.new_full((groups, before), SHARED), branches], dim=1)
    visible = valid[:, None] & (key_positions[:, None] <= positions[..., None])
    visible &= (key_branches[:, None] == SHARED) | (key_branches[:, None] == branches[..., None])
    if window is not None:
        visible &= key_positions[:, None] > positions[..., None] - window
    visible |= ~real[..., None]  # padding sees all keys, or softmax gives NaN
    return None if bool(runs.all()) else index.to(device), Attendance(padded, places, visible[:, None])


def _with_above(positions: Tensor, valid: Tensor, above: _Above | None) -> tuple[Tensor, Tensor]:
    """Positions and validity [G, K] of all keys: those of the upper levels, then this level's."""
    if above is None:
        return positions, valid
    groups = len(positions)
    return (
        torch.cat([above.positions.expand(groups, -1), positions], dim=1),
        torch.cat([above.valid.expand(groups, -1), valid], dim=1),
    )
