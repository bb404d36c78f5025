"""Decode steps by graphs give the answers of the eager add-on, token for token in float32. On a CPU by `tape`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import numpy as np
import tape
import torch
import vllm
import vllm_cases as cases

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.vllm import graphs, scheduler
from actors.vllm.check import check_answers
from actors.vllm.graphs import DecodeGraphs, Segment, padded_sizes, segments

SIZES = [2, 5, 7]  # few, so that most prefixes end with rows that skip the layers
FALLING = [name for name in cases.SPECS if name != "1x"]
Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _few_graphs_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setitem(graphs.BACKENDS, "cpu", tape.TapeGraphs)
    monkeypatch.setattr(graphs, "padded_sizes", lambda rows: [*(size for size in SIZES if size < rows), rows])


def settings(name: str = "2x", **more: Any) -> dict[str, Any]:
    return {**cases.SPECS[name].to_dict(), "unadapted": True, "self_check": False, "graphs": True, **more}


def both_ways(llm: vllm.LLM, answer: Callable[[], Any]) -> tuple[Any, Any]:
    """Answers by graphs and without. Most passes of the former are by graphs, and in most a prefix is padded."""
    skipper = cases.skipper(llm)
    skipper.counts.clear()
    by_graphs = answer()
    assert skipper.counts["graph_passes"] > skipper.counts["passes"] / 2, skipper.counts
    kept, skipper.graphs = skipper.graphs, None
    try:
        return by_graphs, answer()
    finally:
        skipper.graphs = kept


def test_segments_are_runs_of_layers_that_the_same_rows_run() -> None:
    ranks = {0: 0, 1: 5, 2: 4, 3: 3, 4: 2, 5: 1}  # the paper's order
    assert segments(ranks, [4, 3, 2]) == [Segment((0,), 0), Segment((3,), 3), Segment((4,), 2), Segment((5,), 0)]
    assert segments(ranks, [5, 5, 1]) == [Segment((0,), 0), Segment((2, 3, 4, 5), 1)]
    assert segments({0: 1, 2: 0}, [2]) == [Segment((0, 2), 0)]  # layer 1 has been dropped
    assert padded_sizes(1024)[-3:] == [960, 992, 1024]
    assert padded_sizes(3) == [1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
def test_families_answer_as_without_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Rows in lock step, and ragged rows whose numbers are no captured sizes. Wrong graphs give other answers."""
    ragged = cases.rows(14, seed=3, longest=60)
    lock = [[prompt[0]] * 9 for prompt in ragged[0][:7]], [30] * 7
    with cases.engine(cases.checkpoint(tmp_path, family), settings(), max_num_seqs=7) as llm:
        for name in FALLING:
            llm.collective_rpc("set_schedule", args=(cases.SPECS[name].build(cases.LAYERS),))
            for rows in (ragged, lock):
                got, wanted = both_ways(llm, lambda rows=rows: cases.answers(llm, *rows))
                assert got == wanted, name
        if family == "llama" and not torch.cuda.is_available():
            for mutant in MUTANTS:
                with monkeypatch.context() as changes:
                    mutant(changes)
                    llm.collective_rpc("set_schedule", args=(cases.SPECS["2x"].build(cases.LAYERS),))
                    got, wanted = both_ways(llm, lambda: cases.answers(llm, *ragged))
                    assert got != wanted, mutant.__name__


def test_chunks_preemption_prefix_cache_and_samples(tmp_path: Path) -> None:
    """The cache holds 9 blocks for rows that need up to 5 each, and chunks end inside of prompts."""
    prompts, limits = cases.rows(12, seed=1, shortest=40, longest=110)

    def answer() -> list[list[int]]:
        assert llm.reset_prefix_cache()
        torch.manual_seed(7)  # vLLM cannot preempt a request with a seed of its own on a CPU
        params = [
            vllm.SamplingParams(temperature=0.8, max_tokens=limit, ignore_eos=True, detokenize=False)
            for limit in limits
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampled = [list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]
        return [*cases.answers(llm, prompts, limits), *sampled]

    how: dict[str, Any] = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 9, "enable_prefix_caching": True}
    with cases.engine(cases.checkpoint(tmp_path, "llama"), settings(), **how) as llm:
        preempted = cases.preemptions(llm)
        for name in FALLING:
            llm.collective_rpc("set_schedule", args=(cases.SPECS[name].build(cases.LAYERS),))
            by_graphs, wanted = both_ways(llm, answer)
            assert by_graphs == wanted, name
        assert len(preempted) > 2


def test_the_self_check_compares_graphs_with_eager_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes at the start, and refuses every wrong graph. Gemma 3 has two cache groups."""
    run, steps = DecodeGraphs.run, []
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, *args: steps.append(1) or run(self, *args))
    with cases.engine(cases.checkpoint(tmp_path, "gemma3_text"), settings(self_check=True), max_num_seqs=7) as llm:
        assert len(steps) > 20
        worker = cases.worker(llm)
        assert "graph_passes" not in worker.skipper.counts
        got, wanted = both_ways(llm, lambda: cases.answers(llm, *cases.rows(5)))
        assert got == wanted  # nothing of the check has stayed
        if torch.cuda.is_available():
            return
        passed = []
        for mutant in MUTANTS:
            with monkeypatch.context() as changes:
                mutant(changes)
                worker.set_schedule(cases.SPECS["2x"].build(cases.LAYERS))
                cases.answers(llm, *cases.rows(7))  # leaves slots in the buffers
                try:
                    check_answers(worker, worker.skipper, worker._cache_config)
                    passed.append(mutant.__name__)
                except UserError:
                    continue
        assert passed == []
        worker.set_schedule(cases.SPECS["2x"].build(cases.LAYERS))
        check_answers(worker, worker.skipper, worker._cache_config)


def test_layers_that_no_token_of_a_falling_schedule_runs_are_dropped(tmp_path: Path) -> None:
    """Not even the lowest layer is needed. A schedule that needs a dropped layer is refused by name."""
    folder = cases.checkpoint(tmp_path, "llama")
    spec = ScheduleSpec(depths=(4, 4, 3, 1), keep_order=(3, 5, 1, 4, 0, 2), warmup=0, prompt="first")
    shallower = replace(spec, depths=(3, 1))
    rows = cases.rows(8, seed=4)
    wanted = [cases.library_answers(folder, one, *rows) for one in (spec, shallower)]
    given = {**spec.to_dict(), "unadapted": True, "graphs": True}  # checks itself
    with cases.engine(folder, given) as llm:
        skipper, worker = cases.skipper(llm), cases.worker(llm)
        assert [*skipper.layers] == [1, 3, 4, 5]
        [names] = [group.layer_names for group in worker._cache_config.kv_cache_groups]
        assert len(names) == 4
        assert cases.answers(llm, *rows) == wanted[0]
        worker.set_schedule(shallower.build(cases.LAYERS))
        assert cases.answers(llm, *rows) == wanted[1]
        assert skipper.counts["graph_passes"] > 0
        with pytest.raises(UserError, match="runs layer 0, which no token"):
            worker.set_schedule(cases.SPECS["2x"].build(cases.LAYERS))
        assert cases.answers(llm, *rows) == wanted[1]


def test_requests_begin_in_groups_while_prompts_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So fewer steps have prompts and run eagerly. Long prompts wait for no group."""
    rows = cases.rows(20, seed=5, longest=60)
    found, share = [], []
    with cases.engine(cases.checkpoint(tmp_path, "llama"), settings("first"), max_num_seqs=6) as llm:
        for part, most in ((16, 1500), (2, 1500), (2, 1)):
            monkeypatch.setattr(scheduler, "ADMISSION_PART", part)
            monkeypatch.setattr(scheduler, "MOST_PROMPT_TOKENS", most)
            counts = cases.skipper(llm).counts
            counts.clear()
            found.append(cases.answers(llm, *rows))
            share.append(counts["graph_passes"] / counts["passes"])
    assert found[0] == found[1] == found[2]
    assert share[1] > share[0] == share[2], share


def test_layers_with_other_arguments_run_eagerly(tmp_path: Path) -> None:
    """Layers of transformers take cosines and sines, which depend on the row too."""
    with cases.engine(cases.checkpoint(tmp_path, "llama"), settings(graphs=False)) as llm:
        skipper, worker = cases.skipper(llm), cases.worker(llm)
        assert skipper.graphs is None
        forward, names = skipper.forwards[2]
        skipper.forwards[2] = forward, (*names, "position_embeddings")
        builders = [builder for group in worker._attention_groups() for builder in group.metadata_builders]
        reason = skipper.use_graphs(builders, worker.vllm_config, worker.device)
        assert reason == "layers take the arguments positions, hidden_states, residual, position_embeddings"
        assert skipper.graphs is None


# Wrong graphs


def no_mask(changes: pytest.MonkeyPatch) -> None:
    """Rows of the padding that skip a segment take its output."""
    where = torch.where
    changes.setattr(torch, "where", lambda *args, **to: to["out"].copy_(args[1]) if to else where(*args))


def stale_metadata(changes: pytest.MonkeyPatch) -> None:
    changes.setattr(tape.TapeGraphs, "refreshed", lambda self, captured, built: None)


def rows_in_batch_order(changes: pytest.MonkeyPatch) -> None:
    argsort = np.argsort
    changes.setattr(np, "argsort", lambda values, **how: np.arange(len(values)) if how else argsort(values))


def padding_keeps_its_slots(changes: pytest.MonkeyPatch) -> None:
    pad = DecodeGraphs._pad

    def wrong(self: Any, size: int, rows: int) -> None:
        kept = {key: slots.clone() for key, slots in self.slots.items()}
        pad(self, size, rows)
        for key, slots in kept.items():
            self.slots[key].copy_(slots)

    changes.setattr(DecodeGraphs, "_pad", wrong)


def counts_of_the_capture(changes: pytest.MonkeyPatch) -> None:
    """As if the number of rows were a Python number when a graph is captured."""
    runner = DecodeGraphs._runner

    def wrong(self: Any, number: int, segment: Segment, size: int) -> Any:
        run, frozen = runner(self, number, segment, size), torch.full_like(self.counts, size)

        def with_number() -> None:
            kept, self.counts = self.counts, frozen
            run()
            self.counts = kept

        return with_number

    changes.setattr(DecodeGraphs, "_runner", wrong)


MUTANTS: list[Mutant] = [no_mask, stale_metadata, rows_in_batch_order, padding_keeps_its_slots, counts_of_the_capture]
