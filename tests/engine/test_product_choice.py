"""Which product a model's weights are multiplied by: what is measured, what is recorded, and what follows from it."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MODELS, tiny_model

from actors.engine.cpu import choice, library
from actors.engine.cpu.choice import CacheRecords, Choice, Products, encoded, settled
from actors.engine.cpu.layers import CpuLayer
from actors.engine.cpu.packing import PackedLinear, PackedProduct, PanelProduct
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.types import ProductsName

BF16 = torch.bfloat16
KERNELS = encoded({"kernels": 1.0, "library": 0.95})
LIBRARY = encoded({"kernels": 1.0, "library": 0.8})
SMALL = Products(((96, 64), (64, 32), (128, 64), (64, 128)), 4, (500, 64), stacks=True)

both = pytest.mark.skipif(not library.multiplies(BF16, torch.device("cpu")), reason="no kernel for products")


class InMemory:
    """Records in a dictionary. late: what another process records between `find` and `settle`."""

    def __init__(self, value: bytes | None = None, late: bytes | None = None) -> None:
        self.value, self.late = value, late

    def find(self, key: str) -> bytes | None:
        return self.value

    def settle(self, key: str, value: bytes) -> bytes:
        self.value = self.value or self.late or value
        return self.value


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path))
    return tmp_path / "products"


records = st.sampled_from([None, KERNELS, LIBRARY])


@given(job=st.tuples(records, records), cached=st.tuples(records, records), fresh=st.sampled_from([KERNELS, LIBRARY]))
def test_the_job_decides_then_the_machine_then_a_measurement(
    job: tuple[bytes | None, bytes | None], cached: tuple[bytes | None, bytes | None], fresh: bytes
) -> None:
    """And whatever another process does meanwhile, what is used is what the job has recorded."""
    first, second = InMemory(*job), InMemory(*cached)
    measured: list[bytes] = []

    def measure() -> bytes:
        measured.append(fresh)
        return fresh

    used = settled("key", [first, second], measure)
    assert used == first.value
    assert used == (job[0] or job[1] or cached[0] or cached[1] or fresh)
    assert len(measured) == (job[0] is None and cached[0] is None)
    assert settled("key", [first, second], measure) == used and len(measured) <= 1


def test_a_tie_is_the_kernels() -> None:
    assert choice.chosen(KERNELS) == "kernels" and choice.chosen(LIBRARY) == "library"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"product": "fast"}', b"\xff"])
def test_a_damaged_record_of_the_cache_is_made_again(cache: Path, damage: bytes) -> None:
    cache.mkdir()
    (cache / "key.json").write_bytes(damage)
    assert settled("key", [CacheRecords()], lambda: LIBRARY) == LIBRARY
    assert [path.read_bytes() for path in cache.iterdir()] == [LIBRARY]


def test_a_cache_that_cannot_be_written_keeps_nothing(cache: Path) -> None:
    cache.parent.joinpath("products").write_text("a file")
    assert settled("key", [CacheRecords()], lambda: LIBRARY) == LIBRARY


def _settle(value: bytes, begin: Any, results: Any) -> None:
    begin.wait()
    results.put(CacheRecords().settle("key", value))


def test_of_processes_that_measure_at_once_one_decides(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, results = context.Event(), context.Queue()
    values = [KERNELS, LIBRARY] * 4
    processes = [context.Process(target=_settle, args=(value, begin, results)) for value in values]
    for process in processes:
        process.start()
    begin.set()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1 and [path.read_bytes() for path in cache.iterdir()] == list(found)


def work_for_a_millisecond() -> None:
    end = time.thread_time() + 1e-3
    while time.thread_time() < end:
        pass


@both
@pytest.mark.parametrize("slow", ["kernels", "library"])
def test_the_slower_product_is_not_chosen(cache: Path, slow: str) -> None:
    """Measured, not named: of the two, the one that takes a millisecond longer."""
    target = (library, "kernel") if slow == "kernels" else (PackedProduct, "__call__")
    own = getattr(*target)

    def late(*arguments: Any) -> Any:
        if slow == "library":
            work_for_a_millisecond()
            return own(*arguments)
        return lambda *pointers: (work_for_a_millisecond(), own(*arguments)(*pointers))

    with mock.patch.object(*target, late):
        assert Choice("measured")(SMALL) is (slow == "library")
    [path] = cache.iterdir()
    assert json.loads(path.read_bytes())["product"] == ("library" if slow == "kernels" else "kernels")
    assert Choice("measured")(SMALL) is (slow == "library"), "from the cache"


@both
def test_a_measurement_is_short(cache: Path) -> None:
    """Shapes of a model of 8 billion parameters; the time is this process's own."""
    layer = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    began = time.process_time()
    choice.measured(Products(layer, 32, (128256, 4096), stacks=True))
    assert time.process_time() - began < 3


@both
def test_what_changes_a_measurement_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [choice.key_of(SMALL), choice.key_of(Products(SMALL.layer, 5, SMALL.head, stacks=True))]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    keys.append(choice.key_of(SMALL))
    torch.set_num_threads(2)
    keys.append(choice.key_of(SMALL))
    assert len(set(keys)) == len(keys) and keys[0] != choice.key_of(SMALL)


@both
@pytest.mark.parametrize("setting", ["kernels", "library", "measured"])
def test_a_setting_is_kept_to(cache: Path, setting: ProductsName) -> None:
    with mock.patch.object(choice, "measured", return_value={"kernels": 1.0, "library": 0.5}) as measured:
        assert Choice(setting)(SMALL) is (setting == "kernels")
        assert measured.call_count == (setting == "measured")


@both
def test_a_damaged_record_of_a_job_is_refused(cache: Path) -> None:
    with (
        mock.patch.object(choice, "measured", return_value={"kernels": 1.0, "library": 0.5}),
        pytest.raises(UserError, match=r"products-\w+\.json .* damaged: delete it"),
    ):
        Choice("measured", [InMemory(b"{")])(SMALL)


@both
@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_all_products_of_a_family_are_the_chosen_ones(cache: Path, family: str) -> None:
    """With the library's no head is screened and no calls are joined, for its bits depend on the number of rows."""
    kinds: list[tuple[ProductsName, type]] = [("kernels", PanelProduct), ("library", PackedProduct)]
    for setting, kind in kinds:
        decoder = Decoder(tiny_model(family).to(BF16))
        decoder.prepare_for_cpu(choice=Choice(setting))
        products: list[Any] = []
        for block in decoder.blocks:
            if isinstance(block, CpuLayer):
                attention, mlp = block.attention, block.feed_forward
                products += [attention.qkv, attention.output, mlp.up, mlp.down]
            products += [module.product for module in block.modules() if isinstance(module, PackedLinear)]
        assert products and isinstance(decoder.head, PackedLinear)
        assert {type(one) for one in (*products, decoder.head.product)} == {kind}
        if setting == "library":
            assert decoder.stack is None and not decoder.rows_independent and decoder._screened is None
        hidden = torch.randn(5, decoder.head.in_features).to(BF16)
        want = tiny_model(family).to(BF16).get_output_embeddings()(hidden)
        torch.testing.assert_close(decoder.head(hidden), want, rtol=2**-6, atol=2**-6)
