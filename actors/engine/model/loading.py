"""Loads decoder and schedule from a checkpoint folder. Reads safetensors only; runs no code from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError, flat
from actors.engine.model.file_digests import read_object
from actors.engine.model.fitting import check_report
from actors.engine.model.speed_adapter import SpeedAdapter, check_shapes, read_adapter
from actors.engine.model.tokenizer import TOKENIZER, TOKENIZER_CONFIG
from actors.engine.model.weights import (
    ITEM_BYTES,
    Need,
    StoredTensor,
    building_models,
    folder_tensors,
    names_in,
    need,
    weight_files,
)
from actors.engine.schedule.file import SCHEDULE_FILE, Trained, load_spec, load_trained
from actors.engine.schedule.schedule import Schedule, ScheduleSpec

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from actors.engine.decoder import Decoder

LENGTH = "max_position_embeddings"
MAX_LAYERS = 1024  # a config.json with more is damaged; schedules and models of so many layers take minutes to build
ANY_LENGTH = 2**28  # context of a model whose config.json has no limit: vLLM refuses prompts that are too long
QUANTIZATION = ("quantization_config", "compression_config")  # keys of config.json; old checkpoints use the second


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that is checked, but not loaded."""

    path: Path
    config: PretrainedConfig
    spec: ScheduleSpec | None
    trained: Trained | None
    num_layers: int
    context_length: int
    adapter: SpeedAdapter | None = None
    in_library: bool = True  # whether this project's engine can run the checkpoint; otherwise only vLLM can

    def schedule(self, changes: dict[str, Any]) -> Schedule:
        """Return the stored schedule with a job's `changes`. Raises UserError if it does not fit the model."""
        try:
            return (self.spec or ScheduleSpec()).overridden(changes).build(self.num_layers)
        except UserError as error:
            raise UserError(f"schedule: {error}") from None

    def adapted_schedule(self, changes: dict[str, Any], name: str, remedy: str) -> Schedule:
        """Return `schedule(changes)`. Raise UserError if the model was not trained for it (see `check_adapted`)."""
        if self.trained is None:  # report missing training before other errors, such as a missing horizon
            self.check_adapted(self.schedule({"horizon": 2, **changes}), name, remedy)
        schedule = self.schedule(changes)
        self.check_adapted(schedule, name, remedy)
        return schedule

    def check_adapted(self, schedule: Schedule, name: str, remedy: str) -> None:
        """Raise UserError if `schedule` skips layers and the model was not trained for it.

        name: the checkpoint's name, for the message. remedy: how to run without training, for the message.
        """
        if schedule.is_full_depth:
            return
        if self.trained is None:
            reason = f"{SCHEDULE_FILE} records no training" if self.spec else f"it has no {SCHEDULE_FILE}"
        elif (difference := self.trained.difference(schedule)) is None:
            return
        else:
            reason = difference
            fastest = self._fastest(self.trained)
            if schedule.speedup is not None and 1 < fastest < schedule.speedup:
                reason += f"; the largest speedup is {fastest:g}"
        raise UserError(
            f"schedule: {name} is not adapted to this schedule ({reason}), and its answers would be ruined: run "
            f"`skipdecode adapt JOB`, or {remedy}"
        )

    def _fastest(self, trained: Trained) -> float:
        """Return the largest speedup, in steps of 1/4, at which the training covers the stored schedule; else 1."""
        speeds = (quarters / 4 for quarters in range(4 * self.num_layers, 4, -1))
        with suppress(UserError):  # a stored schedule without a horizon has no speeds above 1
            return next((speed for speed in speeds if trained.covers(self.schedule({"speedup": speed}))), 1.0)
        return 1.0


def inspect(path: str | Path, names: Collection[str] | None = None, *, by_vllm: bool = False) -> Checkpoint:
    """Check a checkpoint folder without reading its weights.

    Args:
        path: the folder.
        names: names of all files of the checkpoint; needed if the folder lacks large ones. None: the folder's files.
        by_vllm: whether vLLM runs the model. If so, all families and quantizations pass; vLLM may refuse them.

    Raises:
        UserError: the folder, its safetensors or its tokenizer is missing; its family or quantization is not supported;
            config.json has an impossible value; or its ``skipdecode.json`` does not fit the model.
    """
    from transformers import GenerationConfig

    from actors.engine.model.families import context_length, family_named, family_of

    folder = Path(path)
    refuse_file(str(path))
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"{folder}: is an adapter for {base}, not a model: give it as model.speed_adapter, and {base} as model.path"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a checkpoint: no config.json; give the folder of a checkpoint")
    values = read_object(folder / "config.json")
    if "auto_map" in values:
        raise UserError(
            f"{folder}: config.json asks to run code of the checkpoint (auto_map), which is never done: use a model of "
            "a supported family"
        )
    in_library = not by_vllm
    if by_vllm:
        with suppress(UserError):
            _refuse_quantized(values, folder)
            family_named(values.get("model_type"))
            family_of(read_config(folder))
            in_library = True
    if in_library:
        _refuse_quantized(values, folder)
    weight_files(folder, names_in(folder) if names is None else names)
    if not any((folder / name).is_file() for name in (TOKENIZER, TOKENIZER_CONFIG)):
        raise UserError(f"{folder}: no tokenizer ({TOKENIZER} or {TOKENIZER_CONFIG}): fetch the checkpoint again")
    for name in (TOKENIZER, TOKENIZER_CONFIG, "generation_config.json"):
        if (folder / name).is_file():
            read_object(folder / name)
    name = "config.json"
    try:
        if in_library:
            family_named(values.get("model_type"))
        config = read_config(folder)
        if in_library:
            family_of(config)
        else:
            config = config.get_text_config()
        layers = config.num_hidden_layers
        if not 1 <= layers <= MAX_LAYERS:
            raise UserError(f"config.json: num_hidden_layers = {layers}: must lie in [1, {MAX_LAYERS}]")
        context = context_length(config) if hasattr(config, LENGTH) else ANY_LENGTH  # Bloom, Mamba and MPT lack it
        name = "generation_config.json"
        if in_library and (folder / name).is_file():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers may raise any exception for a damaged file
        kind = "" if isinstance(error, UserError) else f"{name}: {type(error).__name__}: "
        raise UserError(f"{folder}: {kind}{flat(error)}") from None
    spec = load_spec(folder, layers)
    trained = load_trained(folder, layers, spec)
    return Checkpoint(folder, config, spec, trained, layers, context, in_library=in_library)


def with_adapter(checkpoint: Checkpoint, folder: str | Path) -> Checkpoint:
    """Return the checkpoint with the speed adapter in `folder` and the adapter's schedule, without reading weights.

    Raises UserError as `read_adapter` and `check_shapes` do.
    """
    adapter = read_adapter(Path(folder))
    check_shapes(adapter, checkpoint.config)
    spec = load_spec(adapter.path, checkpoint.num_layers)
    trained = load_trained(adapter.path, checkpoint.num_layers, spec)
    return replace(checkpoint, spec=spec, trained=trained, adapter=adapter)


def read_config(folder: str | Path) -> PretrainedConfig:
    """Return transformers' config of a checkpoint. Raises UserError if transformers cannot read it."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise any exception for a damaged file
        raise UserError(f"config.json: {type(error).__name__}: {flat(error)}") from None
    return config


def refuse_file(path: str) -> None:
    """Raise UserError if `path` is a file instead of a checkpoint folder."""
    if path.endswith((".gguf", ".safetensors")) or os.path.isfile(path):
        raise UserError(f"{path}: is a file; give the folder of the publisher's checkpoint in safetensors")


def _refuse_quantized(values: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if config.json, whose content is `values`, says that the weights are quantized."""
    for key in QUANTIZATION:
        if entry := values.get(key):
            method = entry.get("quant_method", key) if isinstance(entry, dict) else key
            raise UserError(
                f"{folder}: quantized weights ({str(method)[:40]}) run only in vLLM: set model.engine: vllm, or give "
                "the publisher's bfloat16 checkpoint"
            )


def memory_needed(
    checkpoint: Checkpoint,
    dtype: str,
    cache_bytes: int,
    tensors: Mapping[str, StoredTensor] | None = None,  # the checkpoint's tensors; None: read its files' headers
    *,
    on_gpu: bool,  # whether the actor has a GPU; if not, the CPU kernels may copy a bfloat16 head
) -> Need:
    """Return the memory that an actor needs for the checkpoint. Raises UserError if weights are missing or damaged."""
    config = checkpoint.config
    tensors = folder_tensors(checkpoint.path) if tensors is None else tensors
    needed = need(tensors, tied=bool(config.tie_word_embeddings), dtype=dtype, cache_bytes=cache_bytes)
    if dtype == "bfloat16" and not on_gpu:  # three copies of the head: original, packed, and int8
        head = config.vocab_size * (getattr(config, "word_embed_proj_dim", None) or config.hidden_size)
        needed = replace(needed, weights=needed.weights + head * ITEM_BYTES[dtype] + head * 17 // 16)
    return needed


def load_decoder(path: str | Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the checkpoint's model as a decoder, in eval mode, without gradients. Arguments: see `load_model`."""
    from actors.engine.decoder import Decoder
    from actors.engine.model.families import family_of

    attention = family_of(read_config(path)).attention
    return Decoder(load_model(path, dtype, device, attention).eval().requires_grad_(False))


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device | None, attention: str) -> PreTrainedModel:
    """Load the checkpoint's model in `dtype` onto `device`.

    Weights are read onto `device` tensor by tensor, without a second copy of the model.

    Args:
        path: the checkpoint's folder.
        dtype: type of all parameters.
        device: device of the model. None: the CPU; the caller may move the model later.
        attention: name of the attention implementation in transformers.

    Raises:
        UserError: a weight is missing or has a wrong shape, or a tensor does not belong to the model.
    """
    from transformers import AutoModelForCausalLM

    tensors = folder_tensors(Path(path))
    on_cpu = device is None or device.type == "cpu"
    with building_models:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=read_config(path),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `report` lists the mismatches
            dtype=dtype,
            device_map=None if on_cpu else {"": device},  # a device map needs the library accelerate
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=attention,
        )
    model, report = loaded
    check_report(model, report, tensors, str(path))
    return model  # type: ignore[no-any-return]
