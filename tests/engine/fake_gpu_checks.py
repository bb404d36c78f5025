"""The GPU's engine on a fake one, see `fake_gpu`; run by test_gpu_fake.py in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import Gpu, fake_gpu
from tiny_models import MODELS, WINDOWLESS
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actors.engine.checkpoint.compressed import LIMITS, Kind
from actors.engine.checkpoint.weights import ALLOWANCE
from actors.engine.constraints.constraint import Bits
from actors.engine.decoder import Decoder
from actors.engine.exact.engine import Drafter
from actors.engine.gpu import kernels
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.exact import GpuExactEngine
from actors.engine.gpu.products import EightBits
from actors.engine.row import rows_per_layer
from actors.engine.sampling.stopping import StopStrings
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams
from actors.engine.working_memory import working_bytes

STOP = (2,)
LAYERS = 3
STEPS = 10  # beyond the horizon of 6
GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
WIDE = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
CONFIGS = {
    "llama-3-8b": ("llama", {**GROUPED, **WIDE, "max_position_embeddings": 8192}),
    "opt-1.3b": ("opt", {"hidden_size": 2048, "num_attention_heads": 32, "ffn_dim": 8192}),
    **{name: MODELS[name] for name in ("llama", "opt-post-norm", "mistral-full", "qwen2", "qwen3", "olmo2")},
    **WINDOWLESS,
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "narrowed": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "barred": {"min_new_tokens": 3, "ignore_eos": False},
    "penalized": {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
}


class Anything:
    """A constraint that allows all tokens and never ends."""

    name, most_tokens = "anything", None
    scored, label, error = True, None, None

    def begin(self) -> Anything:
        return self

    def prepare(self) -> None: ...

    matcher = None

    def write(self, bits: Bits) -> None:
        bits[:] = -1

    def advance(self, token: int) -> bool:
        return False

    def is_complete(self) -> bool:
        return False


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with fake_gpu() as found:
        yield found


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    kind, keys = CONFIGS[name]
    config: PretrainedConfig = AutoConfig.for_model(kind, **{**keys, "num_hidden_layers": LAYERS})
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def engine_of(
    name: str,
    max_rows: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    weights: Kind | None = None,
    **how: Any,
) -> GpuEngine:
    decoder = Decoder(model_of(name, dtype))
    assert decoder.prepare_for_gpu(kernels, None if weights is None else EightBits(weights))
    schedule = ScheduleSpec(speedup=2, horizon=6).build(decoder.num_layers)
    return GpuEngine(decoder, schedule, STOP, budget_bytes=2**30, max_rows=max_rows, **how)


def rows_of(count: int, **params: Any) -> list[Request]:
    asked = SamplingParams(**{"max_new_tokens": 30, "ignore_eos": True, **params})
    return [Request([3, 4, *range(number % 9)], asked, number) for number in range(count)]


def steps_without_waits(gpu: Gpu, engine: GpuEngine, rows: list[Request]) -> tuple[int, int, int]:
    """Graphs captured and replayed and kernels launched by STEPS steps of these rows, none of which waits."""
    engine.open(8, 20, 30)
    engine.admit(rows)
    gpu.waits.clear()
    before = gpu.captures, gpu.replays, gpu.own_launches
    for _ in range(STEPS):
        engine.step()
    assert not gpu.waits
    engine.close()
    return gpu.captures - before[0], gpu.replays - before[1], gpu.own_launches - before[2]


@pytest.mark.parametrize(
    ("name", "params", "weights", "kv_cache"),
    [
        *(("llama-3-8b", one, None, None) for one in PARAMS),
        *((one, "narrowed", None, None) for one in CONFIGS if one != "llama-3-8b"),
        *((one, "greedy", weights, None) for one in ("llama-3-8b", "opt-1.3b", "opt-post-norm") for weights in LIMITS),
        *((one, "greedy", None, cache) for one in ("llama-3-8b", "opt-1.3b") for cache in LIMITS),
        ("llama-3-8b", "greedy", "fp8", "int8"),
    ],
)
def test_steps_wait_for_nothing_and_graphs_hold_no_memory_of_the_host(
    gpu: Gpu, name: str, params: str, weights: Kind | None, kv_cache: Kind | None
) -> None:
    engine = engine_of(name, weights=weights, kv_cache=kv_cache, cumulative_logprob=params != "greedy")
    rows = rows_of(4, **PARAMS[params])
    for run in range(3):  # kernels are compiled, graphs captured, graphs replayed
        done = steps_without_waits(gpu, engine, rows)
        assert run < 2 or done == (0, STEPS, 0), "the third time a step is one graph"
        assert run > 0 or done[0], "graphs are captured"


@pytest.mark.parametrize(
    ("name", "weights", "kv_cache", "layer", "around"),
    [
        ("llama-3-8b", None, None, 11, 5),
        ("opt-1.3b", None, None, 9, 5),
        # a product is two launches in fp8, one more behind a relu, and three in int8
        ("llama-3-8b", "fp8", None, 15, 6),
        ("llama-3-8b", "int8", None, 19, 7),
        ("opt-1.3b", "fp8", None, 14, 6),
        ("opt-1.3b", "int8", None, 17, 7),
        # keys and values are rounded where they are written
        ("llama-3-8b", None, "int8", 11, 5),
        ("opt-1.3b", None, "fp8", 9, 5),
    ],
)
def test_a_greedy_step_is_few_launches(
    gpu: Gpu, name: str, weights: Kind | None, kv_cache: Kind | None, layer: int, around: int
) -> None:
    """Each takes its microseconds, however little there is to do: at a low depth those around the layers count. A few
    rows of grouped heads are split, and put together again."""
    engine = engine_of(name, weights=weights, kv_cache=kv_cache, graphs=False, cumulative_logprob=False)
    engine.open(8, 20, 30)
    engine.admit(rows_of(8))
    engine.step()
    before = gpu.launches
    engine.step()  # which gives no pages
    layers = sum(map(bool, rows_per_layer([engine.schedule.depth(1)] * 8, engine.schedule)))
    assert 0 < gpu.launches - before - layer * layers <= around
    engine.close()


def exact_of(name: str, max_rows: int, **how: Any) -> GpuExactEngine:
    decoder = Decoder(model_of(name, torch.bfloat16))
    assert decoder.prepare_for_gpu(kernels)
    full, half = (ScheduleSpec(speedup=speed, horizon=6).build(decoder.num_layers) for speed in (1, 2))
    drafter = Drafter(decoder, half)
    return GpuExactEngine(decoder, full, STOP, drafter=drafter, budget_bytes=2**30, max_rows=max_rows, **how)


@pytest.mark.parametrize(("name", "params"), [("llama-3-8b", one) for one in PARAMS] + [("opt-post-norm", "narrowed")])
def test_rounds_of_exact_mode_wait_for_nothing(gpu: Gpu, name: str, params: str) -> None:
    engine = exact_of(name, 32, cumulative_logprob=params != "greedy")
    rows = rows_of(4, **{**PARAMS[params], "max_new_tokens": 60})
    for run in range(3):  # kernels are compiled, graphs captured, graphs replayed
        engine.open(32, 20, 60)
        engine.admit(rows)
        gpu.waits.clear()
        before = gpu.captures, gpu.own_launches
        for _ in range(STEPS):
            engine.step()
        assert not gpu.waits and engine._stride == 4
        engine.close()
        assert run < 2 or (gpu.captures, gpu.own_launches) == before, "the third time a round is graphs"


def test_rounds_of_exact_mode_stay_within_the_memory_of_steps(gpu: Gpu) -> None:
    engine = exact_of("llama-3-8b", 512)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, **{"temperature": 0.8, "top_p": 0.9})
    with gpu.counted():
        engine.open(512, 20, 8)
        engine.admit([Request([4] * 19 + [row], params, row) for row in range(128)])
        for _ in range(2):
            engine.step()
            assert engine._stride == 4
    assert engine._run is not None
    taken = gpu.peak - engine._run.cache.bytes
    planned = working_bytes(engine.decoder.model.config, 2, 512) + ALLOWANCE
    assert taken < 0.9 * planned, f"{taken / 2**20:.0f} of {planned / 2**20:.0f} MiB"
    engine.close()


def test_a_draw_takes_no_memory_of_the_vocabularys_size(gpu: Gpu) -> None:
    """`working_bytes` counts none for it, but for logits that penalties, masks and bars have changed."""
    engine = engine_of("llama-3-8b", max_rows=512)
    asked = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logprobs": 20}
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, **asked)
    engine.open(512, 20, 8)
    engine.admit([Request([4] * 19 + [row], params, row) for row in range(512)])
    assert engine._run is not None and engine._variant is not None
    logits = torch.zeros(512, engine.decoder.vocab_size, dtype=torch.bfloat16, device="cuda")
    with gpu.counted():
        engine._run.state.sample(torch.arange(512, device="cuda"), logits, engine._variant)
    assert 0 < gpu.peak < logits.numel() // 8
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_compile_for_other_types(gpu: Gpu, dtype: torch.dtype) -> None:
    for name in ("llama", "opt-post-norm"):
        engine = engine_of(name, dtype=dtype)
        before = set(gpu.kernels)
        engine.open(8, 20, 30)
        engine.admit(rows_of(8))
        engine.step()
        engine.close()
        assert set(gpu.kernels) > before


@pytest.mark.parametrize("name", ["llama-3-8b", "opt-post-norm"])
def test_steps_with_masks_are_two_graphs_and_wait_for_nothing_else(gpu: Gpu, name: str) -> None:
    """The layers' graph, then the masks of the rows that have them, then the end of the step for all rows."""
    engine = engine_of(name)
    rows = rows_of(4)
    rows += [Request(row.prompt_ids, row.sampling, row.key, constraint=Anything()) for row in rows_of(4)]
    for run in range(3):  # kernels are compiled, graphs captured, graphs replayed
        done = steps_without_waits(gpu, engine, rows)
        assert run < 2 or done == (0, 2 * STEPS, 0)


@pytest.mark.parametrize(
    ("params", "ending", "launches"),
    [
        ({}, StopStrings(["b"], lambda tokens: "a"), 0),
        ({"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}, None, 1),
        ({"min_new_tokens": 3}, None, 1),
        ({"logprobs": 5}, None, 14),
    ],
)
def test_launches_of_features(gpu: Gpu, params: dict[str, Any], ending: StopStrings | None, launches: int) -> None:
    """Beside those of a greedy step of the same rows."""
    counts = []
    for one, end in (({}, None), (params, ending)):
        engine = engine_of("llama-3-8b", graphs=False, cumulative_logprob=False)
        engine.open(8, 20, 30)
        engine.admit([replace(row, ending=end) for row in rows_of(8, **one)])
        engine.step()
        before = gpu.launches
        engine.step()  # which gives no pages and starts no poll
        counts.append(gpu.launches - before)
        engine.close()
    assert counts[1] - counts[0] == launches


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("tokens", [2, 20])
def test_rows_end_and_others_take_their_places(gpu: Gpu, name: str, scheduler: str, tokens: int) -> None:
    """All end at the first look; many share a beginning, which may fill a page, and some a prompt."""
    engine = engine_of(name, max_rows=4)
    prefix = [3, 4] * (tokens // 2)
    rows = [Request([*prefix, *row.prompt_ids[2:]], row.sampling, row.key) for row in rows_of(21)]
    gpu.flags = True
    try:
        done = generate(engine, rows, budget_bytes=2**30, max_rows=4, prefix=prefix, scheduler=scheduler)
    finally:
        gpu.flags = False
    assert [len(one.token_ids) for one in done] == [1] * 21 and all(one.error is None for one in done)


def test_events_of_passes_are_dropped_without_a_call_of_take_stats(gpu: Gpu) -> None:
    """As for a `Generator` in `map_batches`, which never calls it."""
    engine = engine_of("llama")
    for _ in range(5):
        engine.open(8, 20, 30)
        engine.admit(rows_of(8))
        engine.close()
    assert not engine._prefill_times._passes
    stats = engine.take_stats()
    assert 0 < stats.prefill_seconds <= 5  # by the events, each pass took a millisecond


def test_used_cache_is_that_of_allocated_pages(gpu: Gpu) -> None:
    engine = engine_of("llama")
    assert engine.used_cache_bytes() == 0
    engine.open(8, 20, 30)
    assert engine.used_cache_bytes() == 0
    engine.admit(rows_of(8))
    used = engine.used_cache_bytes()
    assert used > 0 and used % engine._page_bytes == 0
    engine.close()
    assert engine.used_cache_bytes() == 0


def test_pages_run_out(gpu: Gpu) -> None:
    engine = engine_of("llama", max_rows=8)
    engine._pool.pages = 20
    engine.open(8, 20, 30)
    engine.admit([Request(range(3, 13), one.sampling, one.key) for one in rows_of(4)])
    preempted: list[int] = []
    gpu.waits.clear()
    for _ in range(25):
        engine.step()
        preempted += engine.take_preempted()
    assert preempted and not gpu.waits
    engine.close()


LENGTHS = {"short": [20] * 512, "many": [400] * 20, "one": [2000], "shared": [330] * 60, "riding": [20] * 512}
DRAWN = {
    "greedy": {},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "min_new_tokens": 3,
        "ignore_eos": False,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "logprobs": 20,
    },
}


@pytest.mark.parametrize(
    ("lengths", "drawn", "weights", "kv_cache"),
    [
        *((one, "all", None, None) for one in ("short", "riding")),
        *((one, "greedy", None, None) for one in ("many", "one", "shared")),
        *(("riding", "all", "int8", None), ("many", "greedy", "int8", None), ("riding", "all", "fp8", None)),
        *(("riding", "all", None, "int8"), ("shared", "greedy", None, "int8"), ("shared", "greedy", None, "fp8")),
    ],
)
@pytest.mark.parametrize("name", ["llama-3-8b", "opt-1.3b"])
def test_a_planned_batch_stays_within_its_memory(
    gpu: Gpu, name: str, lengths: str, drawn: str, weights: Kind | None, kv_cache: Kind | None
) -> None:
    """What prompts, their draws and steps take beside weights and pages, against what is planned for it."""
    max_rows = 512
    engine = engine_of(name, max_rows=max_rows, weights=weights, kv_cache=kv_cache)
    config = engine.decoder.model.config
    params = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, **DRAWN[drawn]})
    given = LENGTHS[lengths]
    shared = [3] * 300 if lengths == "shared" else []
    rows = [
        Request([*shared, *[4] * (length - len(shared) - 1), place % 50], params) for place, length in enumerate(given)
    ]
    with gpu.counted():
        engine.open(len(rows), max(given), 8)
        rows = rows[: engine.admission_estimate(rows, [shared] * len(rows))]
        first = len(rows) // 2 if lengths == "riding" else len(rows)
        engine.admit(rows[:first], shared)
        if first < len(rows):
            engine.step()
            engine.admit(rows[first:], shared)
            assert engine.stepped
        for _ in range(3):
            engine.step()
    assert engine._run is not None
    taken = gpu.peak - engine._run.cache.bytes
    planned = working_bytes(config, 2, max_rows, weights) + ALLOWANCE
    assert taken < 0.9 * planned, f"{taken / 2**20:.0f} of {planned / 2**20:.0f} MiB"
    engine.close()


def test_the_benchmark_comes_to_its_end(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts but transformers, whose own loop waits for values; rows end as soon as the host looks."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import gpu_speed as benchmark

    arguments = "--shapes opt-125m --batches 2,largest --speeds 1,3 --no-peers --device cuda --demo-rows 0"
    arguments += " --weights int8 --kv-caches int8"
    arguments += f" --choices-shape opt-125m --tail-rows 8 --most-rows 4 --out {tmp_path}"
    monkeypatch.setattr("sys.argv", ["gpu.py", *arguments.split()])
    monkeypatch.setattr(gpu, "flags", True)
    with gpu.counted():
        benchmark.main()
    assert gpu.peak < 70 * 2**30, f"an engine's pages must be gone before the next one's come: {gpu.largest}"
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["left_out"] == []
    shape = told["shapes"]["opt-125m"]
    assert [(one["batch"], one["speed"]) for one in shape["runs"]] == [(2, 1), (2, 3), (4, 1), (4, 3)]
    assert all(one["largest_batch"] >= 0.95 * int(one["largest_by_bytes"]) for one in shape["runs"])
    eight = [(one["weights"], one["kv_cache"], one["batch"], one["speed"]) for one in shape["eight_bits"]]
    # the largest batch first, for which a cache of 8 bits is made
    assert eight == [
        *((None, "int8", rows, speed) for speed in (1, 3) for rows in (4, 2)),
        *(("int8", None, 2, speed) for speed in (1, 3)),
    ]
    assert len(shape["schedulers"]) == 8
    assert len(told["choices"]["steps"]) == 32 and told["choices"]["attention"]


def test_what_was_compiled_spills_nothing_and_fits_a_multiprocessor(gpu: Gpu) -> None:
    """Last of all: registers and shared memory of every kernel that the others have launched."""
    assert {
        "_begin",
        "_finish",
        "_norm",
        "_add",
        "_gate",
        "_append",
        "_attend",
        "_combine",
        "_sample",
        "_adjust",
        "_masked_logprobs",
        "_round_rows",
        "_scale_sums",
    } <= {one.metadata.name for one in gpu.kernels.values()}
    for kernel in gpu.kernels.values():
        usage = gpu.resources(kernel)
        assert usage["LOCAL"] == 0 and usage["STACK"] <= 8, f"{kernel.metadata.name} spills: {usage}"  # two registers
        # as many of it at once as its 227 KiB of shared memory and 65,536 registers take
        threads = 32 * kernel.metadata.num_warps
        at_once = min(232_448 // max(1, kernel.metadata.shared), 65_536 // (usage["REG"] * threads))
        assert at_once * threads >= 256, f"{kernel.metadata.name}: {usage}, {kernel.metadata.shared} bytes shared"
