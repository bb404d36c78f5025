"""Checkpoint folder -> decoder, tokenizer and schedule. Safetensors only; never runs code from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.schedule import Schedule, ScheduleSpec, load_spec

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from actors.engine.decoder import Decoder

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that has been looked at, but not loaded."""

    path: Path
    config: PretrainedConfig
    spec: ScheduleSpec | None
    num_layers: int
    context_length: int

    def schedule(self, changes: dict[str, Any]) -> Schedule:
        """The stored schedule with a job's `changes` on top; ValueError says what does not fit."""
        try:
            return (self.spec or ScheduleSpec()).overridden(changes).build(self.num_layers)
        except ValueError as error:
            raise ValueError(f"schedule: {error}") from None


def inspect(path: str | Path) -> Checkpoint:
    """Check a checkpoint folder without reading its weights.

    Raises ValueError of one line: no such folder, no safetensors, a family that is not supported, or a
    ``skipdecode.json`` that does not fit the model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from actors.engine.decoder import check_supported

    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such checkpoint folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a checkpoint: no config.json")
    try:
        kind = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'}: not JSON: {error}") from None
    if not any((folder / name).is_file() for name in WEIGHTS):
        other = sorted(one.name for one in folder.iterdir() if one.suffix in (".bin", ".pt", ".pth"))
        found = f"; {other[0]} is a pickle, which is not loaded: convert it" if other else ""
        raise ValueError(f"{folder}: no safetensors weights ({' or '.join(WEIGHTS)}){found}")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"{folder}: no tokenizer ({' or '.join(TOKENIZERS)})")
    if "auto_map" in kind:
        raise ValueError(f"{folder}: wants to run code of its own (auto_map), which is never done")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_supported(config)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[0]}") from None
    spec = load_spec(folder, config.num_hidden_layers)
    return Checkpoint(folder, config, spec, config.num_hidden_layers, config.max_position_embeddings)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_decoder(path: str | Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The checkpoint's weights as a decoder in inference mode, `dtype` on `device`. ValueError if some are missing."""
    from transformers import AutoModelForCausalLM

    from actors.engine.decoder import Decoder

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        output_loading_info=True,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
    )
    model, found = loaded
    if found["missing_keys"]:  # the library would answer with random weights in their place
        raise ValueError(f"{path}: no weights for {sorted(found['missing_keys'])[0]}")
    return Decoder(model.to(device).eval().requires_grad_(False))


def stop_ids(decoder: Decoder, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end a row: those of the generation config, else the tokenizer's end of sequence."""
    config = decoder.model.generation_config
    ids = config.eos_token_id if config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
