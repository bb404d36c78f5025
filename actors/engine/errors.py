"""`UserError` (a mistake that a user can correct), helpers for its messages, and helpers for out-of-memory errors."""

from __future__ import annotations

import difflib
import gc
from collections.abc import Iterable

# Texts of the CPU allocator, cuBLAS and the CUDA runtime. A RuntimeError of torch that contains one of them is an
# out-of-memory error
OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


class UserError(ValueError):
    """A wrong configuration or input. The message is one line that names the key, file or row, and the remedy."""


def flat(value: object) -> str:
    """Return `str(value)` on one line: every run of white space becomes one space."""
    return " ".join(str(value).split())


def nearest(name: object, known: Iterable[str]) -> str:
    """Return "did you mean …?" with the known name closest to `name`; "" if no known name is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return "did you mean …?" if a known name is similar to `name`, else the list of known names."""
    known = list(known)
    return nearest(name, known) or f"known: {', '.join(known)}"


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether `error` means that memory of a GPU or of the host has run out."""
    import torch

    signs = any(sign in str(error) for sign in OUT_OF_MEMORY)
    return signs or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_memory() -> None:
    """Return unused GPU memory to the driver. First drop any out-of-memory error: its traceback keeps tensors alive."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def alone_error(prompt_tokens: int, max_new_tokens: int) -> str:
    """Return the error message for a row that runs out of memory even if no other row is in flight."""
    return (
        f"out of memory: a row of {prompt_tokens} prompt tokens and up to {max_new_tokens} new tokens does not fit "
        "alone: lower max_new_tokens, shorten the prompt, or run fewer actors per machine"
    )
