"""A bottleneck on the path past a skipped layer, trained in place of a speed adapter: a prototype to compare with it.

A token that skips a layer gets `up(silu(down(norm(h))))` added to its hidden state h, which otherwise stays as it is.
FlexiDepth (Luo et al. 2025, arXiv 2503.23798) has such an adapter beside a learned router. A layer has one, shared by
all speeds. `up` begins at zero: training starts from plain skipping. The base is frozen, and full depth unchanged.
`adapter_variants.py` trains and scores it; it runs in teacher forcing (`token_tree`) alone, not in an engine.
Shapes: N tokens, E hidden size, R width of the bottlenecks.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer_utils import SaveStrategy

from actors.engine.decoder import Decoder
from actors.engine.library import packed_attention
from actors.engine.model.loading import load_decoder, load_model
from actors.engine.schedule.file import load_spec, save_spec
from actors.engine.schedule.schedule import MEASURED, Schedule
from pipeline.config.tune import TuneConfig
from pipeline.learn.tune.adapters import round_frozen
from pipeline.learn.tune.plan import plan_training, with_order
from pipeline.learn.tune.run import with_measured_order
from pipeline.learn.tune.train import tokens_at_once, training_arguments
from pipeline.learn.tune.trainer import KEY, SkipTrainer, Teacher, collate_pairs

WEIGHTS, RECORD = "bottlenecks.safetensors", "tune.json"


class Bottleneck(nn.Module):
    """norm: of the layer's input, copied."""

    def __init__(self, norm: nn.Module, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = copy.deepcopy(norm).requires_grad_(True)
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> what is added to it."""
        added: Tensor = self.up(nn.functional.silu(self.down(self.norm(hidden))))
        return added


class BottleneckDecoder(Decoder):
    """A decoder of Llama's layers with a bottleneck past each of them."""

    def __init__(self, model: Any, width: int) -> None:
        super().__init__(model)
        self.bottlenecks = nn.ModuleList(
            Bottleneck(block.input_layernorm, model.config.hidden_size, width) for block in self.blocks
        )

    def skip_layer(self, layer: int, hidden: Tensor, skipping: Tensor) -> Tensor:
        """[1, N, E] with the bottleneck's part added for the tokens `skipping`, bool [N]."""
        index = skipping.nonzero()[:, 0].to(hidden.device)
        added = self.bottlenecks[layer](hidden.index_select(1, index))
        return hidden.index_add(1, index, added.to(hidden.dtype))


@dataclass(frozen=True)
class Cost:
    """What bottlenecks cost at inference, where a speed adapter costs nothing: it is merged.

    parameters: of all bottlenecks. share: multiplications of a decoded token, and bytes of weights read for it, in
    layers of the model; attention's products with keys and values are left out. mflop, mib: the same in numbers, in
    bfloat16.
    """

    parameters: int
    share: float
    mflop: float
    mib: float


def cost(decoder: BottleneckDecoder, schedule: Schedule, tokens: int) -> Cost:
    """tokens: generated ones of a row."""
    of_layer = sum(module.weight.numel() for module in decoder.blocks[0].modules() if isinstance(module, nn.Linear))
    first = decoder.bottlenecks[0]
    weights = sum(one.weight.numel() for one in first.modules() if isinstance(one, nn.Linear))
    mean = schedule.mean_depth(tokens)
    assert mean is not None
    skipped = decoder.num_layers - mean
    return Cost(
        parameters=sum(one.numel() for one in decoder.bottlenecks.parameters()),
        share=skipped * weights / of_layer,
        mflop=2 * skipped * weights / 1e6,
        mib=2 * skipped * weights / 2**20,
    )


def train_bottlenecks(config: TuneConfig, width: int) -> dict[str, Any]:
    """Train bottlenecks as `tune` trains a speed adapter, into `config.output`; the record, as far as both have it.

    What is finished is not repeated; what was interrupted begins again.
    """
    output = Path(config.output)
    if (output / RECORD).exists():
        record: dict[str, Any] = json.loads((output / RECORD).read_text())
        return record
    assert config.model.path is not None
    plan = plan_training(config)
    if config.schedule.keep_order == MEASURED:
        config = with_measured_order(config, plan)
        plan = with_order(config, plan)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    model: Any = load_model(config.model.path, torch.float32, None, packed_attention.register())
    model.requires_grad_(False)
    decoder = BottleneckDecoder(model, width)
    arguments = training_arguments(config, plan)
    arguments.save_strategy = SaveStrategy.NO
    if arguments.bf16:
        round_frozen(model)
    model.bottlenecks = decoder.bottlenecks  # the Trainer's parameters
    trainer = SkipTrainer(
        model=model,
        args=arguments,
        data_collator=collate_pairs,
        train_dataset=[{**row, KEY: number} for number, row in enumerate(plan.train)],
        eval_dataset=plan.dev,
        decoder=decoder,
        schedules=plan.schedules,
        together=config.training.speeds_per_step,
        loss=config.loss,
        teacher=Teacher(decoder, config.loss, decoder.vocab_size),  # full depth skips no layer
        tokens=config.training.micro_batch_tokens or tokens_at_once(model, arguments),
        prompt_gradient=config.training.prompt_gradient,
        recompute=config.training.checkpointing,
    )
    processor = time.process_time()
    trained = trainer.train()
    processor = time.process_time() - processor
    output.mkdir(parents=True, exist_ok=True)
    state = decoder.bottlenecks.state_dict()
    save_file({name: weight.to(torch.bfloat16).contiguous() for name, weight in state.items()}, output / WEIGHTS)
    save_spec(plan.spec, decoder.num_layers, output)
    record = {
        "steps": trainer.state.global_step,
        "step_seconds": round(trained.metrics["train_runtime"], 2),
        "step_processor_seconds": round(processor, 2),
    }
    (output / RECORD).write_text(json.dumps(record, indent=2))
    return record


def load_bottlenecks(checkpoint: Path, folder: Path, dtype: torch.dtype, device: torch.device) -> BottleneckDecoder:
    """The checkpoint with the bottlenecks of a folder, for scoring."""
    weights = load_file(folder / WEIGHTS)
    decoder = BottleneckDecoder(load_decoder(checkpoint, dtype, device).model, len(weights["0.down.weight"]))
    decoder.bottlenecks.load_state_dict(weights)
    decoder.bottlenecks.to(device=device, dtype=dtype).requires_grad_(False)
    return decoder


def schedule_of(folder: Path, layers: int, speedup: float) -> Schedule:
    """A speed of the bottlenecks in a folder."""
    spec = load_spec(folder, layers)
    assert spec is not None
    return spec.overridden({"speedup": speedup}).build(layers)
