"""vLLM, offline, with random weights of a checkpoint's shape; run by the Python that vLLM is installed for.

PEER_LOAD_FORMAT=auto: with the checkpoint's weights. PEER_PREFIX_CACHING=1: prompts share what they begin with.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # nothing of it may run while another is timed
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

from peer_process import Answer, serve


def start(checkpoint: str, threads: int, max_rows: int) -> tuple[Answer, str]:
    """vLLM's own continuous batching. Prompts come again in every round: no prefix outlives it."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(threads)))
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    caching = os.environ.get("PEER_PREFIX_CACHING") == "1"
    engine = LLM(
        checkpoint,
        load_format=os.environ.get("PEER_LOAD_FORMAT", "dummy"),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=caching,
        max_num_seqs=max_rows,
        seed=0,
    )

    def answer(prompts: list[list[int]], new: list[int]) -> int:
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
        if caching:
            engine.reset_prefix_cache()
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(one.outputs[0].token_ids) for one in engine.generate(given, wanted, use_tqdm=False))

    compilation = engine.llm_engine.vllm_config.compilation_config.mode
    return answer, f"{vllm.__version__}, compilation mode {getattr(compilation, 'name', compilation)}"


if __name__ == "__main__":
    serve(start)
