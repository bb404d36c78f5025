"""Runs a tree of tokens through the layers without padding, level by level. Shared prefixes are computed once.

The levels of a tree are a prefix that all prompts share, each prompt's other tokens, and branches with the responses.
A token attends to the tokens above it in the tree, and to earlier tokens of its own branch, as at inference.
Shapes: N tokens, G groups (tokens of a level that attend to each other), K keys of a group, E hidden size, H key/value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.engine.decoder import Decoder, part
from actors.engine.torch.packed_attention import Attendance

SHARED = -1  # branch number of tokens to which all branches attend
PADDING = 2**62  # position that marks a key as padding
Places = tuple[Tensor, Tensor]  # positions and branches of keys, [G, K] each


@dataclass(frozen=True)
class Tokens:
    """The tokens of one tree level: each token's id, position, group, branch in the group, and number of layers."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    branches: Tensor
    depths: Tensor

    @classmethod
    def of(cls, tokens: Iterable[tuple[int, int, int, int, int]]) -> Tokens:
        """Build the tokens of a level from tuples (id, position, group, branch, depth)."""
        return cls(*torch.tensor(list(tokens), dtype=torch.long).view(-1, 5).T)


@dataclass
class Level:
    """The result of running one tree level: for each layer that ran, keys and values [G, H, K, D] and their places."""

    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: dict[int, Places] = field(default_factory=dict)


def prompt_tokens(rows: Sequence[Sequence[int]], start: int) -> Tokens:
    """Return tokens with one group per prompt in `rows`. Positions begin at `start`. Run them with `prompt_ranks`."""
    return Tokens.of(
        (token, start + place, group, SHARED, 1) for group, row in enumerate(rows) for place, token in enumerate(row)
    )


def prompt_ranks(layers: int, running: Iterable[int]) -> Tensor:
    """Return ranks [1, layers] for `run_level`: 0 for the layers in `running`, else 1. At depth 1, only rank 0 runs."""
    ranks = torch.ones(1, layers, dtype=torch.long)
    ranks[:, list(running)] = 0
    return ranks


def run_level(
    decoder: Decoder,  # decoder whose model uses the attention of `packed_attention`
    tokens: Tokens,  # at least one token; tokens of a branch are in order of position
    ranks: Tensor,  # [branches, layers], or [1, layers] for all branches; a token runs the layers with rank < depth
    groups: int,  # number of groups, G
    above: Sequence[Level] = (),  # levels above this level, highest level first
    *,
    recompute: bool = False,  # whether to use gradient checkpointing: the backward pass recomputes each layer
    # inputs [1, N, E] of layers 0, 1, …, kept from an earlier pass. The new pass starts at the last of these layers. It
    # appends the inputs of all layers after it, and the final output. None or empty: start at layer 0
    inputs: list[Tensor] | None = None,
) -> tuple[Tensor, Level]:
    """Run one tree level. Return its hidden states [1, N, E] before the final norm, and its keys and values."""
    device = decoder.device
    hidden, rotary = decoder.embed(tokens.ids[None].to(device), tokens.positions[None].to(device))
    inputs = [] if inputs is None else inputs
    if inputs:
        hidden = inputs.pop()
    runs = tokens.depths[None] > (ranks.T[:, tokens.branches] if len(ranks) > 1 else ranks.T)  # [layers, N]
    level = Level()
    layouts: dict[object, tuple[Tensor | None, Attendance, Places]] = {}
    for layer in range(len(inputs), decoder.num_layers):
        inputs.append(hidden)
        if not runs[layer].any():
            continue
        window, seen = decoder.windows[layer], [one for one in above if layer in one.states]
        key = (runs[layer].numpy().tobytes(), window, *(id(one.places[layer]) for one in seen))
        if key not in layouts:
            layouts[key] = _layout(tokens, runs[layer], groups, [one.places[layer] for one in seen], window, device)
        index, layout, level.places[layer] = layouts[key]
        attendance = Attendance(layout.tokens, layout.places, layout.visible, [one.states[layer] for one in seen])

        def run(
            states: Tensor, attendance: Attendance = attendance, layer: int = layer, index: Tensor | None = index
        ) -> tuple[Tensor, Tensor, Tensor]:
            rope = rotary[layer] if index is None else part(rotary[layer], columns=index)
            output = decoder.run_layer(layer, states, rope, attendance)
            assert attendance.states is not None
            return output, *attendance.states

        states = hidden if index is None else hidden.index_select(1, index)
        output, keys, values = checkpoint(run, states, use_reentrant=False) if recompute else run(states)
        hidden = output if index is None else hidden.index_copy(1, index, output)
        level.states[layer] = keys, values
    inputs.append(hidden)
    return hidden, level


def _layout(
    tokens: Tokens, runs: Tensor, groups: int, above: Sequence[Places], window: int | None, device: torch.device
) -> tuple[Tensor | None, Attendance, Places]:
    """Return the indices of the tokens that run a layer (None: all tokens), their `Attendance` (without `earlier`), and
    the positions and branches of their keys in the padded groups."""
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
    positions = torch.full((groups * columns,), PADDING)
    positions[places] = position
    padded, places, positions, branches = (
        values.to(device) for values in (padded, places, positions.view(groups, -1), branch[padded].view(groups, -1))
    )
    all_positions, all_branches = (
        torch.cat([one.expand(groups, -1) for one in (*earlier, own)], dim=1)[:, None]
        for *earlier, own in zip(*above, (positions, branches), strict=True)
    )
    visible = (all_positions < PADDING) & (all_positions <= positions[..., None])
    visible &= (all_branches == SHARED) | (all_branches == branches[..., None])
    if window is not None:
        visible &= all_positions > positions[..., None] - window
    visible |= (positions == PADDING)[..., None]  # let padding attend to all keys: softmax over no keys gives NaN
    whole = None if bool(runs.all()) else index.to(device)
    return whole, Attendance(padded, places, visible[:, None]), (positions, branches)
