"""Engines of vLLM with the add-on, tiny checkpoints for them, and the answers that the builtin engine gives.

Importing it needs vLLM. Engines run in this process, one at a time, on a GPU or else on a CPU, in float32.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_F32_DEFAULT": "ieee",  # on a GPU float32 would else be multiplied in TF32
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
import torch
import vllm
from new_model import train_tokenizer
from tiny_checkpoint import SENTENCES
from tiny_models import GATED, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import Loop
from actors.engine.model.speed_adapter import merge, read_adapter
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

LAYERS, BLOCK = GATED["num_hidden_layers"], 32  # vLLM's CPU attention needs blocks of 32 tokens and heads of 32 numbers
SHAPE = {**GATED, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 32, "max_position_embeddings": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "num_key_value_heads": 2},  # no residual
    "olmo2": {},  # by transformers' layers
}
# not among the families of the builtin engine; layer 1 has no experts
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHAPES = {**MODELS, "qwen3_moe": {**MOE, "mlp_only_layers": [1], "decoder_sparse_step": 1}}
SPECS = {
    "1x": ScheduleSpec(),
    "2x": ScheduleSpec(speedup=2, horizon=12),
    "3x": ScheduleSpec(speedup=3, horizon=8, keep_order="even"),
    "first": ScheduleSpec(max_depth=5, min_depth=1, horizon=10, prompt="first"),
    "without layer 0": ScheduleSpec(depths=(5, 3, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "block_size": BLOCK,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 2**28,
    "worker_cls": "actors.vllm.worker.SkipWorker",
    "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
}
Prompts = Sequence[Sequence[int]]


def checkpoint(folder: Path, model_type: str) -> Path:
    """Write a tiny random model."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **SHAPES[model_type]}))
    for weight in model.parameters():
        if weight.dim() == 1:  # biases and norms, which would else all be 0 or 1
            torch.nn.init.normal_(weight, float(weight.detach().mean()), 0.3)
    if model.config.tie_word_embeddings:  # else a token is likeliest to follow itself
        model.get_input_embeddings().weight.data.mul_(0.3)
    model.save_pretrained(folder / model_type)
    return folder / model_type


def text_checkpoint(folder: Path, model_type: str = "llama") -> Path:
    """Write a tiny random model with a tokenizer."""
    tokenizer = train_tokenizer([*SENTENCES, *SENTENCES.values()], vocab_size=300)
    torch.manual_seed(11)
    config = AutoConfig.for_model(model_type, **{**SHAPE, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def name_tokenizer(folder: Path, name: str) -> None:
    """Let tokenizer_config.json name another class."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": name}))


@contextmanager
def engine(folder: Path, settings: Mapping[str, Any] | None = None, **changes: Any) -> Iterator[vllm.LLM]:
    """vLLM with the add-on. settings: of the add-on; default a schedule to be switched, and no self-check."""
    default = {**SPECS["2x"].to_dict(), "unadapted": True, "self_check": False}
    config = {"skipdecode": default if settings is None else settings}
    llm = vllm.LLM(str(folder), additional_config=config, **{**ENGINE, **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def answers(llm: vllm.LLM, prompts: Prompts, limits: Sequence[int], **options: Any) -> list[list[int]]:
    """vLLM's greedy answers. options: of `LLM.generate`."""
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False) for limit in limits
    ]
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def library_answers(
    folder: Path, spec: ScheduleSpec, prompts: Prompts, limits: Sequence[int], adapter: Path | None = None
) -> list[list[int]]:
    """The greedy answers of this project's builtin engine.

    To be called before vLLM loads the model: it changes classes of transformers in this process.
    """
    rows = [
        Request(prompt, SamplingParams(max_new_tokens=limit, ignore_eos=True))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    decoder = _decoder(folder, adapter)
    library = Engine(decoder, spec.build(decoder.num_layers), frozenset())
    loop = Loop(library, budget_bytes=2**30, max_rows=4)
    return [list(done.token_ids) for done in loop.finish(loop.add(rows))]


def preemptions(llm: vllm.LLM) -> list[Any]:
    """A list to which the scheduler adds each request that it preempts from now on."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    found, preempt = [], scheduler._preempt_request

    def noting(request: Any, *args: Any, **options: Any) -> Any:
        found.append(request)
        return preempt(request, *args, **options)

    scheduler._preempt_request = noting
    return found


def worker(llm: vllm.LLM) -> Any:
    """The `SkipWorker` of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]


def skipper(llm: vllm.LLM) -> Any:
    """The `LayerSkipper` of an engine in this process."""
    return worker(llm).skipper


def poison(llm: vllm.LLM) -> None:
    """Write huge values into cache slots that a layer may not read, from now on, and fail if a layer reads one.

    NaN would not work: kernels multiply the values of masked slots by 0, and NaN * 0 is NaN.
    """
    owner = skipper(llm)
    owner.graphs, cut = None, owner.cut_metadata

    def cutting(plan: Any, context: Any) -> None:
        for index, layers in owner.attention.items():
            holes = torch.from_numpy(plan.depths <= owner.ranks[index]).to(plan.device)
            for name, layer in layers.items() if bool(holes.any()) else ():
                slots = plan.built[name][1].slot_mapping[: len(holes)][holes]
                key = torch.zeros(len(slots), layer.num_kv_heads, layer.head_size, dtype=layer.dtype)
                value = torch.full((*key.shape[:2], layer.head_size_v), 1e36, dtype=layer.dtype)
                key, value = key.to(slots.device), value.to(slots.device)
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        cut(plan, context)

    def checked(forward: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            out = forward(*args, **options)
            for value in out if isinstance(out, tuple) else (out,):
                assert value is None or bool((value.abs() < 1e18).all()), "a layer read the slot of a skipped token"
            return out

        return run

    owner.cut_metadata = cutting
    for layer in owner.layers.values():
        layer.forward = checked(layer.forward)


def rows(count: int, seed: int = 0, shortest: int = 1, longest: int = 100) -> tuple[list[list[int]], list[int]]:
    """Random prompts, and limits of their answers: rows at different positions share steps."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(shortest, longest))] for _ in range(count)]
    return prompts, [chance.randint(4, 40) for _ in prompts]


@cache
def _decoder(folder: Path, adapter: Path | None) -> Decoder:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    if adapter is not None:
        merge(model, read_adapter(adapter))
    return Decoder(model)
