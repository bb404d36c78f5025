"""The error for mistakes that a user can correct, parts of its messages, and out-of-memory errors."""

from __future__ import annotations

import difflib
import gc
from collections.abc import Iterable

# how the message of a plain RuntimeError (not torch.OutOfMemoryError) says that memory has run out: for the CPU, for
# cuBLAS's workspace, in the CUDA runtime
OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


class UserError(ValueError):
    """A wrong configuration or input. Its message is one line that names the key, file or row and the remedy."""


def flat(value: object) -> str:
    """Return the text of an error or another value without line breaks."""
    return " ".join(str(value).split())


def nearest(name: object, known: Iterable[str]) -> str:
    """Return "did you mean …?" for a mistyped name; "" if no known name is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return the hint of `nearest`, or the list of known names if there is none."""
    known = list(known)
    return nearest(name, known) or f"known: {', '.join(known)}"


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether an error means that memory has run out, on a GPU or on the host."""
    import torch

    signs = any(sign in str(error) for sign in OUT_OF_MEMORY)
    return signs or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_memory() -> None:
    """Free unreferenced GPU memory. An out-of-memory error must no longer be held: its traceback refers to tensors."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def alone_error(prompt_tokens: int, max_new_tokens: int) -> str:
    """Return the error message for a row that does not fit into memory even alone."""
    return (
        f"out of memory: a row of {prompt_tokens} prompt and up to {max_new_tokens} new tokens does not fit alone: "
        "lower max_new_tokens or actors.cache_bytes, or shorten the prompt"
    )
