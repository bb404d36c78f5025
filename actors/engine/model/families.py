"""The supported model families: how to reach the parts of transformers' models. Code for single families belongs here.

A new family needs an entry in FAMILIES and a tiny model in the engine's tests. To run on the CPU kernels too, it needs
a function that describes its layers as `LayerWeights`.
Shapes: B rows, S columns, N hidden states, E hidden size, V vocabulary size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from actors.engine.errors import UserError
from actors.engine.model.layer_weights import GELU, SILU, LayerWeights, NormWeights, Projection

if TYPE_CHECKING:  # only then, because a job's driver looks up families without importing torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig

Rotary: TypeAlias = "tuple[Tensor, Tensor] | None"  # cosines and sines
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu"),
    *("relu", "relu2"),
)
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")  # config.json keys for the activation


@dataclass(frozen=True)
class Family:
    """How to reach the parts of a transformers model of one family."""

    layers: Callable[[Any], nn.ModuleList]  # model -> its decoder layers
    embed: Callable[[Any, Tensor, Tensor], Tensor]  # (model, ids [B, S], positions [B, S]) -> embeddings [B, S, E]
    # (model, hidden states, positions) -> rotary cosines and sines [B, S, R] of each layer, or None
    rotary: Callable[[Any, Tensor, Tensor], Sequence[Rotary]]
    # (model, hidden states [N, E]) -> input of the vocabulary head; in most families the final norm's output
    finish: Callable[[Any, Tensor], Tensor]
    # config -> sliding window of each layer: number of keys that a token attends to, with its own; None: all keys
    windows: Callable[[PretrainedConfig], list[int | None]] = lambda config: [None] * config.num_hidden_layers
    attention: str = "sdpa"  # name of the attention implementation in transformers
    cache_argument: str = "past_key_values"  # name of the KV cache argument of transformers' layers
    # model -> (token table [V, E], position table [positions, E] or None, factor). Embedding: factor * token's row +
    # position's row. Used only for families with `weights`
    embeddings: Callable[[Any], tuple[Tensor, Tensor | None, float]] = lambda model: (
        model.model.embed_tokens.weight,
        None,
        1.0,
    )
    # transformers' layer -> its description without the sliding window; None: the CPU kernels cannot run the family
    weights: Callable[[Any], LayerWeights] | None = None
    # model -> its final norm if `finish` computes nothing else, otherwise None. Used only for families with `weights`
    last_norm: Callable[[Any], NormWeights | None] = lambda model: NormWeights.of(model.model.norm)


def _no_rotary(model: Any, hidden: Tensor, positions: Tensor) -> list[Rotary]:
    return [None] * int(model.config.num_hidden_layers)


def _one_window(config: PretrainedConfig) -> list[int | None]:
    """Return the same sliding window for all layers, as in Mistral and Phi-3, which ignore `layer_types`."""
    return [config.sliding_window] * config.num_hidden_layers


def _window_by_layer(config: PretrainedConfig) -> list[int | None]:
    return [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]


def _opt_embed(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    decoder = model.model.decoder
    hidden: Tensor = decoder.embed_tokens(ids)
    if decoder.project_in is not None:
        hidden = decoder.project_in(hidden)
    # the first argument, a mask, is unused if positions are given
    learned: Tensor = decoder.embed_positions(None, position_ids=positions)
    return hidden + learned


def _opt_embeddings(model: Any) -> tuple[Tensor, Tensor, float]:
    decoder = model.model.decoder
    table, learned = decoder.embed_tokens.weight.detach(), decoder.embed_positions
    if decoder.project_in is not None:
        table = decoder.project_in(table)
    return table, learned.weight[learned.offset :], 1.0


def _opt_finish(model: Any, hidden: Tensor) -> Tensor:
    decoder = model.model.decoder
    if decoder.final_layer_norm is not None:
        hidden = decoder.final_layer_norm(hidden)
    if decoder.project_out is not None:
        hidden = decoder.project_out(hidden)
    return hidden


def _opt_last_norm(model: Any) -> NormWeights | None:
    decoder = model.model.decoder
    if decoder.final_layer_norm is None or decoder.project_out is not None:
        return None
    return NormWeights.of(decoder.final_layer_norm)


def _gemma_embeddings(model: Any) -> tuple[Tensor, None, float]:
    table = model.model.embed_tokens
    return table.weight, None, float(table.embed_scale.to(table.weight.dtype))


def _rotary_by_kind(model: Any, hidden: Tensor, positions: Tensor) -> list[Rotary]:
    """Return each layer's cosines and sines. Sliding and full layers have different rope parameters."""
    kinds = model.config.layer_types
    by_kind = {kind: model.model.rotary_emb(hidden, positions, kind) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


# field of `LayerWeights` -> path of the norm in transformers' layer
_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_BEFORE_IN_GEMMA3 = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_AFTER = {"attention_after": "post_attention_layernorm", "mlp_after": "post_feedforward_layernorm"}
_OF_HEADS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


def _gated(norms: dict[str, str], offset: float = 0.0) -> Callable[[Any], LayerWeights]:
    """Return a function that describes a layer whose feed-forward block is gated. offset: see `NormWeights.of`."""

    def describe(layer: Any) -> LayerWeights:
        attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
        found: dict[str, Any] = {name: NormWeights.of(attrgetter(path)(layer), offset) for name, path in norms.items()}
        if config.model_type == "phi3":  # one matrix for queries, keys and values; another for gate and up
            qkv, up = Projection.of(attention.qkv_proj), Projection.of(mlp.gate_up_proj)
        else:
            qkv = Projection.of(attention.q_proj, attention.k_proj, attention.v_proj)
            up = Projection.of(mlp.gate_proj, mlp.up_proj)
        return LayerWeights(
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            qkv=qkv,
            output=Projection.of(attention.o_proj),
            up=up,
            down=Projection.of(mlp.down_proj),
            activation=_activation(config),
            gated=True,
            rope=bool(getattr(attention, "use_rope", True)),  # some layers of SmolLM3 lack the rotary embedding
            **found,
        )

    return describe


def _activation(config: PretrainedConfig) -> str:
    """Return the name of the activation in a family with a gated feed-forward block."""
    return str(config.hidden_activation if config.model_type == "gemma3_text" else config.hidden_act)


def _opt_layer(layer: Any) -> LayerWeights:
    """Describe an OPT layer. It has no rope. A LayerNorm precedes each block; in OPT-350M it follows each residual."""
    attention = layer.self_attn
    return LayerWeights(
        query_heads=attention.num_heads,
        kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        qkv=Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
        output=Projection.of(attention.out_proj),
        up=Projection.of(layer.fc1),
        down=Projection.of(layer.fc2),
        activation=attention.config.activation_function,
        gated=False,
        attention_norm=NormWeights.of(layer.self_attn_layer_norm),
        mlp_norm=NormWeights.of(layer.final_layer_norm),
        norms_residual=not layer.do_layer_norm_before,
        rope=False,
    )


_LLAMA = Family(
    layers=lambda model: model.model.layers,
    embed=lambda model, ids, positions: model.model.embed_tokens(ids),
    rotary=lambda model, hidden, positions: (
        [model.model.rotary_emb(hidden, position_ids=positions)] * model.config.num_hidden_layers
    ),
    finish=lambda model, hidden: model.model.norm(hidden),
)
_BY_LAYER = replace(_LLAMA, windows=_window_by_layer)
_GEMMA = replace(
    _LLAMA, embeddings=_gemma_embeddings, last_norm=lambda model: NormWeights.of(model.model.norm, offset=1.0)
)

FAMILIES: dict[str, Family] = {
    "llama": replace(_LLAMA, weights=_gated(_BEFORE)),
    "mistral": replace(_LLAMA, windows=_one_window, weights=_gated(_BEFORE)),
    "qwen2": replace(_BY_LAYER, weights=_gated(_BEFORE)),
    "qwen3": replace(_BY_LAYER, weights=_gated(_BEFORE | _OF_HEADS)),
    "gemma": replace(_GEMMA, weights=_gated(_BEFORE, 1.0)),
    "gemma2": replace(_BY_LAYER, attention="eager"),  # sdpa cannot cap scores
    "gemma3_text": replace(
        _GEMMA,
        windows=_window_by_layer,
        rotary=_rotary_by_kind,
        weights=_gated(_BEFORE_IN_GEMMA3 | _AFTER | _OF_HEADS, 1.0),
    ),
    "phi3": replace(_LLAMA, windows=_one_window, weights=_gated(_BEFORE)),
    "olmo2": replace(_LLAMA, weights=_gated(_AFTER | _OF_HEADS)),
    "olmo3": replace(_BY_LAYER, rotary=_rotary_by_kind, weights=_gated(_AFTER | _OF_HEADS)),
    "smollm3": replace(_BY_LAYER, weights=_gated(_BEFORE)),
    "gpt_neox": Family(
        layers=lambda model: model.gpt_neox.layers,
        embed=lambda model, ids, positions: model.gpt_neox.emb_dropout(model.gpt_neox.embed_in(ids)),
        rotary=lambda model, hidden, positions: (
            [model.gpt_neox.rotary_emb(hidden, position_ids=positions)] * model.config.num_hidden_layers
        ),
        finish=lambda model, hidden: model.gpt_neox.final_layer_norm(hidden),
        cache_argument="layer_past",
    ),
    "gpt2": Family(
        layers=lambda model: model.transformer.h,
        embed=lambda model, ids, positions: model.transformer.drop(
            model.transformer.wte(ids) + model.transformer.wpe(positions)
        ),
        rotary=_no_rotary,
        finish=lambda model, hidden: model.transformer.ln_f(hidden),
    ),
    "opt": Family(
        layers=lambda model: model.model.decoder.layers,
        embed=_opt_embed,
        embeddings=_opt_embeddings,
        weights=_opt_layer,
        last_norm=_opt_last_norm,
        rotary=_no_rotary,
        finish=_opt_finish,
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read the sizes from a config of a supported family."""
        heads: int = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            # OPT has ffn_dim, GPT-2 has n_inner (null: 4 * hidden_size), all other families have intermediate_size
            feed_forward=getattr(config, "ffn_dim", None)
            or getattr(config, "intermediate_size", None)
            or getattr(config, "n_inner", None)
            or 4 * config.hidden_size,
            vocab=config.vocab_size,
        )


def family_of(config: PretrainedConfig) -> Family:
    """Return the model family of a config. Raises UserError if the family or a value in the config is unsupported."""
    family = family_named(config.model_type)
    if reason := unknown_value(config):
        raise UserError(f"model_type {config.model_type!r}: {reason}")
    return family


def family_named(model_type: object) -> Family:
    """Return the family of a model type. Raises UserError with the list of supported types if the type is unknown."""
    if model_type not in FAMILIES:
        only = "; of Gemma 3 only the text models (gemma3_text)" if model_type == "gemma3" else ""
        raise UserError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}{only}")
    return FAMILIES[str(model_type)]


def unknown_value(config: PretrainedConfig) -> str | None:
    """Return an error message about the first unsupported value of a config; None if all values are supported."""
    for key in ACTIVATION_KEYS:
        if (name := getattr(config, key, None)) is not None and name not in ACTIVATIONS:
            return f"{key} = {name!r}: supported: {', '.join(ACTIVATIONS)}"
    for parameters in _rope_parameters(config):
        if (name := parameters.get("rope_type", "default")) not in ROPE_TYPES:
            return f"rope_type = {name!r}: supported: {', '.join(ROPE_TYPES)}"
    kinds = getattr(config, "layer_types", None) or ()
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            return f"layer_types has {kind!r}; only {FULL} and {SLIDING} are supported"
    windows = family_named(config.model_type).windows(config)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=False)):
        if kind == SLIDING and window is None:
            return f"layer_types has {SLIDING!r} for layer {layer}, but sliding_window is null"
        if kind == FULL and window is not None:
            return f"layer_types has {FULL!r} for layer {layer}, but transformers uses sliding_window for it"
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention is not supported: earlier tokens would attend to later ones"
    if getattr(config, "add_cross_attention", None):
        return "add_cross_attention is not supported: there is no encoder"
    return None


def has_weights(config: PretrainedConfig) -> bool:
    """Return whether `layer_weights` can describe the model's layers. The CPU kernels need this description."""
    if family_of(config).weights is None:
        return False
    if config.model_type == "opt":
        return bool(config.layer_norm_elementwise_affine)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return False
    return _activation(config) in (*SILU, GELU)


def layer_weights(config: PretrainedConfig, layer: Any) -> LayerWeights:
    """Describe transformers' `layer` without copying its tensors. `has_weights(config)` must be true."""
    family = family_of(config)
    assert family.weights is not None
    return replace(family.weights(layer), window=family.windows(config)[layer.self_attn.layer_idx])


def context_length(config: PretrainedConfig) -> int:
    """Return the maximum number of tokens of a prompt and its answer together.

    The rope types `dynamic` and `longrope` rotate all keys differently once a row exceeds a certain length. Cached keys
    would keep the old rotation, so rows must end at that length. For `dynamic` it is `max_position_embeddings`. Many
    configs with `yarn` keep the original length in `max_position_embeddings`: the factor extends it, as in vLLM.
    """
    lengths: list[int] = [config.max_position_embeddings]
    for parameters in _rope_parameters(config):
        original = parameters.get("original_max_position_embeddings") or lengths[0]
        if parameters.get("rope_type") == "longrope":
            lengths.append(original)
        elif parameters.get("rope_type") == "yarn":
            lengths[0] = max(lengths[0], int(original * parameters["factor"]))
    return min(lengths)


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters of a config. Gemma 3 nests separate parameters for each kind of layer in them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]
