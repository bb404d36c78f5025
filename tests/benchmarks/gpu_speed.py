"""The engine on a GPU against the memory's limit, at every depth, and against transformers.

What a decode step must read is counted: the weights of the layers that run, the vocabulary head, and the keys and
values of the rows that run them; ideal is what those bytes and FLOPs take at the ceilings measured first. What does not
fit the time is left out and named. Two runs that compile kernels and capture graphs go before each measured one, of the
largest batch one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_choices
import roofline
import torch
import transformers
from gpu_account import Account, exact_row_bytes, layer_numbers
from gpu_demo import demo
from gpu_parts import NEW, PROMPT, Clock, attempt, build, give_back, rows_of, run, schedule_of, synchronize
from gpu_peers import PEER_NEW, ours, peers

from actors.engine.checkpoint.compressed import Kind
from actors.engine.checkpoint.weights import ALLOWANCE, Need, cache_that_fits
from actors.engine.decoder import Decoder
from actors.engine.gpu import reference
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.operations import Operations
from actors.engine.gpu.products import EightBits
from actors.engine.scheduler import generate
from actors.engine.types import Request
from actors.engine.working_memory import working_bytes

PROFILED = 10  # steps
ATTENTION = [(64, 3, 4), (64, 2, 4), (32, 3, 4), (128, 2, 4), (64, 3, 8), (32, 3, 2)]  # tokens, reads, warps


def profile(engine: GpuEngine, rows: list[Request]) -> dict[str, Any]:
    """Kernel time and gaps of some steps in the middle, in microseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    engine.open(len(rows), PROMPT, NEW)
    engine.admit(rows)
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    engine.close()
    kernels = sorted(
        ((one.self_device_time_total, one.count, one.key) for one in seen.key_averages() if one.self_device_time_total),
        reverse=True,
    )
    total = sum(one for one, _, _ in kernels)
    return {
        "wall": 1e6 * wall / PROFILED,
        "kernels": total / PROFILED,
        "gaps": 1e6 * wall / PROFILED - total / PROFILED,
        "by_kernel": [
            {"us": one / PROFILED, "calls": count / PROFILED, "name": key[:80]} for one, count, key in kernels[:12]
        ],
    }


def made_ready(
    shape: str,
    given: argparse.Namespace,
    ceilings: roofline.Ceilings,
    weights: Kind | None = None,
    kv_cache: Kind | None = None,
) -> tuple[Decoder, Account, int]:
    """A model with the GPU's layers, what its passes must move, and bytes for its cache.

    weights, kv_cache: of 8 bits, or None.
    """
    device = torch.device(given.device)
    operations: Operations = reference
    if device.type == "cuda":
        from actors.engine.gpu import kernels as operations
    decoder = Decoder(build(shape, device))
    layers = layer_numbers(decoder)
    bits: dict[str, Any] = {"eight_bits": weights is not None, "kv_cache": kv_cache}
    account = Account(decoder, layers, decoder.head.weight.numel(), ceilings, **bits)
    assert decoder.prepare_for_gpu(operations, None if weights is None else EightBits(weights))
    give_back(device)
    if device.type != "cuda":
        return decoder, account, given.cache_gib * 2**30
    beside = working_bytes(decoder.model.config, decoder.dtype.itemsize, given.most_rows, weights) + ALLOWANCE
    return decoder, account, cache_that_fits(Need(0, 0, 0, beside), torch.cuda.mem_get_info()[0])


def engine_for(
    decoder: Decoder,
    speed: float,
    rows: Sequence[Request],
    budget: int,
    max_rows: int = 1,
    kv_cache: Kind | None = None,
) -> GpuEngine:
    """At a speed that is for rows of such lengths."""
    how: dict[str, Any] = {"budget_bytes": budget, "max_rows": max_rows, "kv_cache": kv_cache}
    return GpuEngine(decoder, schedule_of(decoder, speed, rows), (), cumulative_logprob=False, **how)


def cell(
    account: Account, batch: str, speed: float, budget: int, given: argparse.Namespace, clock: Clock, name: str
) -> dict[str, Any] | None:
    """One batch at one speed; None if there is no time for it."""
    decoder, device = account.decoder, torch.device(given.device)
    engine = engine_for(decoder, speed, rows_of("equal", 1, decoder.vocab_size), budget, kv_cache=account.kv_cache)
    largest = budget // engine.row_bytes(PROMPT, NEW)
    count = engine.max_rows = min(given.most_rows, largest if batch == "largest" else int(batch))
    rows = rows_of("equal", count, decoder.vocab_size)
    moved, ideal = account.decode(engine.schedule, rows)
    before = 1 if batch == "largest" else 2  # whose prompts alone take a while
    if not clock.allows(name, 2 * (before + 1) * (ideal + account.prefill(rows)) + 5):
        return None
    for _ in range(before):
        run(engine, rows, device)  # kernels are compiled, graphs captured
    prefill, decode = run(engine, rows, device)
    one = {
        "batch": count,
        "largest": batch == "largest",
        "speed": speed,
        "prefill": prefill,
        "decode": decode,
        "tokens_per_second": count * NEW / (prefill + decode),
        "decode_tokens_per_second": count * (NEW - 1) / decode,
        "of_bandwidth": moved / decode / account.ceilings.bandwidth,
        "ideal_decode": ideal,
        "of_prefill_rate": account.prefill(rows) / prefill,
        "row_cache_bytes": engine.row_bytes(PROMPT, NEW),
        "cache_bytes": engine.take_stats().cache_bytes,
        # rows that the pages take, and that as many bytes would take if there were no pages
        "largest_batch": largest,
        "largest_by_bytes": budget / exact_row_bytes(engine),
    }
    if device.type == "cuda" and batch == "32":
        one["profile"] = profile(engine, rows)
    return one


def measure(
    shape: str, given: argparse.Namespace, ceilings: roofline.Ceilings, clock: Clock, keep: dict[str, Any]
) -> None:
    """All there is to know of a shape, as far as the time goes; kept as it comes."""
    device = torch.device(given.device)
    found = keep["shapes"][shape] = {"runs": [], "eight_bits": [], "schedulers": [], "peers": {}}
    for kinds in (*((None, kind) for kind in given.kv_caches), *((kind, None) for kind in given.weights)):
        work = functools.partial(eight_bits, shape, *kinds, given, ceilings, clock, found)
        attempt(f"{shape}, weights {kinds[0]}, cache {kinds[1]}", clock, device, work)
        write(given.out, keep)
    mine = own(shape, given, ceilings, clock, keep, found)
    give_back(device)  # the engine's model, before the peers'
    if not mine:
        return
    model = build(shape, device)
    for batch in given.peer_batches:
        found["peers"][batch] = peers(model, batch, mine[batch], clock, device)
        write(given.out, keep)


def eight_bits(
    shape: str,
    weights: Kind | None,
    kv_cache: Kind | None,
    given: argparse.Namespace,
    ceilings: roofline.Ceilings,
    clock: Clock,
    found: dict[str, Any],
) -> None:
    """The first batch with weights or cache of 8 bits, at the first and the last speed, to be compared with `runs`.

    With such a cache the last batch comes before it, the largest one by default.
    """
    _, account, budget = made_ready(shape, given, ceilings, weights, kv_cache)
    batches = [given.batches[0]] if kv_cache is None else [given.batches[-1], given.batches[0]]
    for speed, batch in itertools.product(sorted({given.speeds[0], given.speeds[-1]}), batches):
        name = f"{shape}, batch {batch}, {speed:g}x, weights {weights}, cache {kv_cache}"
        one = cell(account, batch, speed, budget, given, clock, name)
        if one is None:
            continue
        found["eight_bits"].append({"weights": weights, "kv_cache": kv_cache, **one})
        print(
            f"  {name:34} {one['batch']:5} rows  decode {one['decode']:6.2f} s, "
            f"{one['decode_tokens_per_second']:8,.0f} tokens/s, {one['of_bandwidth']:.2f} of bandwidth, "
            f"largest batch {one['largest_batch']}",
            flush=True,
        )


def own(
    shape: str,
    given: argparse.Namespace,
    ceilings: roofline.Ceilings,
    clock: Clock,
    keep: dict[str, Any],
    found: dict[str, Any],
) -> dict[int, dict[str, Any] | None]:
    """The engine's part; what the peers' batches come to in it, if there is time for peers."""
    device = torch.device(given.device)
    decoder, account, budget = made_ready(shape, given, ceilings)
    for batch in given.batches:
        full: dict[str, Any] = {}
        for speed in given.speeds:
            name = f"{shape}, batch {batch}, {speed:g}x"
            work = functools.partial(cell, account, batch, speed, budget, given, clock, name)
            one = attempt(name, clock, device, work)
            if one is None:
                continue
            full = full or one
            one["speedup"] = full["decode"] / one["decode"]
            one["ideal_speedup"] = full["ideal_decode"] / one["ideal_decode"]
            found["runs"].append(one)
            write(given.out, keep)
            print(
                f"  {name:34} {one['batch']:5} rows  prefill {one['prefill']:6.2f} s "
                f"({one['of_prefill_rate']:.2f} of the ceiling)  decode {one['decode']:6.2f} s, "
                f"{one['decode_tokens_per_second']:8,.0f} tokens/s, {one['of_bandwidth']:.2f} of bandwidth, "
                f"{one['speedup']:.2f}x of {one['ideal_speedup']:.2f}x",
                flush=True,
            )
            if "profile" in one:
                print(f"    {json.dumps({key: one['profile'][key] for key in ('wall', 'kernels', 'gaps')})} us a step")
    for kind, speed, scheduler in itertools.product(("long-tailed", "e2e"), (1.0, 3.0), ("lock_step", "refill")):
        name = f"{shape}, {kind}, {speed:g}x {scheduler}"
        work = functools.partial(ragged, decoder, kind, speed, scheduler, given, clock, budget, name)
        one = attempt(name, clock, device, work)
        if one is not None:
            found["schedulers"].append(one)
            write(given.out, keep)
    mine: dict[int, dict[str, Any] | None] = {}
    if given.peers and device.type == "cuda" and clock.allows(f"{shape}, transformers", 60):
        for batch in given.peer_batches:
            engine = engine_for(decoder, 1.0, [], budget, batch)
            mine[batch] = attempt(
                f"{shape}, for the peers", clock, device, functools.partial(ours, engine, batch, device)
            )
            del engine
            give_back(device)
    return mine


def chosen_between(
    shape: str, given: argparse.Namespace, ceilings: roofline.Ceilings, clock: Clock, keep: dict[str, Any]
) -> None:
    """What could be done in several ways: see gpu_choices."""
    device = torch.device(given.device)
    decoder, _, budget = made_ready(shape, given, ceilings)
    found = keep["choices"] = {"shape": shape, "steps": [], "attention": []}
    timed = functools.partial(run, device=device)
    for batch in (8, 128):
        rows = rows_of("equal", batch, decoder.vocab_size, PEER_NEW)
        for one in gpu_choices.choices(decoder, rows, budget, timed, clock.allows):
            found["steps"].append({"batch": batch, **one})
            print(
                f"  {batch:4} rows, {one['choice']:11} {one['way']:8} {1e6 * one['step']:8.0f} us a step, "
                f"{one['capture']:5.2f} s and {one['graph_bytes'] / 2**20:5.0f} MiB of capture",
                flush=True,
            )
        write(given.out, keep)
    for batch, kv_cache in itertools.product((1, 8, 32, 128), (None, *given.kv_caches)):
        ways = ATTENTION if kv_cache is None else ATTENTION[:3]
        for one in gpu_choices.attention(decoder, batch, 1024, ceilings.bandwidth, ways, clock.allows, kv_cache):
            found["attention"].append(one)
            print(f"  attention: {json.dumps(one)}", flush=True)
    write(given.out, keep)


def write(folder: Path, results: dict[str, Any]) -> None:
    """What has been measured so far: a run that is ended from outside keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(results, indent=1))


def ragged(
    decoder: Decoder,
    kind: str,
    speed: float,
    scheduler: str,
    given: argparse.Namespace,
    clock: Clock,
    budget: int,
    name: str,
) -> dict[str, Any] | None:
    """Rows of unequal lengths, a quarter of them in flight; None if there is no time for it."""
    rows = rows_of(kind, given.tail_rows, decoder.vocab_size)
    made = sum(row.sampling.max_new_tokens for row in rows)
    known = f"{kind} of {decoder.num_layers} x {decoder.model.config.hidden_size}"
    if not clock.allows(name, 3.5 * clock.last.get(known, 20.0)):
        return None
    engine = engine_for(decoder, speed, rows, budget, given.tail_rows // 4)
    for _ in range(3):  # the first two compile and capture
        synchronize(decoder.device)
        began = time.perf_counter()
        generate(engine, rows, budget_bytes=budget, max_rows=given.tail_rows // 4, scheduler=scheduler)
        synchronize(decoder.device)
        took = time.perf_counter() - began
    clock.last[known] = took
    stats = engine.take_stats()
    print(f"  {name:34} {took:6.2f} s  {made / took:8,.0f} tokens/s", flush=True)
    return {
        "workload": kind,
        "speed": speed,
        "scheduler": scheduler,
        "seconds": took,
        "tokens_per_second": made / took,
        "idle_row_steps": stats.idle_row_steps / 3,
        "cache_bytes": stats.cache_bytes,
    }


def main() -> None:
    """Measure, print, and write."""
    listed = {"type": lambda text: text.split(",")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--shapes", default=["opt-1.3b", "llama-3-8b", "opt-6.7b"], **listed)
    parser.add_argument("--batches", default=["32", "128", "1", "largest"], **listed)
    parser.add_argument("--speeds", default=[1.0, 2.0, 3.0, 5.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--weights", default=["int8", "fp8"], **listed, help="8 bits of products, besides bfloat16")
    parser.add_argument("--kv-caches", default=["int8", "fp8"], **listed, help="8 bits of keys and values, likewise")
    parser.add_argument("--most-rows", type=int, default=2048, help="of the largest batch")
    parser.add_argument("--tail-rows", type=int, default=512, help="of unequal lengths")
    parser.add_argument("--cache-gib", type=int, default=1, help="without a GPU")
    parser.add_argument("--demo-rows", type=int, default=2000, help="through a Generator; 0 is none")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--peer-batches", default=[32, 128], type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--no-choices", dest="choices", action="store_false")
    parser.add_argument("--choices-shape", default="llama-3-8b", help="whose layers are tried in several ways")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("work/gpu"))
    given = parser.parse_args()
    if given.device == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise SystemExit("Triton needs a C compiler to launch its kernels: install gcc")
    clock = Clock(given.minutes)
    device = torch.device(given.device)
    large = (8192, 2**31) if device.type == "cuda" else (1024, 2**26)
    ceilings = roofline.measure(torch.bfloat16, device, *large)
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compile": "off, but for the static peer",
        "flops": ceilings.flops,
        "bandwidth": ceilings.bandwidth,
    }
    print(f"{facts['device']}: {ceilings.flops / 1e12:.0f} TFLOP/s, {ceilings.bandwidth / 1e12:.2f} TB/s", flush=True)
    results: dict[str, Any] = {"facts": facts, "shapes": {}, "left_out": clock.left_out}
    if given.demo_rows:  # the whole way first, with a small model
        results["demo"] = attempt("demo", clock, device, lambda: demo(given.demo_rows, given.device, 2**30))
        write(given.out, results)
    for shape in given.shapes:
        print(shape, flush=True)
        attempt(shape, clock, device, functools.partial(measure, shape, given, ceilings, clock, results))
    if given.choices and device.type == "cuda":
        shape = given.choices_shape
        attempt("choices", clock, device, lambda: chosen_between(shape, given, ceilings, clock, results))
    for name in clock.left_out:
        print(f"left out: {name}")
    write(given.out, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
