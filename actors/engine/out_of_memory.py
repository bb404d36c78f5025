"""Errors of memory that has run out: recognizing them, freeing memory, and the error of a row that fails alone."""

from __future__ import annotations

import gc

import torch

# in RuntimeErrors other than torch.OutOfMemoryError: the CPU's allocator, cuBLAS's workspace, the CUDA runtime
_SIGNS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
ADVICE = "lower max_new_tokens or actors.cache_bytes, or shorten the prompt"


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error means that memory has run out, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)


def free_memory() -> None:
    """Free unreferenced memory. The error must be gone, since its traceback refers to tensors."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def alone_error(prompt_tokens: int, max_new_tokens: int) -> str:
    """The error of a row that does not fit the memory even alone."""
    return (
        f"out of memory: a row of {prompt_tokens} prompt and up to {max_new_tokens} new tokens does not fit alone: "
        f"{ADVICE}"
    )
