"""What a cache of 8 bits changes in a published model's predictions, and the rows that it makes room for; no GPU.

    .venv/bin/python tests/benchmarks/kv_cache.py [--models demo,smollm2] [--speeds 1,3] [--rows 16] [--dtypes bfloat16]

The paged engine's layers, by plain torch on a CPU, over the same tokens, of greedy answers, with a cache in the model's
dtype and with codes. Token KL of the latter from the former, nats, and the share of tokens with the same likeliest one;
tokens that the prompt's own pass predicts do not count, since it attends to no code. Models as in eight_bits.py. The
last line is one JSON object. start: nats from the library's layers, by the comparison that an actor starts with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

import torch
from eight_bits import PLACES, TOKENS, prompts_of
from real_model import ADAPTER
from torch import Tensor

from actors.engine.checkpoint.compressed import Kind
from actors.engine.checkpoint.loading import inspect, load_decoder
from actors.engine.checkpoint.speed_adapter import merge, with_adapter
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.gpu import reference
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.operations import Lanes
from actors.engine.gpu.pages import PagedCache
from actors.engine.gpu.prefill import Prefill, passes
from actors.engine.gpu.products import DTYPES
from actors.engine.gpu.self_check import difference, probe
from actors.engine.gpu.splits import Splits
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Request, SamplingParams
from actors.engine.working_memory import PAGE_TOKENS

KINDS: tuple[Kind, ...] = ("int8", "fp8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,smollm2")
    parser.add_argument("--speeds", default="1,3", help="nominal")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    for name in given.models.split(","):
        for speed in map(float, given.speeds.split(",")):
            for dtype in given.dtypes.split(","):
                for line in compared(name, speed, getattr(torch, dtype), given.rows):
                    found.append({"model": name, "speed": speed, "dtype": dtype, "rows": given.rows, **line})
                    print(found[-1], flush=True)
    print(json.dumps(found))


def compared(name: str, speed: float, dtype: torch.dtype, rows: int) -> list[dict[str, float | str]]:
    """A line for a plain cache, and for each kind of codes."""
    folder = PLACES[name]
    checkpoint = inspect(folder)
    if name == "smollm2" and speed > 1:
        checkpoint = with_adapter(checkpoint, ADAPTER)
    decoder = load_decoder(folder, dtype, torch.device("cpu"))
    if checkpoint.adapter is not None:
        merge(decoder.model, checkpoint.adapter)
    horizon = {} if checkpoint.spec is not None else {"horizon": TOKENS}
    schedule = checkpoint.schedule({"speedup": speed, **horizon})
    wanted = probe(Engine(decoder, schedule, ()))
    assert decoder.prepare_for_gpu(reference)
    prompts = prompts_of(name, folder, rows)
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    engine = GpuEngine(decoder, schedule, (), budget_bytes=2**30, max_rows=rows, cumulative_logprob=False)
    requests = [Request(ids, sampling, key=row) for row, ids in enumerate(prompts)]
    done = generate(engine, requests, budget_bytes=2**40, max_rows=rows)
    answers = torch.tensor([one.token_ids for one in done])
    divergence, agreed = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    runs = [forced(decoder, schedule, prompts, answers, kind) for kind in (None, *KINDS)]
    for whole, *rounded in zip(*runs, strict=True):
        log_p = whole.float().log_softmax(dim=-1)
        for kind, logits in zip(KINDS, rounded, strict=True):
            log_q = logits.float().log_softmax(dim=-1)
            divergence[kind] += float((log_p.exp() * (log_p - log_q)).sum())
            agreed[kind] += float((log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum())
    count = rows * (TOKENS - 1)
    lines: list[dict[str, float | str]] = []
    for kind in (None, *KINDS):
        one = GpuEngine(decoder, schedule, (), budget_bytes=2**28, max_rows=3, kv_cache=kind)
        line: dict[str, float | str] = {"cache": kind or "plain", "start": difference(wanted, probe(one))}
        if kind is not None:
            line |= {"kl": divergence[kind] / count, "same top token": agreed[kind] / count}
        lines.append(line)
    return lines


@torch.inference_mode()
def forced(
    decoder: Decoder, schedule: Schedule, prompts: Sequence[Sequence[int]], answers: Tensor, kind: Kind | None
) -> Iterator[Tensor]:
    """Logits [N, V] behind each token but the last one of answers [N, T], by steps over pages as the engine's."""
    lengths, steps = [len(prompt) for prompt in prompts], answers.shape[1]
    rows = range(len(prompts))
    cache = PagedCache(
        schedule,
        len(rows),
        sum(-(-(length + steps) // PAGE_TOKENS) for length in lengths) * decoder.num_layers,
        max(lengths),
        steps,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        dtype=decoder.dtype if kind is None else DTYPES[kind],
        device=decoder.device,
    )
    assert cache.grow(rows, lengths, [0] * len(rows), steps)
    prefill = Prefill(decoder, schedule)
    for first, end in passes(lengths, 0):
        prefill([tuple(one) for one in prompts[first:end]], rows[first:end], range(end - first), cache, ())
    for position in range(steps - 1):
        places = torch.tensor(lengths) + position
        embedded, rotary = decoder.embed(answers[:, position, None], places[:, None])
        hidden = embedded[:, 0].contiguous()
        depths = torch.full((len(rows),), schedule.depth(position), dtype=torch.int32)
        for layer in sorted(schedule.layers(position)):
            block, turn = decoder.blocks[layer], rotary[layer]
            assert isinstance(block, FusedLayer)
            own = None if turn is None else (turn[0][:, 0], turn[1][:, 0])
            lanes = Lanes(torch.arange(len(rows)), places, depths, own)
            block.step(hidden, lanes, cache, schedule.ranks[layer], Splits())
        yield decoder.logits(hidden)


if __name__ == "__main__":
    main()
