"""Checkpoint folder and settings -> an engine that is ready for rows. Imports torch only when it builds one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from actors.engine.checkpoint.compressed import Kind
from actors.engine.checkpoint.end_tokens import end_tokens
from actors.engine.checkpoint.loading import Checkpoint, load_decoder, memory_needed
from actors.engine.checkpoint.speed_adapter import base_digest, merge
from actors.engine.checkpoint.weights import ITEM_BYTES, cache_that_fits, check_free
from actors.engine.errors import UserError
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import EngineName, wants_pages

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from actors.engine.protocol import EngineProtocol

LIBRARY_CACHE, LIBRARY_ROWS, PAGED_ROWS = 2**30, 64, 512  # bytes; most rows in flight
FP8_CAPABILITY = (8, 9)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, checked at construction.

    Args:
        engine: `paged`, `library`, or `auto`: see `uses_pages`.
        dtype: float32, bfloat16 or float16, of weights, activations and cache.
        device: auto, cpu, cuda or cuda:N.
        compile: Compile the layers with torch.compile.
        cache_bytes: Bytes of key/value cache; None: `with_memory` chooses.
        max_rows: Most rows in flight; None: `with_memory` chooses.
        cumulative_logprob: Compute each answer's log-probability.
        weights: Linear layers and the head with 8 bits, int8 or, on a GPU, fp8: see `cpu.quantization` and
            `gpu.products`. None: in `dtype`, or with the 8 bits that the checkpoint has, see `products_in_eight_bits`.
        kv_cache: Keys and values of the paged engine's cache as codes of 8 bits, see `gpu.operations.LayerPages`. None:
            in `dtype`.

    Raises:
        UserError: A value that is not known, `compile` with the paged engine, `weights` with `compile` or
            another dtype than bfloat16, or `kv_cache` without the paged engine or bfloat16.
    """

    engine: EngineName
    dtype: str
    device: str
    compile: bool
    cache_bytes: int | None
    max_rows: int | None
    cumulative_logprob: bool
    weights: Kind | None = None
    kv_cache: Kind | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("dtype", self.dtype, ITEM_BYTES)
        if self.compile and self.engine == "paged":
            raise UserError("compile and engine = 'paged' exclude each other: the paged engine has kernels of its own")
        if self.weights is not None:
            check_choice("weights", self.weights, get_args(Kind))
            if self.compile or self.dtype != "bfloat16":
                raise UserError(f"weights = {self.weights!r} is for bfloat16 without compile")
        if self.kv_cache is not None:
            check_choice("kv_cache", self.kv_cache, get_args(Kind))
            if self.compile or self.engine == "library" or self.dtype != "bfloat16":
                raise UserError(f"kv_cache = {self.kv_cache!r} is for the paged engine in bfloat16")


def check_choice(name: str, value: str, choices: Iterator[str] | tuple[str, ...] | dict[str, int]) -> None:
    """Raise UserError if an argument is none of its choices."""
    known = list(choices)
    if value not in known:
        raise UserError(f"{name} = {value!r}: must be one of {', '.join(known)}")


def resolve_device(name: str) -> torch.device:
    """The torch device of a name; raises UserError for a name that is not known and for a GPU that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (count := torch.cuda.device_count()) <= (device.index or 0):
        raise UserError(f"device = {name!r}: this process sees {count} GPUs")
    return device


def uses_pages(engine: EngineName, checkpoint: Checkpoint, *, on_gpu: bool, compiled: bool = False) -> bool:
    """Whether the paged engine runs the checkpoint.

    Logs the reason where the setting asks for it (`wants_pages`) and the device or the model's family rules it out.
    """
    if not wants_pages(engine, on_gpu=on_gpu, compiled=compiled):
        return False
    if not on_gpu:
        log.warning("engine: library in place of paged, which needs a GPU")
    elif not checkpoint.has_pages:
        family = checkpoint.config.model_type
        log.warning("engine: library in place of paged, which has no fused layers for this %s model", family)
    return on_gpu and checkpoint.has_pages


def products_in_eight_bits(
    settings: EngineSettings, checkpoint: Checkpoint, device: torch.device, *, paged: bool
) -> Kind | None:
    """The 8 bits of the engine's products: those that the settings ask for, else those that the checkpoint is made for,
    if the device and the engine have them; None: 16 or 32 bits, to which other weights are expanded.

    Raises:
        UserError: The settings ask for 8 bits that the device or the engine does not have.
    """
    import torch

    from actors.engine.cpu import library

    on_gpu, stored, wanted = device.type == "cuda", checkpoint.stored, settings.weights
    if wanted is not None:
        if on_gpu and not paged:
            raise UserError(f"weights = {wanted!r}: on a GPU only the paged engine has it; leave weights or engine out")
        if wanted == "fp8" and not (on_gpu and _has_fp8(device)):
            name = torch.cuda.get_device_name(device) if on_gpu else "a CPU"
            raise UserError(f"weights = 'fp8' needs a GPU of compute capability 8.9 (Ada, Hopper), not {name}")
        return wanted
    if stored is None or not stored.run(settings.dtype, compiled=settings.compile, on_gpu=on_gpu, paged=paged):
        return None
    can = _has_fp8(device) if stored.kind == "fp8" else on_gpu or library.quantizes(torch.bfloat16, device)
    return stored.kind if can else None


def check_cache(settings: EngineSettings, device: torch.device, *, paged: bool) -> None:
    """Raise UserError if the settings ask for a cache of 8 bits that the device or the engine does not have."""
    kind = settings.kv_cache
    if kind is not None and not paged:
        raise UserError(f"kv_cache = {kind!r}: only the paged engine on a GPU has it; leave kv_cache out")
    if kind == "fp8" and not _has_fp8(device):
        raise UserError("kv_cache = 'fp8' needs a GPU of compute capability 8.9 (Ada, Hopper); int8 runs on others too")


def _has_fp8(device: torch.device) -> bool:
    import torch

    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def with_memory(settings: EngineSettings, checkpoint: Checkpoint) -> EngineSettings:
    """The settings with bytes of cache and most rows in flight where they have none.

    `LIBRARY_CACHE` and `LIBRARY_ROWS`; of the paged engine what the GPU has free, and `PAGED_ROWS`.
    """
    if settings.cache_bytes is not None and settings.max_rows is not None:
        return settings
    import torch

    device = resolve_device(settings.device)
    cache, rows = LIBRARY_CACHE, settings.max_rows or LIBRARY_ROWS
    if uses_pages(settings.engine, checkpoint, on_gpu=device.type == "cuda", compiled=settings.compile):
        rows = settings.max_rows or PAGED_ROWS
        need = memory_needed(checkpoint, settings.dtype, 0, on_gpu=True, paged_rows=rows, weights=settings.weights)
        cache = cache_that_fits(need, torch.cuda.mem_get_info(device)[0])
    return replace(settings, cache_bytes=settings.cache_bytes or cache, max_rows=rows)


def build_engine(
    checkpoint: Checkpoint,
    schedule: Schedule,
    tokenizer: PreTrainedTokenizerBase,
    settings: EngineSettings,
    drafts: Schedule | None = None,
) -> EngineProtocol:
    """Load the checkpoint's weights and build the engine that the settings, after `with_memory`, ask for.

    A speed adapter is merged unless the schedule runs every layer for every token.

    Args:
        drafts: For exact mode: the schedule of `exact.engine.Drafter`, or full depth, with which nothing is drafted but
            what is looked up. A speed adapter is merged into a second copy of the weights.

    Raises:
        UserError: Weights that are missing, damaged or not the speed adapter's base, a device that is not there, a GPU
            without enough free memory, or exact mode with a schedule, a device or layers that it does not have.
    """
    import torch

    from actors.engine.engine import Engine
    from actors.engine.exact.engine import Drafter, ExactEngine

    assert settings.cache_bytes is not None and settings.max_rows is not None
    device = resolve_device(settings.device)
    on_gpu = device.type == "cuda"
    paged = uses_pages(settings.engine, checkpoint, on_gpu=on_gpu, compiled=settings.compile)
    check_cache(settings, device, paged=paged)
    kind = products_in_eight_bits(settings, checkpoint, device, paged=paged)
    all_layers = settings.weights is not None
    keep_codes = checkpoint.stored is not None and checkpoint.stored.kind == kind
    if drafts is not None and (settings.compile or not schedule.is_full_depth):
        raise UserError("drafts: exact mode is for full depth, without compile")
    exact, lookup_alone = drafts is not None, drafts is not None and drafts.is_full_depth
    own_drafter = exact and not lookup_alone
    if drafts is not None and not lookup_alone and drafts.mean_layers == drafts.num_layers:
        raise UserError("drafts: all layers would draft; give a higher speedup, or 1 for prompt lookup alone")
    if exact and on_gpu and (lookup_alone or not paged):
        raise UserError("drafts: on a GPU only layers of the paged engine draft; give a speedup above 1")
    rows = settings.max_rows if paged else 0
    how_large: dict[str, Any] = {"on_gpu": on_gpu, "paged_rows": rows, "weights": kind if all_layers else None}
    need = memory_needed(checkpoint, settings.dtype, settings.cache_bytes, **how_large)
    if on_gpu:
        if own_drafter and checkpoint.adapter is not None:  # layers that draft have weights of their own
            need = replace(need, weights=2 * need.weights, loading=2 * need.loading)
        check_free(need, *torch.cuda.mem_get_info(device))
    adapter = checkpoint.adapter if own_drafter or not schedule.is_full_depth else None
    if adapter is not None:
        adapter.check_base(base_digest(checkpoint.path), str(checkpoint.path))
    dtype = getattr(torch, settings.dtype)
    with quiet_transformers(), current_device(device):
        load = partial(load_decoder, checkpoint.path, dtype, device, keep_codes=keep_codes)
        decoder = load()
        drafter = decoder if adapter is None or not own_drafter else load()
        if adapter is not None:
            merge(drafter.model, adapter)
        ends = end_tokens(checkpoint.path, tokenizer, checkpoint.config.vocab_size)
        if paged:
            from actors.engine.gpu import kernels
            from actors.engine.gpu.engine import GpuEngine
            from actors.engine.gpu.products import EightBits
            from actors.engine.gpu.self_check import check, probe

            wanted = probe(Engine(decoder, schedule, ends)) if settings.engine == "auto" else None
            eight_bits = None if kind is None else EightBits(kind, all_layers)
            decoder.prepare_for_gpu(kernels, eight_bits)
            how: dict[str, Any] = {
                "budget_bytes": settings.cache_bytes,
                "max_rows": settings.max_rows,
                "cumulative_logprob": settings.cumulative_logprob,
                "kv_cache": settings.kv_cache,
            }
            if drafts is None:
                engine = GpuEngine(decoder, schedule, ends, **how)
            else:
                from actors.engine.gpu.exact import GpuExactEngine
                from actors.engine.gpu.round_choice import RoundChoice

                if drafter is not decoder:
                    drafter.prepare_for_gpu(kernels, eight_bits)
                own = Drafter(drafter, drafts)
                engine = GpuExactEngine(decoder, schedule, ends, drafter=own, choice=RoundChoice(), **how)
            if wanted is not None:
                check(engine, wanted, eight_bits=kind is not None)
                engine.take_stats()
            return engine
        tokens = max(tokenizer.get_vocab().values()) + 1
        for one in {decoder, drafter}:
            one.keep_tokens(tokens)
        if settings.compile:
            decoder.compile()
        else:
            decoder.prepare_for_cpu(int8=all_layers)
        if exact and decoder.stack is None:
            log.warning("exact mode drafts nothing: only bfloat16 kernels of all layers verify several tokens at once")
        elif drafts is not None:
            if drafter is not decoder:
                drafter.prepare_for_cpu(int8=all_layers)
            return ExactEngine(
                decoder,
                schedule,
                ends,
                drafter=Drafter(drafter, drafts) if own_drafter else None,
                cumulative_logprob=settings.cumulative_logprob,
            )
        return Engine(decoder, schedule, ends, cumulative_logprob=settings.cumulative_logprob)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread: streams, events and kernels without a device belong to it."""
    if device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports; the caller's settings are restored afterwards."""
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
