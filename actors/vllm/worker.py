"""Defines a worker for vLLM whose decoder layers run only for the tokens that the schedule assigns to them.

Layers that no token runs are dropped while the model loads. If every token runs the others, vLLM runs them as any other
model. Else the layers' `forward` is replaced (see `layers`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from actors.engine.errors import UserError
from actors.engine.model.speed_adapter import base_digest, read_adapter
from actors.engine.model.tokenizer import difference
from actors.engine.schedule.schedule import Schedule
from actors.vllm.check import check_answers
from actors.vllm.graphs import BACKENDS
from actors.vllm.layers import LayerSkipper
from actors.vllm.loader import FORMATS, FULL_DEPTH, DroppedLayer, decoder_layers, use_loader
from actors.vllm.scheduler import PromptCache
from actors.vllm.settings import read_settings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

TESTED = "0.32"  # the only accepted version of vLLM, because the add-on uses internals that may change
KEPT_LAYERS = "skipdecode_layers"  # key of vLLM's additional_config
log = logging.getLogger(__name__)


class SkipWorker(PlatformWorker):  # type: ignore[misc]
    """A vLLM worker that runs a schedule. At full depth it does the same as the platform's worker."""

    skipper: LayerSkipper | None = None  # None: every token runs the same layers

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        model = vllm_config.model_config
        layers = model.get_total_num_hidden_layers()
        settings = self.skip_settings = read_settings(vllm_config.additional_config, model.model, layers)
        schedule = settings.schedule
        if not schedule.is_full_depth:
            refuse_unsupported(vllm_config, schedule)
        dropped = sorted(set(range(layers)).difference(schedule.prompt_layers))
        if not schedule.is_uniform and not (vllm_config.load_config.load_format in FORMATS and model.is_pp_supported):
            dropped = []  # a falling schedule can also skip them
        if dropped:
            # vLLM's key of compiled code covers additional_config, but no file such as skipdecode.json
            kept = {KEPT_LAYERS: schedule.prompt_layers}
            vllm_config.additional_config = {**vllm_config.additional_config, **kept}
        if settings.speed_adapter is not None:
            if model.quantization is not None:
                raise UserError(
                    f"skipdecode: speed_adapter cannot be merged into {model.quantization} weights: use a checkpoint "
                    "without quantization"
                )
            if not Path(model.model).is_dir():
                raise UserError(
                    f"skipdecode: speed_adapter needs a base model in a folder, but {model.model} is not a folder: "
                    "fetch the model, and give the folder"
                )
            read_adapter(Path(settings.speed_adapter)).check_base(base_digest(Path(model.model)), model.model)
        if settings.speed_adapter is not None or dropped:
            use_loader(vllm_config.load_config, settings.speed_adapter, dropped)
        super().__init__(vllm_config, *args, **options)
        problem = None if model.skip_tokenizer_init or self.rank else difference(Path(model.tokenizer))
        if problem is not None:
            log.warning(
                "skipdecode: %s: %s, so prompts that vLLM tokenizes may differ from those of the training: write the "
                "right class beside the model (see configs/recipes/vllm)",
                model.tokenizer,
                problem,
            )

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the model. Replace the `forward` of its decoder layers if tokens run different layers."""
        super().load_model(*args, **options)
        schedule = self.skip_settings.schedule
        if schedule.is_full_depth:
            log.info("skipdecode: the schedule runs every layer, so vLLM runs unchanged")
            return
        layers = decoder_layers(self.model_runner.get_model(), schedule.num_layers)
        kept = [index for index, layer in enumerate(layers) if not isinstance(layer, DroppedLayer)]
        if schedule.is_uniform:
            assert tuple(kept) == schedule.prompt_layers, "a model that SkipLoader has not loaded"
            log.info("skipdecode: every token runs the same %d of %d layers", len(kept), schedule.num_layers)
            return
        attention = attention_layers(self.vllm_config.compilation_config.static_forward_context)
        if sorted(attention) != kept:
            raise UserError(
                f"skipdecode: only {len(attention)} of {len(kept)} layers have attention, which is not "
                f"supported; {FULL_DEPTH}"
            )
        self.skipper = LayerSkipper(schedule, attention, self._prompt_lengths)
        self.skipper.wrap(layers)
        first, last = schedule.depths[0], schedule.depths[-1]
        log.info("skipdecode: decode steps run %d (first) to %d (last) of %d layers", first, last, schedule.num_layers)

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule, from the next forward pass on. No request may be in flight.

        A merged speed adapter stays merged. Raises UserError if the engine runs the same layers for every token, or has
        dropped a layer of the new schedule.
        """
        if self.skipper is None:
            now = self.skip_settings.schedule
            raise UserError(
                f"skipdecode: this engine runs {len(now.prompt_layers)} of {now.num_layers} layers for every token and "
                "cannot change its speed: start another engine"
            )
        if dropped := sorted(set(schedule.prompt_layers) - self.skipper.attention.keys()):
            raise UserError(
                f"skipdecode: the schedule runs layer {dropped[0]}, which no token of the schedule that this engine "
                "began with runs, so it was dropped: start another engine"
            )
        self.skipper.set_schedule(schedule)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and watch the builders of attention metadata (see `LayerSkipper.watch`)."""
        super().initialize_from_config(kv_cache_config)
        self._cache_config = kv_cache_config
        if self.skipper is None:
            return
        for group in self._attention_groups():
            if not isinstance(group.kv_cache_spec, AttentionSpec | UniformTypeKVCacheSpecs):
                kind = type(group.kv_cache_spec).__name__
                raise UserError(f"skipdecode: layers with a {kind} are not supported; {FULL_DEPTH}")
            for builder in group.metadata_builders:
                self.skipper.watch(builder)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and capture graphs of decode steps. Then check both (see `check_answers`), unless told not to."""
        times = super().compile_or_warm_up_model()
        skipper, settings = self.skipper, self.skip_settings
        if skipper is None:
            return times
        if settings.graphs and self.device.type in BACKENDS:
            builders = [builder for group in self._attention_groups() for builder in group.metadata_builders]
            if reason := skipper.use_graphs(builders, self.vllm_config, self.device):
                log.warning("skipdecode: decode steps run without CUDA graphs: %s", reason)
        if settings.self_check:
            check_answers(self, skipper, self._cache_config)
        return times

    def _attention_groups(self) -> list[Any]:
        return [group for groups in self.model_runner.attn_groups for group in groups]

    def _prompt_lengths(self, common: Any) -> np.ndarray:
        runner = self.model_runner
        lengths: np.ndarray
        if self.use_v2_model_runner:
            lengths = runner.req_states.prompt_len.np[common.req_idx[: common.num_reqs]]
        else:
            lengths = runner.input_batch.num_prompt_tokens[: common.num_reqs]
        return lengths

    def reload_weights(self, *args: Any, **options: Any) -> None:
        """Read the weights again. Raises UserError if other weights are given and a speed adapter is merged."""
        if self.skip_settings.speed_adapter is not None and (args or options):
            raise UserError("skipdecode: reload_weights cannot merge the speed_adapter into other weights")
        super().reload_weights(*args, **options)


def refuse_unsupported(config: Any, schedule: Schedule) -> None:
    """Raise UserError with a list of all settings of a VllmConfig that cannot be combined with the schedule."""
    version = vllm.__version__
    if version.split(".")[:2] != TESTED.split("."):
        raise UserError(
            f"skipdecode: vLLM {version} is installed, but {TESTED} is needed: pip install 'vllm=={TESTED}.*'"
        )
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "expert load balancing": parallel.enable_eplb,  # counts the experts of dropped layers
        "KV cache transfer": config.kv_transfer_config is not None,  # a store would mix keys and values of two speeds
        "fast prefill with a shared KV cache": cache.kv_sharing_fast_prefill,  # reads attributes of the last layer
        "encoders": model.is_encoder_decoder,
    }
    if not schedule.is_uniform:  # some tokens skip a layer that others run
        serves_prompts = issubclass(config.scheduler_config.get_scheduler_cls(), PromptCache)
        reasons |= {
            "speculative decoding": config.speculative_config is not None,
            "LoRA adapters": config.lora_config is not None,
            "expert parallelism": parallel.enable_expert_parallel,
            "data parallel experts": parallel.data_parallel_size > 1 and model.is_moe,
            "dual batch overlap": parallel.use_ubatching,
            "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
            "M-RoPE positions": model.uses_mrope,
            "pooling": model.runner_type != "generate",
            "compilation and CUDA graphs: pass enforce_eager": not model.enforce_eager,
            "prefix caching by this scheduler: pass scheduler_cls=actors.vllm.scheduler.SkipAsyncScheduler, or "
            "enable_prefix_caching=False": cache.enable_prefix_caching and not serves_prompts,
        }
    if found := [name for name, present in reasons.items() if present]:
        raise UserError(f"skipdecode: cannot be combined with {'; '.join(found)}. Change this, or set speedup: 1")


def attention_layers(by_name: Mapping[str, Any]) -> dict[int, dict[str, Attention]]:
    """Return index of decoder layer -> name -> attention layer. by_name: all layers that vLLM has registered."""
    found: dict[int, dict[str, Attention]] = {}
    for name, layer in by_name.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        if type(layer) is not Attention:
            raise UserError(f"skipdecode: {name} is a {type(layer).__name__}, which is not supported; {FULL_DEPTH}")
        if layer.kv_sharing_target_layer_name is not None:
            raise UserError(
                f"skipdecode: {name} reads the keys and values of another layer, which is not supported; {FULL_DEPTH}"
            )
        found.setdefault(extract_layer_index(name), {})[name] = layer
    return found
