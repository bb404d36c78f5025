"""The model families that can be run, and how to reach the parts of each; the only file that knows them.

A further family is one more entry of FAMILIES and one more tiny model in the engine's tests.
Shapes: B rows, S columns, N hidden states, E hidden size, D rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from actors.engine.errors import UserError

Rotary = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Family:
    """How to reach the parts of one model family, and in what its attention differs.

    embed: (model, ids [B, S], positions [B, S]) -> hidden states [B, S, E].
    embeddings: model -> the tables [V, E] by token and [positions, E] by position, or None, the sum of whose rows is
    `embed`; None: it is not.
    rotary: (model, hidden states, positions) -> for each layer cosines and sines [B, S, D], or None.
    finish: (model, hidden states [N, E]) -> what the vocabulary head takes.
    windows: config -> for each layer how many keys a token sees, its own counted; None is all.
    attention: the library's implementation that computes what the family asks for.
    cache_argument: the name under which its layers take a cache.
    unsupported: config -> why this checkpoint cannot be run exactly, None if it can.
    """

    layers: Callable[[Any], nn.ModuleList]
    embed: Callable[[Any, Tensor, Tensor], Tensor]
    rotary: Callable[[Any, Tensor, Tensor], Sequence[Rotary]]
    finish: Callable[[Any, Tensor], Tensor]
    windows: Callable[[PretrainedConfig], list[int | None]] = lambda config: [None] * config.num_hidden_layers
    attention: str = "sdpa"
    cache_argument: str = "past_key_values"
    unsupported: Callable[[PretrainedConfig], str | None] = lambda config: None
    embeddings: Callable[[Any], tuple[Tensor, Tensor | None] | None] = lambda model: None


def _no_rotary(model: Any, hidden: Tensor, positions: Tensor) -> list[Rotary]:
    return [None] * int(model.config.num_hidden_layers)


def _one_window(config: PretrainedConfig) -> list[int | None]:
    """Mistral and Phi-3 take their window at every layer, whatever `layer_types` says."""
    return [config.sliding_window] * config.num_hidden_layers


def _window_by_layer(config: PretrainedConfig) -> list[int | None]:
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def _unsupported_layers(config: PretrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"layer_types has {sorted(unknown)[0]!r}; full_attention and sliding_attention can be run"
    if "sliding_attention" in kinds and config.sliding_window is None:
        return "layer_types has 'sliding_attention', but sliding_window is null"
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention: earlier tokens would see later ones"
    return None


def _by_token(model: Any) -> tuple[Tensor, None]:
    return model.model.embed_tokens.weight, None


def _opt_embed(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    decoder = model.model.decoder
    hidden: Tensor = decoder.embed_tokens(ids)
    if decoder.project_in is not None:
        hidden = decoder.project_in(hidden)
    # the mask argument is unused when positions are given
    learned: Tensor = decoder.embed_positions(None, position_ids=positions)
    return hidden + learned


def _opt_embeddings(model: Any) -> tuple[Tensor, Tensor | None] | None:
    decoder = model.model.decoder
    if decoder.project_in is not None:
        return None
    places = decoder.embed_positions
    return decoder.embed_tokens.weight, places.weight[places.offset :]


def _opt_finish(model: Any, hidden: Tensor) -> Tensor:
    decoder = model.model.decoder
    if decoder.final_layer_norm is not None:
        hidden = decoder.final_layer_norm(hidden)
    if decoder.project_out is not None:
        hidden = decoder.project_out(hidden)
    return hidden


def _gpt2_embed(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    parts = model.transformer
    hidden: Tensor = parts.drop(parts.wte(ids) + parts.wpe(positions))
    return hidden


def _gpt2_unsupported(config: PretrainedConfig) -> str | None:
    return "add_cross_attention: it answers to an encoder, which is not there" if config.add_cross_attention else None


def _rotary_by_kind(model: Any, hidden: Tensor, positions: Tensor) -> list[Rotary]:
    """Sliding layers turn otherwise than full ones."""
    kinds = model.config.layer_types
    by_kind = {kind: model.model.rotary_emb(hidden, positions, kind) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


_LLAMA = Family(
    layers=lambda model: model.model.layers,
    embed=lambda model, ids, positions: model.model.embed_tokens(ids),
    rotary=lambda model, hidden, positions: (
        [model.model.rotary_emb(hidden, position_ids=positions)] * model.config.num_hidden_layers
    ),
    finish=lambda model, hidden: model.model.norm(hidden),
)
_BY_LAYER = replace(_LLAMA, windows=_window_by_layer, unsupported=_unsupported_layers)

FAMILIES: dict[str, Family] = {
    "llama": replace(_LLAMA, embeddings=_by_token),
    "mistral": replace(_LLAMA, windows=_one_window, embeddings=_by_token),
    "qwen2": replace(_BY_LAYER, embeddings=_by_token),
    "qwen3": _BY_LAYER,
    "gemma": replace(_LLAMA, unsupported=_unsupported_layers),
    "gemma2": replace(_BY_LAYER, attention="eager"),  # sdpa cannot cap scores
    "gemma3_text": replace(_BY_LAYER, rotary=_rotary_by_kind),
    "phi3": replace(_LLAMA, windows=_one_window),
    "olmo2": _LLAMA,
    "olmo3": replace(_BY_LAYER, rotary=_rotary_by_kind),
    "smollm3": _BY_LAYER,  # its layers know themselves which of them turn
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
        embed=_gpt2_embed,
        rotary=_no_rotary,
        finish=lambda model, hidden: model.transformer.ln_f(hidden),
        unsupported=_gpt2_unsupported,
    ),
    "opt": Family(
        layers=lambda model: model.model.decoder.layers,
        embed=_opt_embed,
        embeddings=_opt_embeddings,
        rotary=_no_rotary,
        finish=_opt_finish,
    ),
}


def family_of(config: PretrainedConfig) -> Family:
    """ValueError, listing the supported families, if a model of this config cannot be run."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        only = "; of Gemma 3 only the text models (gemma3_text)" if config.model_type == "gemma3" else ""
        raise UserError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}{only}")
    if reason := family.unsupported(config):
        raise UserError(f"model_type {config.model_type!r}: {reason}")
    return family


def context_length(config: PretrainedConfig) -> int:
    """Most tokens of a row, prompt and answer together.

    Rotary types `dynamic` and `longrope` turn all earlier keys anew beyond a length, which no cache can
    follow: rows end there. For `dynamic` it is the context itself.
    """
    given = getattr(config, "rope_parameters", None) or {}
    lengths: list[int] = [config.max_position_embeddings]
    # nested by kind of layer in Gemma 3
    for parameters in (given, *(one for one in given.values() if isinstance(one, dict))):
        if parameters.get("rope_type") == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
    return min(lengths)


def has_pages(config: PretrainedConfig) -> bool:
    """Whether a GPU runs it by `gpu`'s layers, with a cache in pages: Llama, Mistral, Qwen2, OPT, without windows."""
    if any(window is not None for window in family_of(config).windows(config)):
        return False
    if config.model_type == "opt":
        return bool(config.layer_norm_elementwise_affine)
    # where the host would have to look how long rows are, a graph could not follow
    turns = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    gated = config.model_type in ("llama", "mistral", "qwen2") and config.hidden_act in ("silu", "swish")
    return gated and turns not in ("dynamic", "longrope")
