"""llama.cpp by llama-cpp-python's bindings, many sequences at once; run by the Python that it is installed for.

PEER_GGUF: the model's file, in place of the checkpoint. PEER_QUANTIZE=Q8_0: one with such weights is made of it first.
"""

from __future__ import annotations

import os
import time
from collections import deque
from ctypes import POINTER, c_float, cast
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from peer_process import Answer, serve

BATCH = 2048  # tokens of a pass at most: one of each row in flight, and prompts
TRIED = (8, 16, 32, 64)  # rows in flight; the best on the first rows stays
TRIAL = 64  # rows


def start(checkpoint: str, threads: int, max_rows: int) -> tuple[Answer, str]:
    """Continuous batching. The beginning that all prompts share is computed once a call, and its cells are shared."""
    llama_cpp.llama_backend_init()
    path = Path(os.environ["PEER_GGUF"])
    if os.environ.get("PEER_QUANTIZE") == "Q8_0":
        path = quantized(path, Path(checkpoint).parent)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    best: list[int] = []

    def answer(prompts: list[list[int]], new: list[int]) -> int:
        if not best:
            seconds = {}
            for rows in (rows for rows in TRIED if rows <= max_rows):
                began = time.perf_counter()
                generate(model, prompts[:TRIAL], new[:TRIAL], threads, rows)
                seconds[rows] = time.perf_counter() - began
            best.append(min(seconds, key=seconds.__getitem__))
            print(f"rows in flight: {best[0]}; seconds of {TRIAL} rows: {seconds}", flush=True)
        return generate(model, prompts, new, threads, best[0])

    return answer, f"{llama_cpp.__version__}, {path.name}"


def quantized(path: Path, folder: Path) -> Path:
    """The same model with 8 bits a weight."""
    out = folder / f"{path.stem}-Q8_0.gguf"
    if not out.is_file():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype, settings.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
        if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), settings):
            raise SystemExit(f"{path}: llama.cpp cannot write it in Q8_0")
    return out


def generate(model: Any, prompts: list[list[int]], new: list[int], threads: int, rows: int) -> int:
    """Greedy tokens of all rows, `rows` of them in flight at most; returns how many."""
    settings = llama_cpp.llama_context_default_params()
    longest = max(len(prompt) + count for prompt, count in zip(prompts, new, strict=True))
    settings.n_ctx, settings.n_batch, settings.n_ubatch = rows * longest + BATCH, BATCH, 512
    settings.n_seq_max, settings.kv_unified = rows + 1, True
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    try:
        return _generate(model, context, batch, prompts, new, rows)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def _generate(model: Any, context: Any, batch: Any, prompts: list[list[int]], new: list[int], rows: int) -> int:
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def add(token: int, position: int, sequence: int, wanted: bool) -> int:
        """Put a token into the pass; its place there."""
        place = batch.n_tokens
        batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.n_tokens = place + 1
        return int(place)

    def run() -> None:
        if status := llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode: {status}")

    def sampled(place: int) -> int:
        logits = cast(llama_cpp.llama_get_logits_ith(context, place), POINTER(c_float))
        return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())

    shared = 0
    for same in zip(*(prompt[:-1] for prompt in prompts), strict=False):
        if len(set(same)) > 1:
            break
        shared += 1
    for first in range(0, shared, BATCH):
        batch.n_tokens = 0
        for position in range(first, min(shared, first + BATCH)):
            add(prompts[0][position], position, rows, False)
        run()
    waiting, free = deque(range(len(prompts))), list(range(rows))
    flight: dict[int, tuple[int, int, int]] = {}  # sequence -> row, its last token, tokens so far
    made = 0
    while waiting or flight:
        batch.n_tokens = 0
        places = {}
        for sequence, (row, token, count) in flight.items():
            places[sequence] = add(token, len(prompts[row]) + count - 1, sequence, True)
        while waiting and free and batch.n_tokens + len(prompts[waiting[0]]) - shared <= BATCH:
            row, sequence = waiting.popleft(), free.pop()
            if shared:
                llama_cpp.llama_memory_seq_cp(memory, rows, sequence, 0, shared)
            for position in range(shared, len(prompts[row])):
                last = position == len(prompts[row]) - 1
                place = add(prompts[row][position], position, sequence, last)
            flight[sequence], places[sequence] = (row, 0, 0), place
        run()
        for sequence, place in places.items():
            row, _, count = flight[sequence]
            flight[sequence] = row, sampled(place), count + 1
            made += 1
            if count + 1 == new[row]:
                del flight[sequence]
                llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
                free.append(sequence)
    return made


if __name__ == "__main__":
    serve(start)
