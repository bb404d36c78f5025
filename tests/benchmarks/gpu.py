"""The engine on a GPU against the memory's limit, at every depth, and against transformers. See gpu.sh.

What a decode step must read is counted: the weights of the layers that run, the vocabulary head, and the keys and
values of the rows that run them; ideal is what those bytes and FLOPs take at the ceilings measured first. What does not
fit the time is left out and named. Two runs that compile kernels and capture graphs go before each measured one, of the
largest batch one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_choices
import physics
import torch
import transformers
from gpu_demo import demo
from gpu_parts import NEW, PROMPT, Clock, build, rows_of, run, schedule_of, synchronize
from gpu_peers import PEER_NEW, agreement, ours, peers

from actors.engine.decoder import Decoder
from actors.engine.gpu import reference
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import page_bytes
from actors.engine.schedule import Schedule
from actors.engine.scheduler import generate
from actors.engine.types import Request
from actors.engine.weights import ALLOWANCE, Need, cache_that_fits
from actors.engine.working_memory import working_bytes

PROFILED = 10  # steps
ATTENTION = [(64, 3, 4), (64, 2, 4), (32, 3, 4), (128, 2, 4), (64, 3, 8), (32, 3, 2)]  # tokens, reads, warps


class Account:
    """Bytes and FLOPs that decode must move and make, and the least time for them."""

    def __init__(self, decoder: Decoder, weights: Sequence[int], head: int, ceilings: physics.Ceilings) -> None:
        self.decoder, self.weights, self.head, self.ceilings = decoder, weights, head, ceilings

    def decode(self, schedule: Schedule, rows: Sequence[Request]) -> tuple[float, float]:
        """Bytes, and least seconds, of these rows in lock step."""
        item = self.decoder.dtype.itemsize
        stored = 2 * self.decoder.kv_heads * self.decoder.head_dim * item
        width = self.decoder.model.config.num_attention_heads * self.decoder.head_dim
        lengths = [(len(row.prompt_ids), row.sampling.max_new_tokens) for row in rows]
        moved = least = 0.0
        for position in range(max(new for _, new in lengths) - 1):
            live = [prompt + position + 1 for prompt, new in lengths if position < new - 1]
            parts = [(self.head * item, 2 * len(live) * self.head)]
            for layer in schedule.layers(position):
                parts.append((self.weights[layer] * item, 2 * len(live) * self.weights[layer]))
                parts.append((sum(live) * stored, 4 * sum(live) * width))
            moved += sum(one for one, _ in parts)
            least += sum(max(one / self.ceilings.bandwidth, flops / self.ceilings.flops) for one, flops in parts)
        return moved, least

    def prefill(self, rows: Sequence[Request]) -> float:
        """Least seconds of all prompts: bound by arithmetic."""
        tokens = sum(len(row.prompt_ids) for row in rows)
        return 2 * tokens * sum(self.weights) / self.ceilings.flops


def exact_row_bytes(decoder: Decoder, schedule: Schedule) -> int:
    """Most bytes of keys and values that a row of PROMPT + NEW tokens ever needs, to the token."""
    each = 2 * decoder.kv_heads * decoder.head_dim * decoder.dtype.itemsize
    uses = [schedule.uses(layer, NEW - 1) for layer in range(schedule.num_layers)]
    return each * max(sum(PROMPT + at + 1 for last in uses if at < last) for at in range(NEW - 1))


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


def made_ready(shape: str, given: argparse.Namespace, ceilings: physics.Ceilings) -> tuple[Decoder, Account, int]:
    """A model with the GPU's layers, what its passes must move, and bytes for its cache."""
    device = torch.device(given.device)
    operations: Any = reference
    if device.type == "cuda":
        from actors.engine.gpu import kernels as operations
    decoder = Decoder(build(shape, device))
    layers = [sum(one.numel() for one in block.parameters() if one.dim() == 2) for block in decoder.blocks]
    account = Account(decoder, layers, decoder.head.weight.numel(), ceilings)
    assert decoder.prepare_for_gpu(operations)
    if device.type != "cuda":
        return decoder, account, given.cache_gib * 2**30
    torch.cuda.empty_cache()
    beside = working_bytes(decoder.model.config, decoder.dtype.itemsize, given.most_rows) + ALLOWANCE
    return decoder, account, cache_that_fits(Need(0, 0, 0, beside), torch.cuda.mem_get_info()[0])


def measure(
    shape: str, given: argparse.Namespace, ceilings: physics.Ceilings, clock: Clock, keep: dict[str, Any]
) -> None:
    """All there is to know of a shape, as far as the time goes; kept as it comes."""
    device = torch.device(given.device)
    found = keep["shapes"][shape] = {"runs": [], "schedulers": [], "peers": {}}
    decoder, account, budget = made_ready(shape, given, ceilings)
    each = page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
    for batch in given.batches:
        full: dict[str, float] = {}
        for speed in given.speeds:
            schedule = schedule_of(decoder, speed, rows_of("equal", 1, decoder.vocab_size))
            engine = GpuEngine(decoder, schedule, (), budget_bytes=budget, max_rows=1, cumulative_logprob=False)
            count = budget // engine.row_bytes(PROMPT, NEW) if batch == "largest" else int(batch)
            count = min(count, given.most_rows)
            engine.max_rows = count
            rows = rows_of("equal", count, decoder.vocab_size)
            moved, ideal = account.decode(schedule, rows)
            name = f"{shape}, batch {batch}, {speed:g}x"
            before = 1 if batch == "largest" else 2  # whose prompts alone take a while
            if not clock.allows(name, 2 * (before + 1) * (ideal + account.prefill(rows)) + 5):
                continue
            try:
                for _ in range(before):
                    run(engine, rows, device)  # kernels are compiled, graphs captured
                prefill, decode = run(engine, rows, device)
            except (RuntimeError, MemoryError) as error:
                clock.left_out.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                print(f"  {name}: {clock.left_out[-1]}", flush=True)
                continue
            one = {
                "batch": count,
                "largest": batch == "largest",
                "speed": speed,
                "prefill": prefill,
                "decode": decode,
                "tokens_per_second": count * NEW / (prefill + decode),
                "decode_tokens_per_second": count * (NEW - 1) / decode,
                "of_bandwidth": moved / decode / ceilings.bandwidth,
                "ideal_decode": ideal,
                "of_prefill_rate": account.prefill(rows) / prefill,
                "row_cache_bytes": engine.row_bytes(PROMPT, NEW),
                "cache_gib": engine.pages * each / 2**30,
                # rows that the pages take, and that as many bytes would take if there were no pages
                "largest_batch": budget // engine.row_bytes(PROMPT, NEW),
                "largest_by_bytes": budget / exact_row_bytes(decoder, schedule),
            }
            full = full or {"decode": decode, "prefill": prefill, "ideal": ideal}
            one["speedup"], one["ideal_speedup"] = full["decode"] / decode, full["ideal"] / ideal
            found["runs"].append(one)
            print(
                f"  {name:34} {count:5} rows  prefill {prefill:6.2f} s ({one['of_prefill_rate']:.2f} of the ceiling)  "
                f"decode {decode:6.2f} s, {one['decode_tokens_per_second']:8,.0f} tokens/s, "
                f"{one['of_bandwidth']:.2f} of bandwidth, {one['speedup']:.2f}x of {one['ideal_speedup']:.2f}x",
                flush=True,
            )
            if device.type == "cuda" and batch == "32":
                one["profile"] = profile(engine, rows)
                print(f"    {json.dumps({key: one['profile'][key] for key in ('wall', 'kernels', 'gaps')})} us a step")
            write(given.out, keep)
            del engine
            if device.type == "cuda":
                torch.cuda.empty_cache()
    try:
        schedulers(shape, decoder, given, clock, budget, found["schedulers"])
    except (RuntimeError, MemoryError) as error:
        clock.left_out.append(f"{shape}, schedulers: {type(error).__name__}: {str(error)[:200]}")
    write(given.out, keep)
    if given.peers and device.type == "cuda" and clock.allows(f"{shape}, transformers", 60):
        mine = {}
        for batch in given.peer_batches:
            engine = GpuEngine(
                decoder,
                schedule_of(decoder, 1.0, []),
                (),
                budget_bytes=budget,
                max_rows=batch,
                cumulative_logprob=False,
            )
            mine[batch] = ours(engine, batch, device)
            del engine
        del decoder, account  # both hold the weights
        torch.cuda.empty_cache()
        model = build(shape, device)
        for batch in given.peer_batches:
            told = found["peers"][batch] = peers(model, model.config.vocab_size, batch, clock, device)
            rows = rows_of("equal", batch, model.config.vocab_size)
            told["agreement with generate"] = agreement(model, rows, mine[batch]["answers"])
            told["ours, 1x"] = mine[batch]["tokens_per_second"]
            print(f"    ours, 1x {mine[batch]['tokens_per_second']:29,.0f} tokens/s", flush=True)
            print(f"    greedy tokens that are generate's too: {told['agreement with generate']:.3f}", flush=True)
        write(given.out, keep)


def chosen_between(
    shape: str, given: argparse.Namespace, ceilings: physics.Ceilings, clock: Clock, found: dict[str, Any]
) -> None:
    """What could be done in several ways: see gpu_choices."""
    device = torch.device(given.device)
    decoder, _, budget = made_ready(shape, given, ceilings)
    found["choices"], found["attention"] = [], []
    for batch in (32, 128):
        rows = rows_of("equal", batch, decoder.vocab_size, PEER_NEW)
        timed = functools.partial(run, device=device)
        for one in gpu_choices.choices(decoder, rows, budget, timed, clock.allows):
            found["choices"].append({"batch": batch, **one})
            print(
                f"  {batch:4} rows, {one['choice']:11} {one['way']:8} {1e6 * one['step']:8.0f} us a step, "
                f"{one['capture']:5.2f} s and {one['graph_bytes'] / 2**20:5.0f} MiB of capture",
                flush=True,
            )
        for one in gpu_choices.attention(decoder, batch, 1024, ceilings.bandwidth, ATTENTION, clock.allows):
            found["attention"].append(one)
            print(f"  attention: {json.dumps(one)}", flush=True)


def write(folder: Path, results: dict[str, Any]) -> None:
    """What has been measured so far: a run that is ended from outside keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(results, indent=1))


def schedulers(
    shape: str, decoder: Decoder, given: argparse.Namespace, clock: Clock, budget: int, found: list[dict[str, Any]]
) -> None:
    """Lock step and refill over rows of unequal lengths, a quarter of them in flight."""
    for kind in ("long-tailed", "e2e"):
        rows = rows_of(kind, given.tail_rows, decoder.vocab_size)
        made = sum(row.sampling.max_new_tokens for row in rows)
        for speed in (1.0, 3.0):
            for scheduler in ("lock_step", "refill"):
                name = f"{shape}, {kind}, {speed:g}x {scheduler}"
                seconds = clock.last.get(f"{shape} {kind}", 20.0)
                if not clock.allows(name, 3.5 * seconds):
                    continue
                schedule = schedule_of(decoder, speed, rows)
                engine = GpuEngine(
                    decoder, schedule, (), budget_bytes=budget, max_rows=given.tail_rows // 4, cumulative_logprob=False
                )
                for _ in range(3):  # the first two compile and capture
                    synchronize(decoder.device)
                    began = time.perf_counter()
                    generate(engine, rows, budget_bytes=budget, max_rows=given.tail_rows // 4, scheduler=scheduler)
                    synchronize(decoder.device)
                    took = time.perf_counter() - began
                clock.last[f"{shape} {kind}"] = took
                stats = engine.take_stats()
                one = {"workload": kind, "speed": speed, "scheduler": scheduler, "seconds": took}
                found.append({**one, "tokens_per_second": made / took, "idle_row_steps": stats.idle_row_steps / 3})
                print(f"  {name:34} {took:6.2f} s  {made / took:8,.0f} tokens/s", flush=True)
                del engine


def main() -> None:
    """Measure, print, and write."""
    listed = {"type": lambda text: text.split(",")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--shapes", default=["opt-1.3b", "llama-3-8b", "opt-6.7b"], **listed)
    parser.add_argument("--batches", default=["32", "128", "1", "largest"], **listed)
    parser.add_argument("--speeds", default=[1.0, 2.0, 3.0, 5.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--most-rows", type=int, default=2048, help="of the largest batch")
    parser.add_argument("--tail-rows", type=int, default=512, help="of unequal lengths")
    parser.add_argument("--cache-gib", type=int, default=1, help="without a GPU")
    parser.add_argument("--demo-rows", type=int, default=2000, help="through a Generator; 0 is none")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--peer-batches", default=[32, 128], type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--no-choices", dest="choices", action="store_false", help="of the first shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("work/gpu"))
    given = parser.parse_args()
    if given.device == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise SystemExit("Triton needs a C compiler to launch its kernels: install gcc")
    clock = Clock(given.minutes)
    device = torch.device(given.device)
    large = (8192, 2**31) if device.type == "cuda" else (1024, 2**26)
    ceilings = physics.measure(torch.bfloat16, device, *large)
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
    for shape in given.shapes:
        print(shape, flush=True)
        measure(shape, given, ceilings, clock, results)
        if given.demo_rows and "demo" not in results and clock.allows("demo", 40):
            results["demo"] = demo(given.demo_rows, given.device, 2**30)
            write(given.out, results)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.choices and device.type == "cuda":
        chosen_between(given.shapes[0], given, ceilings, clock, results["shapes"][given.shapes[0]])
    for name in clock.left_out:
        print(f"left out: {name}")
    write(given.out, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
