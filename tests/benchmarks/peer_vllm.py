"""vLLM, offline, with random weights of a checkpoint's shape; run by the Python that vLLM is installed for."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # nothing of it may run while another is timed
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

from peer_process import Answer, serve


def start(checkpoint: str, threads: int, max_rows: int) -> tuple[Answer, str]:
    """vLLM's own continuous batching; prefix caching off, for the prompts come again in every round."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(threads)))
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    engine = LLM(
        checkpoint,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max_rows,
        seed=0,
    )

    def answer(prompts: list[list[int]], new: list[int]) -> int:
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(one.outputs[0].token_ids) for one in engine.generate(given, wanted, use_tqdm=False))

    compilation = engine.llm_engine.vllm_config.compilation_config.mode
    return answer, f"{vllm.__version__}, compilation mode {getattr(compilation, 'name', compilation)}"


if __name__ == "__main__":
    serve(start)
