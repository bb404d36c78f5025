"""Decides which layers run for which generated token: depth curve and layer order (keep order). Needs no torch.

SkipDecode (Del Corro et al., 2023, arXiv 2307.02628). Positions t = 0, 1, 2 ... count the *generated* tokens of a row.
The decode step with token t as input runs ``depth(t)`` of the model's L layers. Depth never rises along a row. The
layers that run at one depth include all layers that run at any smaller depth. So a layer that runs for a token has run
for every earlier token of that row: no layer's KV cache has a hole, and nothing is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from actors.engine.errors import UserError, suggestion

Decay = Literal["linear", "cosine", "power", "step", "constant"]
KeepOrder = Literal["paper", "even", "early_exit", "measured"]
PromptPolicy = Literal["full", "first"]
DECAYS: tuple[str, ...] = get_args(Decay)
MEASURED: Final = "measured"  # value of keep_order; `pipeline.learn.keep_order` replaces it with a list of layers
PROMPT_POLICIES: tuple[str, ...] = get_args(PromptPolicy)
MAX_HORIZON = 2**17  # maximum horizon in tokens; a longer one is surely a mistake, and its curve takes seconds to build


@dataclass(frozen=True)
class Schedule:
    """A schedule for one model: which layers run at each position.

    Raises:
        UserError: a depth rises or lies outside [warmup, L], or `keep_order` is not a permutation of the layers.
    """

    num_layers: int  # L, number of the model's decoder layers
    depths: tuple[int, ...]  # depths d(0), d(1), ... of the first positions; later positions have the last depth
    keep_order: tuple[int, ...]  # layer order, a permutation of the layers; depth d runs the first d layers in it
    warmup: int = 1  # number of lowest layers that always run; depth d includes them
    prompt: PromptPolicy = "full"  # layers for the prompt; ``full``: every layer, ``first``: the layers of d(0)
    speedup: float | None = None  # nominal speed-up from which the schedule was made; for information only

    def __post_init__(self) -> None:
        layers = self.num_layers
        if layers < 1:
            raise UserError(f"num_layers = {layers}: must be at least 1")
        if not 0 <= self.warmup <= layers:
            raise UserError(f"warmup = {self.warmup}: must lie in [0, {layers}]")
        if self.prompt not in PROMPT_POLICIES:  # programs may pass a schedule of their own to `EngineSettings`
            raise UserError(f"prompt = {self.prompt!r}: must be one of {', '.join(PROMPT_POLICIES)}")
        if not self.depths:
            raise UserError("depths is empty: give at least one depth")
        lowest = max(self.warmup, 1)
        for t, depth in enumerate(self.depths):
            if not lowest <= depth <= layers:
                raise UserError(f"depths[{t}] = {depth}: must lie in [{lowest}, {layers}]")
            if t and depth > self.depths[t - 1]:
                raise UserError(f"depths[{t}] = {depth} rises above depths[{t - 1}] = {self.depths[t - 1]}")
        if len(self.keep_order) != layers:
            raise UserError(f"keep_order has {len(self.keep_order)} entries for {layers} layers")
        seen: dict[int, int] = {}
        for rank, layer in enumerate(self.keep_order):
            if not 0 <= layer < layers:
                raise UserError(f"keep_order[{rank}] = {layer}: no such layer; must lie in [0, {layers - 1}]")
            if layer in seen:
                raise UserError(f"keep_order[{rank}] = {layer} repeats keep_order[{seen[layer]}]")
            seen[layer] = rank
        if sorted(self.keep_order[: self.warmup]) != list(range(self.warmup)):
            raise UserError(f"keep_order must begin with the {self.warmup} warm-up layers 0 to {self.warmup - 1}")

    def depth(self, position: int) -> int:
        """Return d(t): how many layers run in the decode step whose input is generated token t = `position`."""
        depths = self.depths
        return depths[position] if position < len(depths) else depths[-1]  # no helper call: this runs for every token

    def layers(self, position: int) -> tuple[int, ...]:
        """Return the layers that run when generated token `position` is the input, lowest layer first."""
        return tuple(sorted(self.keep_order[: self.depth(position)]))

    @property
    def name(self) -> str:
        """Name of the schedule's speed for users, such as `2x`."""
        if self.is_full_depth:
            return "1x"
        return f"{self.speedup:g}x" if self.speedup is not None else "the configured depths"

    @property
    def is_full_depth(self) -> bool:
        """Whether every token, prompt tokens included, runs every layer."""
        return self.depths[-1] == self.num_layers

    @property
    def is_uniform(self) -> bool:
        """Whether every token, prompt tokens included, runs the same layers. True at full depth too."""
        return self.depths[0] == self.depths[-1] == len(self.prompt_layers)

    @property
    def prompt_layers(self) -> tuple[int, ...]:
        """The layers that run over the prompt, lowest layer first. No token runs a layer that is not among them."""
        return tuple(range(self.num_layers)) if self.prompt == "full" else self.layers(0)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """For each layer, its index (rank) in `keep_order`. A layer runs if the depth is greater than its rank."""
        ranks = [0] * self.num_layers
        for rank, layer in enumerate(self.keep_order):
            ranks[layer] = rank
        return tuple(ranks)

    def uses(self, layer: int, max_new_tokens: int) -> int:
        """Return for how many of the `max_new_tokens` - 1 decode steps a row needs `layer`.

        Depth never rises, so a layer runs from the first step on, and once it stops, it never runs again.
        """
        steps = max(max_new_tokens - 1, 0)
        rank = self.ranks[layer]
        inside = sum(1 for depth in self.depths[:steps] if depth > rank)
        past = max(steps - len(self.depths), 0)
        return inside + (past if self.depths[-1] > rank else 0)

    def layer_steps(self, steps: int) -> int:
        """Return the number of layers that the first `steps` decode steps run: the sum of d(t) over these steps."""
        inside = sum(self.depths[: max(steps, 0)])
        return inside + max(steps - len(self.depths), 0) * self.depths[-1]

    def mean_depth(self, generated_tokens: int) -> float | None:
        """Return the mean depth of a row's decode steps; None if there are none (at most one generated token)."""
        steps = generated_tokens - 1
        return self.layer_steps(steps) / steps if steps > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the values that determine which layers run, for example for a job's fingerprint."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "speedup"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule as written in a job file or in a checkpoint's ``skipdecode.json``. The fields are the keys of both.

    Depth is set by `depths` (an explicit list), by `max_depth` and `min_depth`, or by `speedup`. If none of these is
    set, every layer runs.
    """

    speedup: float | None = field(
        default=None, metadata={"text": "nominal speed-up: layers ÷ mean layers per token over the horizon"}
    )
    max_depth: int | None = field(default=None, metadata={"text": "number of layers for generated token 0"})
    min_depth: int | None = field(
        default=None, metadata={"text": "number of layers for generated tokens from the horizon's end on"}
    )
    depths: tuple[int, ...] | None = field(
        default=None,
        metadata={
            "text": "number of layers for generated tokens 0, 1, ...; the last number applies to all later tokens"
        },
    )
    horizon: int | None = field(default=None, metadata={"text": "number of generated tokens over which depth falls"})
    decay: Decay = field(
        default="linear",
        metadata={
            "text": "curve along which depth (layers per token) falls over the horizon. With constant and prompt: "
            "first all tokens run the same layers, so vLLM loads a smaller model"
        },
    )
    power: float = field(default=2.0, metadata={"text": "exponent of the curve if decay is power"})
    steps: int = field(default=4, metadata={"text": "number of steps of the curve if decay is step"})
    warmup: int = field(default=1, metadata={"text": "number of lowest layers that always run"})
    keep_order: KeepOrder | tuple[int, ...] = field(
        default="paper",
        metadata={"text": "order of layers, the most needed first; measured: adapt measures it"},
    )
    prompt: PromptPolicy = field(
        default="full",
        metadata={"text": "layers that process the prompt. full: all layers; first: the layers of generated token 0"},
    )

    def build(self, num_layers: int) -> Schedule:
        """Build the schedule for a model with `num_layers` layers. Raises UserError if a key or a depth is wrong."""
        keep_order = self._keep_order(num_layers)
        depths = self._depths(num_layers)
        return Schedule(num_layers, depths, keep_order, self.warmup, self.prompt, self.speedup)

    def _keep_order(self, num_layers: int) -> tuple[int, ...]:
        if not isinstance(self.keep_order, str):
            return tuple(self.keep_order)
        if not 0 <= self.warmup <= num_layers:
            raise UserError(f"warmup = {self.warmup}: must lie in [0, {num_layers}]")
        if self.keep_order == MEASURED:
            raise UserError(
                "keep_order = measured: `skipdecode adapt` measures the order and stores it with what it trains; here "
                f"keep_order must be {', '.join(KEEP_ORDERS)} or a list of layers"
            )
        return KEEP_ORDERS[self.keep_order](num_layers, self.warmup)

    def _depths(self, num_layers: int) -> tuple[int, ...]:
        depth_keys = [name for name in ("depths", "speedup") if getattr(self, name) is not None] + (
            ["max_depth/min_depth"] if (self.max_depth, self.min_depth) != (None, None) else []
        )
        if len(depth_keys) > 1:
            raise UserError(f"{' and '.join(depth_keys)} both set the depth: keep one of them")
        if self.depths is not None:
            return tuple(self.depths)
        if self.speedup is not None:
            if self.decay == "constant":
                max_depth = min_depth = max(self.warmup, 1, round(num_layers / _ratio(self.speedup)))
            else:
                max_depth, min_depth = depths_for_speedup(num_layers, self.speedup, self.warmup)
        else:
            max_depth = num_layers if self.max_depth is None else self.max_depth
            min_depth = max_depth if self.min_depth is None else self.min_depth
        if min_depth > max_depth:
            raise UserError(f"min_depth = {min_depth} lies above max_depth = {max_depth}")
        if max_depth == min_depth or self.decay == "constant":
            if max_depth != min_depth:
                raise UserError(f"decay = constant needs max_depth = min_depth, not {max_depth} and {min_depth}")
            return (max_depth,)
        if self.horizon is None:
            raise UserError(
                "horizon is not set and the checkpoint has none: give schedule.horizon, the number of generated "
                "tokens over which depth falls (the median answer length is a good choice)"
            )
        return curve(self.decay, max_depth, min_depth, self.horizon, power=self.power, steps=self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all values that are not None, as JSON types."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value is not None
        }

    def overridden(self, changes: Mapping[str, Any]) -> ScheduleSpec:
        """Return a copy with `changes`. If they set a key for depth, the other keys for depth are dropped.

        Raises UserError if a key is unknown or a value has a wrong type.
        """
        depth_keys = ("speedup", "max_depth", "min_depth", "depths")
        base = self
        if any(changes.get(key) is not None for key in depth_keys):
            base = replace(self, speedup=None, max_depth=None, min_depth=None, depths=None)
        return replace(base, **{name: checked(name, value) for name, value in changes.items()})


@cache
def key_types() -> Mapping[str, tuple[Any, ...]]:
    """Return the types of each key of a schedule, such as (float, NoneType)."""
    hints = get_type_hints(ScheduleSpec)
    return {one.name: _parts(hints[one.name]) for one in fields(ScheduleSpec)}


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def checked(name: str, value: Any) -> Any:
    """Return the value of a schedule's key, with a list as a tuple.

    Raises UserError if the key is unknown, or the value has a wrong type.
    """
    if name not in key_types():
        raise UserError(f"unknown key {name!r}; {suggestion(name, key_types())}")
    value = tuple(value) if isinstance(value, list) else value
    wanted = []
    for kind in key_types()[name]:
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return value
        if kind is type(value) and kind is not float:
            return value
        if kind == tuple[int, ...]:
            if isinstance(value, tuple) and all(type(entry) is int for entry in value):
                if len(value) > MAX_HORIZON:
                    raise UserError(f"{name} has {len(value)} entries, more than {MAX_HORIZON}")
                return value
            wanted.append("a list of whole numbers")
        elif get_origin(kind) is Literal:
            if value in get_args(kind):
                return value
            wanted += get_args(kind)
        elif kind is not type(None):
            wanted.append("a whole number" if kind is int else "a finite number")
    raise UserError(f"{name} = {value!r}: must be {' or '.join(wanted)}")


def depths_for_speedup(num_layers: int, speedup: float, warmup: int = 1) -> tuple[int, int]:
    """Return (max depth, min depth) for a nominal speed-up s: max = round(4 L / (3 s)), min = round(2 L / s) - max."""
    ratio = _ratio(speedup)
    lowest = min(warmup + 1, num_layers)
    max_depth = max(lowest, min(num_layers, round(Fraction(4 * num_layers, 3) / ratio)))
    min_depth = max(lowest, round(Fraction(2 * num_layers) / ratio) - max_depth)
    return max_depth, min(min_depth, max_depth)


def curve(
    decay: str, max_depth: int, min_depth: int, horizon: int, *, power: float = 2.0, steps: int = 4
) -> tuple[int, ...]:
    """Return the depths d(0) ... d(horizon - 1), which fall from `max_depth` to `min_depth`."""
    if not 2 <= horizon <= MAX_HORIZON:
        raise UserError(f"horizon = {horizon}: must lie in [2, {MAX_HORIZON}]")
    span = max_depth - min_depth
    depths: list[int] = []
    for t in range(horizon):
        fallen = fall(decay, Fraction(t, horizon - 1), power=power, steps=steps)
        depths.append(max_depth - round(fallen * span) if decay != "linear" else round(max_depth - fallen * span))
    for t in range(1, horizon):  # make sure that float rounding does not let the curve rise
        depths[t] = min(depths[t], depths[t - 1])
    return tuple(depths)


def fall(decay: str, done: Fraction, *, power: float = 2.0, steps: int = 4) -> float | Fraction:
    """Return how far depth has fallen, from 0 (max depth) to 1 (min depth), at fraction `done` (0 to 1) of the horizon.

    Raises UserError if `power` or `steps` is out of range.
    """
    if decay == "power" and not 0 < power < math.inf:
        raise UserError(f"power = {power}: must be above 0")
    if decay == "step" and steps < 2:
        raise UserError(f"steps = {steps}: must be at least 2")
    if decay == "cosine":
        return (1 - math.cos(math.pi * float(done))) / 2
    if decay == "power":
        fallen: float = float(done) ** power
        return fallen
    if decay == "step":
        return min(math.floor(done * steps), steps - 1) / (steps - 1)
    return done  # an exact fraction, so that linear depths do not depend on float rounding


def paper_order(num_layers: int, warmup: int) -> tuple[int, ...]:
    """Return the paper's layer order: the lowest `warmup` layers, then all others from the top layer down."""
    return (*range(warmup), *range(num_layers - 1, warmup - 1, -1))


def even_order(num_layers: int, warmup: int) -> tuple[int, ...]:
    """Return an order that begins with the lowest `warmup` layers and the top layer.

    Each further layer is the one with the largest distance to its nearest layer in the order so far.
    """
    order = list(range(warmup))
    if num_layers > warmup:
        order.append(num_layers - 1)
    rest = set(range(warmup, num_layers - 1))
    while rest:
        layer = max(rest, key=lambda layer: (min(abs(layer - kept) for kept in order), layer))
        order.append(layer)
        rest.remove(layer)
    return tuple(order)


def early_exit_order(num_layers: int, warmup: int = 0) -> tuple[int, ...]:
    """Return the layers from the lowest one up. Schedules then skip upper layers, as if tokens left the model early."""
    return tuple(range(num_layers))


KEEP_ORDERS = {"paper": paper_order, "even": even_order, "early_exit": early_exit_order}


def _ratio(speedup: float) -> Fraction:
    if not 1 <= speedup < math.inf:
        raise UserError(f"speedup = {speedup}: must be at least 1")
    return Fraction(speedup).limit_denominator(10_000)
