"""The CPU's own layers and products against the library's, in float32 and bfloat16; and the build of the kernels."""

from __future__ import annotations

import gc
import mmap
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine_cases import STOP, answer, generate, requests
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from actors.engine.cache import SlotShape
from actors.engine.cpu import kernels
from actors.engine.cpu.executor import CpuExecutor, StackDecoder, fastest_decoder
from actors.engine.cpu.products import (
    ALIGNED,
    PAGE,
    LibraryProduct,
    PackedLinear,
    PanelProduct,
    pack_linears,
    packs,
    to_huge_pages,
)
from actors.engine.cpu.stack import StackedLayer, normalize
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import is_out_of_memory
from actors.engine.model.layer_weights import NormWeights
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HERE = Path(__file__).parent
builds = pytest.mark.skipif(kernels.library() is None, reason="no C++ compiler")
multiplying = pytest.mark.skipif(not kernels.multiplies(BF16, CPU), reason="no bfloat16 kernels on this CPU")
DTYPES = [pytest.param(torch.float32, marks=builds), pytest.param(BF16, marks=multiplying)]
HALVED = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


def prepared(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    return fastest_decoder(tiny_model(family, **changes).to(dtype))


def near(dtype: torch.dtype, half: float = 2**-7, single: float = 1e-5) -> dict[str, float]:
    return {"rtol": half, "atol": half} if dtype == BF16 else {"rtol": single, "atol": single}


@contextmanager
def recorded(decoder: Decoder) -> Iterator[list[torch.Tensor]]:
    """Collect the logits of every pass."""
    kept: list[torch.Tensor] = []
    logits_of = decoder.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(logits_of(hidden))
        return kept[-1]

    with mock.patch.object(decoder, "logits", keep):
        yield kept


# ---------------------------------------------------------------------------------------------------- products, norms


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(PanelProduct, torch.float32, marks=builds),
        pytest.param(PanelProduct, BF16, marks=multiplying),
        pytest.param(LibraryProduct, BF16, marks=pytest.mark.skipif(not packs(BF16, CPU), reason="no such products")),
    ],
)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 150)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_a_packed_product_is_the_product(
    kind: type[PanelProduct] | type[LibraryProduct],
    dtype: torch.dtype,
    rows: int,
    sizes: tuple[int, int],
    bias: bool,
    seed: int,
) -> None:
    """Rounded once, from a sum in float32; by the kernel every row as if it were alone, and NaN stays in its row."""
    torch.manual_seed(seed)
    inputs = sizes[0] * (2 if dtype == BF16 else 1)
    weight, added = torch.randn(sizes[1], inputs).to(dtype), torch.randn(sizes[1]).to(dtype) if bias else None
    hidden = torch.randn(rows, inputs).to(dtype)
    run = kind(weight, added)
    got = run(hidden)
    exact = nn.functional.linear(hidden.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(got.double(), exact, rtol=2**-7 if dtype == BF16 else 1e-5, atol=1e-3)
    if kind is PanelProduct:
        row = seed % rows
        assert torch.equal(run(hidden[row : row + 1]), got[row : row + 1])
        hidden[row, seed % inputs] = torch.nan
        again = run(hidden)
        assert again[row].isnan().all() and torch.equal(again[:row], got[:row])


@pytest.mark.skipif(not (packs(BF16, CPU) or kernels.multiplies(BF16, CPU)), reason="no packed bfloat16 products")
@torch.inference_mode()
def test_linear_layers_are_packed_wherever_they_are() -> None:
    holder = nn.ModuleDict({"inner": nn.ModuleDict({"conv": Conv1D(7, 10), "linear": nn.Linear(10, 7)})}).to(BF16)
    hidden = torch.randn(3, 10).to(BF16)
    want = [layer(hidden).float() for layer in holder["inner"].values()]  # type: ignore[operator, union-attr]
    pack_linears(holder)
    for layer, exact in zip(holder["inner"].values(), want, strict=True):  # type: ignore[operator, union-attr]
        assert isinstance(layer, PackedLinear) and (layer.in_features, layer.out_features) == (10, 7)
        torch.testing.assert_close(layer(hidden).float(), exact, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_norms_are_the_librarys(dtype: torch.dtype, bias: bool) -> None:
    for rows, size in ((1, 1), (80, 33), (3, 300)):
        hidden, weight, added = (torch.randn(*shape).to(dtype) for shape in ((rows, size), (size,), (size,)))
        got = normalize(3 * hidden + 1, NormWeights(weight.float(), added.float() if bias else None, 1e-5))
        whole = (3 * hidden + 1).float(), (size,), weight.float()
        want = nn.functional.layer_norm(*whole, added.float(), 1e-5) if bias else nn.functional.rms_norm(*whole, 1e-5)
        torch.testing.assert_close(got.float(), want, **near(dtype))


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen3", "mistral", "opt", "gemma3"]),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 8, 20, 34, 64, 80, 128, 256]),
    width=st.integers(1, 20),
    wide=st.integers(1, 90),
    window=st.sampled_from([1, 7, 60, None]),
    lengths=st.lists(st.integers(1, 110), min_size=1, max_size=4),
    before=st.sampled_from([0, 0, 1, 70]),
    seed=st.integers(0, 99),
)
@example("llama", 2, 3, 80, 9, 50, None, [58, 97], 0, 3)
@example("mistral", 2, 1, 64, 9, 50, 7, [58, 97, 1], 70, 3)
@example("gemma3", 1, 3, 256, 9, 50, 7, [58, 97, 1], 70, 3)
@example("gemma3", 1, 1, 2, 1, 83, 60, [28], 0, 0)
@torch.inference_mode()
def test_layers_of_any_shape_are_the_librarys(
    dtype: torch.dtype,
    family: str,
    heads: int,
    group: int,
    size: int,
    width: int,
    wide: int,
    window: int | None,
    lengths: list[int],
    before: int,
    seed: int,
) -> None:
    """Logits of prompts, alone or behind a prefix, and of a step of each; bfloat16 near what float32 makes of them."""
    least = 4 if dtype == BF16 else 1  # norms over two numbers magnify rounding without a bound
    changes = {
        "hidden_size": heads * group * 2 * max(width, least),
        "num_attention_heads": heads * group,
        "vocab_size": 97,
        "num_hidden_layers": 2,
    }
    changes |= {"num_key_value_heads": heads, "head_dim": size, "intermediate_size": 2 * wide}
    changes |= {"sliding_window": window} if family == "mistral" else {}
    if family == "gemma3":
        changes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window or 512}
    if family == "opt":
        changes |= {"hidden_size": heads * size, "num_attention_heads": heads, "ffn_dim": 2 * wide}
        changes |= {"word_embed_proj_dim": heads * size}
    changes |= {"max_position_embeddings": 256, "initializer_range": 0.1}
    model = tiny_model(family, **changes).to(dtype)
    theirs, own = Decoder(model.float()), Decoder(tiny_model(family, **changes).to(dtype))
    own = fastest_decoder(own.model)
    assert isinstance(own, StackDecoder)
    chance, schedule = torch.Generator().manual_seed(seed), ScheduleSpec().build(2)
    prefix = torch.randint(3, 97, (before,), generator=chance).tolist()
    prompts = [prefix + torch.randint(3, 97, (length,), generator=chance).tolist() for length in lengths]
    rows = [Request(prompt, SamplingParams(max_new_tokens=2), key=row) for row, prompt in enumerate(prompts)]

    def logits(decoder: Decoder) -> list[torch.Tensor]:
        with recorded(decoder) as kept:
            engine = Engine(decoder, schedule, ())
            engine.open(len(rows), max(map(len, prompts)), 2)
            engine.admit(rows, prefix)
            for row in engine.rows:
                row.tokens[-1] = 6
            engine.step()
        return [one.float() for one in kept[-2:]]

    for place, (got, want) in enumerate(zip(logits(own), logits(theirs), strict=True)):
        error, limit = float((got - want).abs().max()), (float(want.std()) + 1e-3) * (0.25 if dtype == BF16 else 2e-4)
        if error >= limit and dtype == BF16:  # norms over two numbers magnify the library's rounding as much
            rounded = logits(Decoder(tiny_model(family, **changes).to(dtype)))[place]
            limit = 2 * float((rounded - want).abs().max())
        assert error < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "opt", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "lengths", [(1, 9, 40, 9, 2, 33, 31, 1), (95, 90, 85, 80, 75, 70, 60, 60), (600, 3, 300, 280, 50, 1)]
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_however_it_is_run(dtype: torch.dtype, family: str, lengths: tuple[int, ...]) -> None:
    """By one thread or several, prompts in groups of several threads or of one, with other rows or alone."""
    decoder = prepared(family, dtype, max_position_embeddings=700)
    prompts = [[5 + length % 40, *(7 + token % 20 for token in range(length - 1))] for length in lengths]
    rows = [Request(prompt, SamplingParams(max_new_tokens=3 + row)) for row, prompt in enumerate(prompts)]
    how: dict[str, Any] = {"budget_bytes": 2**40, "scheduler": "refill", "share_prefixes": False}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with recorded(decoder) as kept:
                generate(Engine(decoder, HALVED, ()), rows, max_rows=4, **how)
            found.append(kept)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert len(other) > 8 and all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))
    together = {tuple(one) for logits in found[0] for one in logits.tolist()}
    with recorded(decoder) as kept:
        generate(Engine(decoder, HALVED, ()), rows[1:2], max_rows=4, **how)
    assert all(tuple(logits[0].tolist()) in together for logits in kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "olmo2", "opt-post-norm", "gemma3"])
@torch.inference_mode()
def test_a_layer_with_other_attention_is_the_layer(dtype: torch.dtype, family: str) -> None:
    """`run_layer` over prompts, by which trees of tokens are run."""
    own, theirs = prepared(family, dtype), Decoder(tiny_model(family))
    assert all(isinstance(block, StackedLayer) for block in own.blocks)
    ids, positions = torch.randint(3, 90, (2, 9)), torch.arange(9).expand(2, -1)
    found = []
    for decoder in (own, theirs):
        hidden, rotary = decoder.embed(ids, positions)
        for layer in range(LAYERS):
            hidden = decoder.run_layer(layer, hidden, rotary[layer], None)
        found.append(decoder.logits(hidden.flatten(0, 1)).float())
    error = (found[0] - found[1]).abs() / found[1].std()
    assert float(error.max()) < (0.5 if dtype == BF16 else 1e-4)


@builds
@pytest.mark.parametrize(
    ("family", "changes", "own"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, True),
        ("llama", {"hidden_act": "gelu"}, False),
        ("mistral", {}, True),
        ("qwen2-window", {}, True),
        ("olmo3", {}, True),
        ("opt", {"enable_bias": False}, True),
        ("opt", {"activation_function": "gelu"}, False),
        ("opt", {"layer_norm_elementwise_affine": False}, False),
        ("opt-post-norm", {"enable_bias": False}, True),
        ("qwen3", {"attention_bias": True}, True),
        ("phi3", {"partial_rotary_factor": 1.0}, True),
        ("phi3-full", {"partial_rotary_factor": 0.75}, True),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}, True),
        ("smollm3-full", {"no_rope_layers": [1, 0, 1, 0, 0, 1]}, True),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, True),
        ("gemma", {"hidden_act": "silu"}, True),
        ("gemma3", {"tie_word_embeddings": True}, True),
        ("gemma3", {"attn_logit_softcapping": 2.0}, False),
        ("gemma2", {}, False),
        ("gpt2", {}, False),
    ],
)
@torch.inference_mode()
def test_layers_of_ones_own_are_taken_where_there_are_some(family: str, changes: dict[str, Any], own: bool) -> None:
    """Rows of unequal lengths have the library's tokens in every configuration."""
    made = [prepared(family, **changes), Decoder(tiny_model(family, **changes))]
    assert isinstance(made[0], StackDecoder) == own == isinstance(made[0].blocks[0], StackedLayer)
    assert list(made[0].family.layers(made[0].model)) == made[0].blocks
    rows = [Request([5 + row, *range(7, 8 + row)], SamplingParams(max_new_tokens=9)) for row in range(4)]
    answers = [generate(Engine(one, HALVED, ()), rows, budget_bytes=2**40, max_rows=4) for one in made]
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]


@pytest.mark.skipif(not kernels.quantizes(BF16, CPU), reason="no kernel for 8 bits")
def test_a_head_that_the_screen_does_not_decide_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take the whole head then; an int8 head is never screened."""
    undecided, rows = prepared("llama", BF16), requests(6, seed=4, most_new=12)
    rows = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in rows]
    want = [one.token_ids for one in answer(Engine(undecided, HALVED, STOP), rows)]
    monkeypatch.setattr("actors.engine.cpu.executor.UNDECIDED", 10**9)  # no candidate may be left
    assert [one.token_ids for one in answer(Engine(undecided, HALVED, STOP, cumulative_logprob=False), rows)] == want
    assert isinstance(undecided, StackDecoder) and undecided.screen is not None
    assert undecided.screen(torch.randn(3, 32).to(BF16)).tolist() == [-1] * 3


@builds
@torch.inference_mode()
def test_a_token_or_slot_outside_is_refused() -> None:
    decoder = prepared("llama")
    engine = Engine(decoder, ScheduleSpec().build(LAYERS), ())
    engine.open(1, 4, 3)
    engine.admit([Request([5, 6], SamplingParams(max_new_tokens=2), key=0)])
    for token, place in ((decoder.vocab_size, 2), (-1, 2), (5, 7)):
        with pytest.raises(AssertionError, match="outside"):
            engine.executor.decode([token], [place], [0], [1] * LAYERS)


def test_where_the_kernels_do_not_multiply_the_librarys_products_run() -> None:
    """A CPU with AMX, say: the library's layers, with packed products if there are such."""
    with mock.patch.object(kernels, "library", return_value=None):
        decoder = prepared("llama", BF16)
    assert not isinstance(decoder, StackDecoder) and isinstance(decoder.head, PackedLinear) == packs(BF16, CPU)
    engine = Engine(decoder, ScheduleSpec().build(LAYERS), frozenset())
    rows = [Request([5, 6, 7], SamplingParams(max_new_tokens=4))]
    [got] = generate(engine, rows, budget_bytes=2**40, max_rows=4)
    assert len(got.token_ids) == 4


# --------------------------------------------------------------------------------------------------- build and memory


@pytest.mark.parametrize(
    ("compiler", "cache"),
    [("/nowhere/g++", ""), ("false", ""), ("sh", ""), ("g++ --no-such-flag", ""), ("g++", "~no-such-user")],
)
def test_without_a_compiler_or_a_home_folder_the_librarys_layers_are_run(
    compiler: str, cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One line says so."""
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("SKIPDECODE_CACHE", cache or str(tmp_path))
    kernels.library.cache_clear()
    try:
        decoder = prepared("llama")
        assert not isinstance(decoder, StackDecoder) and type(decoder.blocks[0]).__name__ == "LlamaDecoderLayer"
        (said,) = [record.getMessage() for record in caplog.records]
        assert compiler.split()[0] in said and "\n" not in said
    finally:
        kernels.library.cache_clear()


@builds
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another source, which takes less time than the kernels do."""
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" int threads() { return 1; }\n')
    monkeypatch.setattr(kernels, "SOURCE", source)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKIPDECODE_CACHE", "~/cache")
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    first = kernels._built(compiler)
    assert first.parent == tmp_path / "cache" / "kernels"
    before = first.stat().st_mtime_ns
    assert kernels._built(compiler) == first and first.stat().st_mtime_ns == before
    assert [one.name for one in first.parent.iterdir()] == [first.name]


MEMORY = """
import resource
import torch
from tiny_models import tiny_model
from actors.engine.cpu.executor import fastest_decoder
from actors.engine.sampling.sampler import sample
from actors.engine.sampling.state import RowSampling
from actors.engine.types import SamplingParams

torch.set_num_threads(2)
decoder = fastest_decoder(tiny_model("llama", max_position_embeddings=2**18))
hidden, rotary = decoder.embed(torch.full((1, 2**18), 5), torch.arange(2**18)[None])
logits, nothing = torch.zeros(2, 2**24), torch.zeros(1, dtype=torch.int64)
few = torch.zeros(2, 2**22)
sample(few, [RowSampling(SamplingParams(temperature=1.0), 1)] * 2)
calls = {
    "top_k": lambda: print("top_k: done", sample(few, [RowSampling(SamplingParams(temperature=1.0, top_k=2), 1)] * 2)),
    "prompts": lambda: decoder.stack.prompts(
        0, hidden, rotary[0], torch.tensor([0, 2**18]), nothing, nothing, None
    ),
    "sample": lambda: sample(logits, [RowSampling(SamplingParams(temperature=1.0), 1)] * 2),
}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
with torch.inference_mode():
    for name, call in calls.items():
        try:
            call()
        except MemoryError as error:
            print(f"{name}: {error}")
"""


@builds
def test_memory_that_kernels_lack_is_a_memory_error() -> None:
    """In a process of its own, whose address space is limited: it goes on, and so can retry with less."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "top_k: done" in done.stdout, done.stdout  # it needs no more memory than the call before it
    for name in ("prompts", "sample"):
        assert f"{name}: the system has no memory" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(kernels.quantizes(BF16, CPU), reason="the tests above have run with the processor's instructions")
@pytest.mark.skipif("avx2" not in kernels._processor(), reason="the vectors of 64 bytes are too slow")
@builds
def test_bfloat16_and_int8_with_emulated_instructions(tmp_path: Path) -> None:
    """In a process of its own, for the kernels are loaded once: see avx512.h."""
    environment = {
        **os.environ,
        "CXX": f"{os.environ.get('CXX') or 'g++'} -w -include {HERE / 'avx512.h'}",
        "SKIPDECODE_CACHE": os.environ.get("SKIPDECODE_CACHE") or str(Path.home() / ".cache" / "skipdecode"),
    }
    files = [str(HERE / name) for name in ("test_cpu_layers.py", "test_quantization.py")]
    chosen = "definition or no_number or screen or dtype1 and (product or norms or shape or other_attention)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen, "-rs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-1000:]


@builds
@torch.inference_mode()
def test_slots_take_the_memory_of_the_last_ones_unless_it_is_far_too_large() -> None:
    decoder = fastest_decoder(tiny_model("llama"))
    assert isinstance(decoder, StackDecoder)
    executor = CpuExecutor(decoder)
    schedule = ScheduleSpec().build(decoder.num_layers)

    def keys(rows: int) -> torch.Tensor:
        executor.open(SlotShape(schedule, rows, 5, 8))
        found: torch.Tensor = executor._cache.layers[0][0]
        return found

    first = keys(4)
    executor.open(None)
    again = keys(3)  # leaves less than half of it unused
    assert again.data_ptr() == first.data_ptr()
    before = executor._memory
    keys(1)
    assert 4 * len(executor._memory) == len(before)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6),
    dtype=st.sampled_from([BF16, torch.uint8, torch.float32]),
)
def test_moved_weights_are_the_same_numbers_side_by_side(shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randint(0, 255, shape, generator=generator).to(dtype) for shape in shapes]
    moved = [weight.clone() for weight in weights]
    to_huge_pages(moved)
    gc.collect()
    first = moved[0].data_ptr()
    assert first % PAGE == 0
    for one, weight in zip(moved, weights, strict=True):
        assert torch.equal(one, weight) and one.is_contiguous() and one.data_ptr() % ALIGNED == 0
        assert first <= one.data_ptr() < first + sum(each.nbytes + ALIGNED for each in weights)


def test_a_kernel_without_huge_pages_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    weights = [torch.arange(1000)]
    monkeypatch.setattr(mmap, "mmap", Refused)
    to_huge_pages(weights)
    assert torch.equal(weights[0], torch.arange(1000))


def test_memory_that_runs_out_is_told_as_that() -> None:
    """By what the system really answers: a step that first needs a region is run again with fewer rows."""
    with pytest.raises(MemoryError, match="cannot allocate 4611686018431582208 bytes for weights: ") as caught:
        to_huge_pages([torch.zeros(1).expand(2**60)])
    assert is_out_of_memory(caught.value)
