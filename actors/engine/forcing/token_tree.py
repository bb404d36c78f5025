"""Runs a tree of tokens through the layers without padding, level by level: what branches share is computed once.

The levels of a tree are, say, the tokens that all prompts begin with, each prompt's own ones, and what follows them in
several branches. A token attends to the tokens above it and to the earlier ones of its own branch, as at inference.
Shapes: N tokens, G groups (tokens of a level that attend to each other), K keys of a group, E hidden size, H key/value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.engine.decoder import Decoder, part
from actors.engine.forcing.packed_attention import Attendance
from actors.engine.schedules.schedule import Schedule

SHARED = -1  # branch of the tokens above all branches


@dataclass(frozen=True)
class Tokens:
    """N tokens of one level, [N] each: group, branch within it, and number of layers to run."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    branches: Tensor
    depths: Tensor


@dataclass(frozen=True)
class Places:
    """What the keys of groups are, [G, K] each: positions, branches, and whether there is a token at all."""

    positions: Tensor
    branches: Tensor
    valid: Tensor


@dataclass
class Level:
    """What the levels below need of a level: by layer, keys and values [G, H, K, D] and their places.

    rows: of each group below, the group of this level; None: the group of the same number, or the only one.
    """

    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: dict[int, Places] = field(default_factory=dict)
    rows: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.states.values())

    def states_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values for each group below."""
        keys, values = self.states[layer]
        return (keys, values) if self.rows is None else (keys[self.rows], values[self.rows])

    def places_of(self, layer: int) -> Places:
        """Places for each group below."""
        places, rows = self.places[layer], self.rows
        return places if rows is None else Places(places.positions[rows], places.branches[rows], places.valid[rows])


def prompt_tokens(rows: Sequence[Sequence[int]], start: int) -> Tokens:
    """A level of prompts: ids of each group, at positions from `start` on. It is run with `prompt_ranks`."""
    lengths = torch.tensor([len(row) for row in rows])
    count = int(lengths.sum())
    positions = [start + place for row in rows for place in range(len(row))]
    return Tokens(
        ids=torch.tensor([token for row in rows for token in row], dtype=torch.long),
        positions=torch.tensor(positions, dtype=torch.long),
        groups=torch.repeat_interleave(lengths),
        branches=torch.full((count,), SHARED),
        depths=torch.ones(count, dtype=torch.long),
    )


def prompt_ranks(schedule: Schedule) -> Tensor:
    """[1, layers]: 0 for a layer that runs over prompts, for others a rank that no depth of `prompt_tokens` exceeds."""
    ranks = torch.ones(1, schedule.num_layers, dtype=torch.long)
    ranks[:, list(schedule.prompt_layers)] = 0
    return ranks


def run_level(
    decoder: Decoder, tokens: Tokens, ranks: Tensor, groups: int, above: Sequence[Level], *, recompute: bool = False
) -> tuple[Tensor, Level]:
    """Hidden states [1, N, E] of one level before the final norm, and the level for those below.

    Args:
        decoder: its model's attention is that of `packed_attention`.
        tokens: at least one; those of a branch lie in the order of their positions.
        ranks: [branches, layers], or [1, layers] for all; a layer runs for the tokens of greater depth.
        groups: G.
        above: the levels above, highest first.
        recompute: keep only each layer's input for the backward pass (gradient checkpointing).
    """
    device = decoder.device
    hidden, rotary = decoder.embed(tokens.ids[None].to(device), tokens.positions[None].to(device))
    runs = tokens.depths[None] > (ranks.T[:, tokens.branches] if len(ranks) > 1 else ranks.T)  # [layers, N]
    level = Level()
    layouts: dict[object, tuple[Tensor | None, Attendance, Places]] = {}
    for layer in range(decoder.num_layers):
        if not runs[layer].any():
            hidden = decoder.skip_layer(layer, hidden, ~runs[layer])
            continue
        window, seen = decoder.windows[layer], [one for one in above if layer in one.states]
        key = (runs[layer].numpy().tobytes(), window, *(id(one.places[layer]) for one in seen))
        if key not in layouts:
            places = [one.places_of(layer) for one in seen]
            layouts[key] = _layout(tokens, runs[layer], groups, places, window, device)
        index, layout, level.places[layer] = layouts[key]
        earlier = [one.states_of(layer) for one in seen]
        attendance = Attendance(layout.tokens, layout.places, layout.visible, earlier)

        def run(
            inputs: Tensor, attendance: Attendance = attendance, layer: int = layer, index: Tensor | None = index
        ) -> tuple[Tensor, Tensor, Tensor]:
            rope = rotary[layer] if index is None else part(rotary[layer], columns=index)
            output = decoder.run_layer(layer, inputs, rope, attendance)
            assert attendance.states is not None
            return output, *attendance.states

        inputs = hidden if index is None else hidden.index_select(1, index)
        output, keys, values = checkpoint(run, inputs, use_reentrant=False) if recompute else run(inputs)
        if index is None:
            hidden = output
        else:
            hidden = decoder.skip_layer(layer, hidden, ~runs[layer]).index_copy(1, index, output)
        level.states[layer] = keys, values
    return hidden, level


def _layout(
    tokens: Tokens, runs: Tensor, groups: int, above: Sequence[Places], window: int | None, device: torch.device
) -> tuple[Tensor | None, Attendance, Places]:
    """Index of the tokens that run, None for all; the keys that they attend to, without `earlier`; their places."""
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
    own = Places(position[padded].view(groups, -1), branch[padded].view(groups, -1), real)
    positions, branches, valid = (
        torch.cat([getattr(one, name).expand(groups, -1) for one in (*above, own)], dim=1)[:, None]
        for name in ("positions", "branches", "valid")
    )
    visible = valid & (positions <= own.positions[..., None])
    visible &= (branches == SHARED) | (branches == own.branches[..., None])
    if window is not None:
        visible &= positions > own.positions[..., None] - window
    visible |= ~real[..., None]  # padding sees all keys, or softmax gives NaN
    return None if bool(runs.all()) else index.to(device), Attendance(padded, places, visible[:, None]), own
