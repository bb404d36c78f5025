"""The objective against its definition, the teacher's distributions, the order of rows, and a training's memory."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import tiny_checkpoint
from tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from actors.engine.decoder import Decoder
from actors.engine.model.loading import load_model
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.torch import packed_attention
from actors.engine.torch.forcing import predicting_states, response_labels
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.learn.train import adapters, objective
from pipeline.learn.train import run as run_module
from pipeline.learn.train.objective import Targets, dev_loss, loss_and_gradient, summed_loss
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.run import gpu_bytes, load_student, token_bytes
from pipeline.learn.train.trainer import Teacher, by_length, rate

SPECS = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]
ALL = LossConfig(references=0.0, distillation=1.0, teacher_top_k=VOCAB)


def pairs(seed: int, count: int = 5) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, response = rng.randint(1, 9), rng.randint(1, 8)
        rows.append({"input_ids": rng.choices(range(3, VOCAB), k=prompt + response), "prompt_tokens": prompt})
    return rows


def packed_decoder(family: str) -> Decoder:
    model = tiny_model(family)
    model.config._attn_implementation = packed_attention.register()
    return Decoder(model)


def exact(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) over the vocabulary [M]."""
    return kl_divergence(Categorical(logits=taught / temperature), Categorical(logits=logits / temperature))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31 - 1),
    references=st.floats(0.0, 2.0),
    distillation=st.floats(0.1, 2.0),
    temperature=st.floats(0.3, 4.0),
    kept=st.integers(1, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_the_objective_and_its_gradient_are_those_of_the_definition(
    seed: int, references: float, distillation: float, temperature: float, kept: int, smoothing: float
) -> None:
    """Tokens that are not kept are one class: KL is lower, by the rest's mass times the divergence within the rest."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 11, generator=generator, dtype=torch.double) * 3
    taught = torch.randn(9, 13, generator=generator, dtype=torch.double) * 3  # padded, as vocabularies may be
    labels = torch.randint(0, 11, (9,), generator=generator)
    loss = LossConfig(references=references, distillation=distillation, temperature=temperature, teacher_top_k=kept)
    for student, teacher in ((logits, taught), (torch.cat([logits, logits[:, :1]], dim=1), taught[:, :11])):
        targets = Targets.of(teacher, loss, student.shape[1])
        found = loss_and_gradient(student, labels, targets, loss, smoothing)
        student.requires_grad_()
        entropy = nn.functional.cross_entropy(student, labels, label_smoothing=smoothing, reduction="sum")
        order = taught[:, :11].argsort(-1, descending=True)
        both = student.gather(-1, order), taught.gather(-1, order)
        divergence = exact(*both, temperature)
        if kept < 11:
            mass = (both[1] / temperature).softmax(-1)[:, kept:].sum(-1)
            divergence = divergence - mass * exact(*(one[:, kept:] for one in both), temperature)
        total = references * entropy + distillation * temperature**2 * divergence.sum()
        expected = total.float(), *torch.autograd.grad(total, student)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm", "qwen3"])
@pytest.mark.parametrize("kept", [5, VOCAB])
@pytest.mark.parametrize("training_head", [True, False])
def test_the_sum_in_chunks_has_the_gradients_of_the_whole(
    family: str, kept: int, training_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = packed_decoder(family)
    model, rows = decoder.model, pairs(seed=4)
    model.requires_grad_(training_head)
    if not training_head:
        decoder.blocks[0].requires_grad_(True)
    loss = LossConfig(references=0.5, distillation=1.0, temperature=2.0, label_smoothing=0.1, teacher_top_k=kept)
    targets, labels = Teacher(decoder, loss, VOCAB).targets(rows), response_labels(rows)
    schedule = ScheduleSpec(speedup=3, horizon=4).build(LAYERS)
    monkeypatch.setattr(objective, "CHUNK_BYTES", 4 * VOCAB * 7)
    monkeypatch.setattr(objective, "BLOCK_BYTES", 4 * VOCAB * 3)
    found = []
    for chunked in (False, True):
        model.zero_grad()
        (states,) = predicting_states(decoder, rows, [schedule])
        if chunked:
            total = summed_loss(decoder, states, labels, targets, loss, 0.1)
            (total / 3).backward()
        else:
            logits = decoder.logits(states)
            total, gradient = loss_and_gradient(logits.detach(), labels, targets, loss, 0.1)
            logits.backward(gradient / 3)
        found.append((total, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    plain, _ = loss_and_gradient(decoder.logits(states).detach(), labels, targets, loss, 0.0)
    torch.testing.assert_close(dev_loss(decoder, states, labels, targets, loss), plain)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_rounded_frozen_weights_give_the_gradients_of_autocast(family: str) -> None:
    rows, loss = pairs(seed=5), LossConfig(references=0.5, distillation=1.0)
    schedule = ScheduleSpec(speedup=2, horizon=4).build(LAYERS)
    found = []
    for rounded in (False, True):
        decoder = packed_decoder(family)
        torch.manual_seed(0)
        adapted = adapters.add_adapters(decoder.model, AdapterConfig(rank=2))
        tuned = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
        with torch.no_grad():
            for name, weight in tuned.items():
                if "lora_B" in name:
                    weight.normal_(std=0.1)  # zero at the start, which would leave lora_A without gradients
        if rounded:
            adapters.round_frozen(decoder.model)
        with torch.autocast("cpu", torch.bfloat16):
            targets = Teacher(decoder, loss, VOCAB, adapted.disable_adapter).targets(rows)
            (states,) = predicting_states(decoder, rows, [schedule])
            total = summed_loss(decoder, states, response_labels(rows), targets, loss, 0.0)
        total.backward()
        gradients = {name: weight.grad for name, weight in tuned.items() if weight.grad is not None}
        assert any("lora_A" in name and gradient.abs().max() > 0 for name, gradient in gradients.items())
        found.append((total, gradients))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


def test_a_teacher_answers_alone_and_once_for_each_key() -> None:
    rows, alone = pairs(seed=4), Mock(side_effect=nullcontext)
    teacher = Teacher(packed_decoder("llama"), ALL, VOCAB, alone)
    plain = teacher.targets(rows)
    teacher.targets(rows)
    assert alone.call_count == 2
    keyed = [{**row, "key": number} for number, row in enumerate(rows)]
    teacher.targets(keyed[:2])
    some = teacher.targets([keyed[0], keyed[3]])
    again = teacher.targets(keyed[:2])
    assert alone.call_count == 4
    counts = [len(row["input_ids"]) - row["prompt_tokens"] for row in rows]
    starts = [sum(counts[:number]) for number in range(len(rows))]
    expected = Targets.joined([plain[starts[row] : starts[row] + counts[row]] for row in (0, 3)])
    torch.testing.assert_close(some.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    assert len(again.ids) == counts[0] + counts[1]


def test_a_teacher_that_is_the_student_in_training_does_not_drop_out() -> None:
    decoder = packed_decoder("gpt2")
    for module in decoder.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    decoder.model.train()
    first, second = (Teacher(decoder, ALL, VOCAB).targets(pairs(seed=4)) for _ in range(2))
    torch.testing.assert_close(first.log_probs, second.log_probs)
    assert decoder.model.training


def test_groups_of_like_lengths_are_the_same_after_a_resume() -> None:
    lengths = [(7 * row) % 50 for row in range(200)]
    orders = [by_length(lengths, 10, seed) for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(200))
    spread = [max(group) - min(group) for group in zip(*[iter([lengths[row] for row in orders[0]])] * 10, strict=True)]
    assert sum(spread) / len(spread) < 10


def test_the_rate_rises_over_the_warm_up_and_falls_as_a_cosine() -> None:
    rates = [rate(step, 4, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1, 1] and rates[8] == pytest.approx(0.5) and 0 < rates[-1] < 0.05
    assert rates[4:] == sorted(rates[4:], reverse=True) and rate(0, 0, 1) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_logits_and_gradients_are_those_of_the_cpu(family: str, spec: ScheduleSpec) -> None:
    schedule, found = spec.build(LAYERS), []
    for device in ("cpu", "cuda"):
        model = tiny_model(family).requires_grad_(True).to(device)
        decoder = Decoder(model)
        with packed_attention.packed(model):
            logits = decoder.logits(predicting_states(decoder, pairs(seed=7), [schedule])[0])
            logits.logsumexp(-1).sum().backward()
        gradients = [one.grad.flatten().cpu() for one in model.parameters() if one.grad is not None]
        found.append((logits.detach().cpu(), torch.cat(gradients)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


SCRIPT = """
import resource
import torch
from pipeline.learn.train.run import kept_heap

PAGES = 6 * 8 * 2**20 // 4096

def faults_of_a_step():
    'Page faults while memory is taken as by a step, all of it freed at the end.'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(2 * 2**20) for _ in range(6)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del pieces
    return faults

with kept_heap():
    faults_of_a_step()
    assert faults_of_a_step() < PAGES / 4
assert faults_of_a_step() > PAGES / 2
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_the_next_step_finds_the_memory_of_the_last_one() -> None:
    """In a process of its own: what other tests have left in the heap would count."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_weight_of_an_adapters_base_stays_in_the_checkpoints_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "base")
    model = load_model(checkpoint, torch.float32, None, "sdpa")
    before = model.get_input_embeddings().weight.detach().clone()

    def is_mapped() -> bool:
        return str(checkpoint / "model.safetensors") in Path("/proc/self/maps").read_text()

    assert is_mapped()
    adapters.add_adapters(model, AdapterConfig(rank=2))
    adapters.round_frozen(model)
    assert not is_mapped()
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]])
def test_an_adapters_parameters_are_counted_before_it_is_made(targets: list[str] | None) -> None:
    adapter, model = AdapterConfig(rank=3, targets=targets), tiny_model("llama")
    expected = adapters.adapter_parameters(adapter, model.config)
    adapted = adapters.add_adapters(model, adapter)
    assert expected == sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad) > 0


def test_the_estimate_of_a_gpus_memory_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight with gradient and two moments; a frozen one; activations of at most a quarter."""
    config, adapter = tiny_model("llama").config, AdapterConfig(rank=3)
    untaught = LossConfig(references=1.0, distillation=0.0)
    recipe = Recipe(ScheduleSpec(), {}, untaught, TrainingConfig(), bf16=False)
    few, many = (gpu_bytes(recipe, config, 10**6, tokens, 2**30) for tokens in (1000, 10**9))
    assert few == 16 * 10**6 + 1000 * token_bytes(config, False) and many == 16 * 10**6 + 2**28
    taught = replace(recipe, loss=LossConfig())
    assert gpu_bytes(taught, config, 10**6, 1000, 2**30) == few + 4 * 10**6
    own = replace(taught, adapter=adapter)  # its teacher is the student without its adapter
    trained = adapters.adapter_parameters(adapter, config)
    expected = 4 * 10**6 + 16 * trained + 1000 * token_bytes(config, False)
    assert gpu_bytes(own, config, 10**6, 1000, 2**30) == expected
    monkeypatch.setattr(run_module, "has_bf16", lambda device: True)
    halved = gpu_bytes(replace(own, bf16=True), config, 10**6, 1000, 2**30)
    assert halved == 2 * 10**6 + 16 * trained + 1000 * token_bytes(config, True)  # never 4 bytes a weight


@pytest.mark.parametrize(
    ("device", "frozen_bf16", "dtype"),
    [
        ("meta", True, torch.bfloat16),  # a stand-in for a GPU
        ("meta", False, torch.float32),
        ("cpu", True, torch.float32),
        ("cpu", False, torch.float32),
    ],
)
def test_weights_arrive_once_on_the_device_in_their_type(
    tmp_path: Path, device: str, frozen_bf16: bool, dtype: torch.dtype
) -> None:
    """Frozen ones on a GPU in bfloat16; low-rank weights that are added to them stay in float32."""
    loaded: list[tuple[torch.dtype, torch.device]] = []

    def load(path: Path, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
        loaded.append((dtype, device))
        return tiny_model("llama").to(device=device, dtype=dtype)

    with patch.object(run_module, "load_model", load):
        model = load_student(tmp_path, torch.device(device), frozen_bf16=frozen_bf16)
    assert loaded == [(dtype, torch.device(device))]
    adapted = adapters.add_adapters(model, AdapterConfig(rank=2))
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert weights and {weight.dtype for weight in weights} == {torch.float32}
    assert {weight.device.type for weight in adapted.parameters()} == {device}
    assert {weight.dtype for weight in adapted.parameters() if not weight.requires_grad} == {dtype}
