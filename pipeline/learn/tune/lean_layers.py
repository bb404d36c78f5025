"""Parts of a layer for the training of adapters, with gradients by their formulas: less memory and time.

Autograd keeps the intermediate results of every operation and passes over each of them again. A part here keeps what
its formula needs. Weights of the base are frozen: they have no gradient.
Shapes: N tokens, I inputs and O outputs of a linear layer, R rank of its adapter, E hidden size, F feed-forward size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from actors.engine.model.families import family_of, has_weights

if TYPE_CHECKING:
    from peft import PeftModel


def make_lean(adapted: PeftModel) -> None:
    """Replace the forward functions of adapters, RMS norms and gated feed-forwards in the decoder layers by formulas.

    Modules of other kinds keep the library's, such as adapters with dropout.
    """
    from peft.tuners import lora

    model: Any = adapted.get_base_model()
    has_formulas = has_weights(model.config)  # of norms and feed-forwards
    for module in family_of(model.config).layers(model).modules():
        if isinstance(module, lora.Linear) and _is_plain(module):
            module.forward = partial(_adapted, module)  # type: ignore[method-assign]
        elif has_formulas and hasattr(module, "variance_epsilon"):
            module.forward = partial(_normed, module)
        elif has_formulas and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            module.forward = partial(_fed_forward, module)


def _is_plain(module: Any) -> bool:
    """Whether an adapter is plain: W x + b + scale B A x, without dropout or a variant such as DoRA."""
    return (
        type(module.base_layer) is nn.Linear
        and not module.lora_variant
        and all(isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values())
        and all(up.bias is None for up in module.lora_B.values())
    )


def _compute_dtype(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _exact(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _adapted(module: Any, states: Tensor) -> Tensor:
    """[..., I] -> [..., O]."""
    base = module.base_layer
    if module.disable_adapters:
        plain: Tensor = base(states)
        return plain
    (name,) = module.active_adapters
    down, up = module.lora_A[name].weight, module.lora_B[name].weight
    states = states.to(_compute_dtype(states))
    bias = None if base.bias is None else base.bias.to(states.dtype)
    output: Tensor = Adapted.apply(states, base.weight.to(states.dtype), bias, down, up, module.scaling[name])
    return output


class Adapted(torch.autograd.Function):
    """W x + b + scale B A x of [..., I]; W [O, I] and b [O] are frozen. down: A [R, I]. up: B [O, R]."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        ctx.scale, ctx.dtype = scale, down.dtype
        down, up = down.to(states.dtype), up.to(states.dtype)
        inputs = states.flatten(0, -2)
        output = nn.functional.linear(inputs, weight, bias)
        low = inputs @ down.T  # [N, R]
        output.addmm_(low, up.T, alpha=scale)
        ctx.save_for_backward(states, weight, down, up, low)
        return output.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        states, weight, down, up, low = ctx.saved_tensors
        of_output = gradients[0].flatten(0, -2)
        of_low = of_output @ up  # [N, R], without the scale
        of_states = None
        if ctx.needs_input_grad[0]:
            of_states = (of_output @ weight).addmm_(of_low, down, alpha=ctx.scale).view_as(states)
        of_down = (of_low.T @ states.flatten(0, -2)).to(ctx.dtype).mul_(ctx.scale)
        of_up = (of_output.T @ low).to(ctx.dtype).mul_(ctx.scale)
        return of_states, None, None, of_down, of_up, None


def _normed(module: Any, states: Tensor) -> Tensor:
    """[..., E] -> [..., E] in the dtype of the products that follow."""
    output: Tensor = RmsNorm.apply(states, module.weight, module.variance_epsilon, _compute_dtype(states))
    return output


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight of [..., E], in `dtype`; the weight [E] is frozen."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        exact = _exact(states)
        inverse = exact.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, weight, inverse)
        return (exact * inverse).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        states, weight, inverse = ctx.saved_tensors
        exact, scaled = _exact(states), gradients[0] * weight
        shrinkage = (scaled * exact).mean(-1, keepdim=True).mul_(inverse**3)
        of_states = scaled.mul_(inverse).addcmul_(exact, shrinkage, value=-1)
        return of_states.to(states.dtype), None, None, None


def _fed_forward(module: Any, states: Tensor) -> Tensor:
    """[..., E] -> [..., E]."""
    output: Tensor = module.down_proj(Gated.apply(module.gate_proj(states), module.up_proj(states)))
    return output


class Gated(torch.autograd.Function):
    """silu(gate) * up, of [..., F] each."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        (of_output,) = gradients
        of_gate = torch.ops.aten.silu_backward(of_output * up, gate)
        return of_gate, nn.functional.silu(gate).mul_(of_output)
