"""Builds the engine for a checkpoint folder. torch is imported only when an engine is built."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens
from actors.engine.model.loading import Checkpoint, load_decoder, memory_needed
from actors.engine.model.speed_adapter import base_digest, merge
from actors.engine.model.weights import check_free
from actors.engine.schedule.schedule import Schedule

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from actors.engine.engine import Engine


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise UserError if `value` is not one of `choices`. name: name of the argument, for the error message."""
    if value not in choices:
        raise UserError(f"{name} = {value!r}: must be one of {', '.join(choices)}")


def resolve_device(name: str) -> torch.device:
    """Return the torch device for `name`. Raise UserError for an unknown name or a missing GPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # an unknown name, refused below
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (count := torch.cuda.device_count()) <= (device.index or 0):
        raise UserError(f"device = {name!r}: this process sees {count} GPUs: choose one of them, or cpu")
    return device


def build_engine(
    checkpoint: Checkpoint,
    schedule: Schedule,  # schedule for requests that set none
    tokenizer: PreTrainedTokenizerBase,  # the checkpoint's tokenizer
    *,
    dtype: str,  # type of weights, activations and KV cache: float32, bfloat16 or float16
    device: str,  # device to run on: auto, cpu, cuda or cuda:N
    cache_bytes: int,  # bytes of KV cache; a GPU must have this much memory free in addition to the weights
    int8: bool = False,  # whether to round linear layers and head to 8 bits; only for bfloat16 on a CPU
    cumulative_logprob: bool = False,  # whether completions hold the sum of their tokens' log-probabilities
) -> Engine:
    """Load the checkpoint's weights and build the engine.

    A speed adapter is merged into the weights unless `schedule` runs every layer for every token.

    Raises:
        UserError: Weights are missing or damaged, the speed adapter was trained for other weights, the device does not
            exist, a GPU has too little free memory, or `int8` is set on a GPU.
    """
    import torch

    from actors.engine.cpu.executor import fastest_decoder
    from actors.engine.engine import Engine

    place = resolve_device(device)
    on_gpu = place.type == "cuda"
    if int8 and on_gpu:
        raise UserError("weights = 'int8' works only on CPUs: leave it out, or set device to cpu")
    if on_gpu:
        need = memory_needed(checkpoint, dtype, cache_bytes, on_gpu=True)
        check_free(need, *torch.cuda.mem_get_info(place))
    adapter = None if schedule.is_full_depth else checkpoint.adapter
    if adapter is not None:
        adapter.check_base(base_digest(checkpoint.path), str(checkpoint.path))
    with quiet_transformers(), current_device(place):
        model = load_decoder(checkpoint.path, getattr(torch, dtype), place).model
        if adapter is not None:
            merge(model, adapter)
        decoder = fastest_decoder(model, max(tokenizer.get_vocab().values()) + 1, int8=int8)
        ends = end_tokens(checkpoint.path, tokenizer, checkpoint.config.vocab_size)
        sampled = [token for token in ends if token < decoder.vocab_size]  # no token of the padding is ever sampled
        return Engine(decoder, schedule, sampled, cumulative_logprob=cumulative_logprob)


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that makes a GPU this thread's current CUDA device, and does nothing for a CPU."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports inside the `with` block, then restore the old settings."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as settings

    logger = logging.getLogger("transformers")
    level, bars, no_hub_bars = logger.level, settings.is_progress_bar_enabled(), are_progress_bars_disabled()
    settings.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            settings.enable_progress_bar()
        if no_hub_bars:
            disable_progress_bars()
