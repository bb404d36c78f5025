"""`skipdecode tune`: adapt a checkpoint to a schedule, or to any speed, or train a new one from scratch.

Training follows the inference path (SkipDecode, arXiv 2307.02628): the prompt runs all layers, response
token t as input runs the layers of d(t), of a speed drawn for each batch. Responses are aligned behind
left-padded prompts, so that the columns a layer needs are a prefix: it runs over these alone.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from actors.engine.decoder import Decoder, causal_mask, part
from actors.engine.families import family_of
from actors.engine.loading import inspect, load_tokenizer
from actors.engine.schedule import Schedule, ScheduleSpec, save_spec
from pipeline.config_tuning import TuneConfig, TuneDataConfig
from pipeline.tables import read_columns

log = logging.getLogger(__name__)
IGNORED = -100
RECIPE = "recipe.json"


@dataclass(frozen=True)
class Batch:
    """B pairs, prompts padded on the left to P columns, R response columns behind them.

    ids, positions: [B, P + R]. mask: [B, 1, P + R, P + R], added to attention scores.
    labels: [B, R + 1], what columns P - 1 ... P + R - 1 predict; IGNORED where nothing.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    prompt_columns: int


def collate(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs of `input_ids` (prompt then response) and `prompt_tokens` -> the fields of one padded `Batch`."""
    prompt_columns = max(pair["prompt_tokens"] for pair in pairs)
    # the last response token is never an input
    response_columns = max(len(pair["input_ids"]) - pair["prompt_tokens"] for pair in pairs) - 1
    columns = prompt_columns + response_columns
    ids = torch.zeros(len(pairs), columns, dtype=torch.long)
    labels = torch.full((len(pairs), response_columns + 1), IGNORED)
    starts = torch.tensor([prompt_columns - pair["prompt_tokens"] for pair in pairs])
    for row, pair in enumerate(pairs):
        tokens = torch.tensor(pair["input_ids"])
        start = int(starts[row])
        ids[row, start : start + len(tokens) - 1] = tokens[:-1]
        response = tokens[pair["prompt_tokens"] :]
        labels[row, : len(response)] = response
    column = torch.arange(columns)
    visible = (column[None, :] >= starts[:, None])[:, None, :] & (column[None, :] <= column[:, None])[None]
    visible |= torch.eye(columns, dtype=torch.bool)  # a padding column sees itself, or softmax gives NaN
    mask = torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]
    positions = (column[None, :] - starts[:, None]).clamp(min=0)
    # plain tensors: Trainer takes these to the device, and counts predicted tokens by `labels`
    return {"ids": ids, "positions": positions, "mask": mask, "labels": labels, "prompt_columns": prompt_columns}


def response_logits(decoder: Decoder, batch: Batch, schedule: Schedule) -> Tensor:
    """Logits [B, R + 1, V] of columns P - 1 ... P + R - 1, each column through the layers it has at inference."""
    hidden, rotary = decoder.embed(batch.ids, batch.positions)
    columns = batch.ids.shape[1]
    prompt_layers = set(schedule.prompt_layers)
    response = columns - batch.prompt_columns
    # of the scores' own type, or the sum is done and kept in fp32
    mask = batch.mask.to(
        torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    )
    for layer in range(decoder.num_layers):
        if layer not in prompt_layers:
            continue  # what the prompt skips, every response token skips too
        end = batch.prompt_columns + schedule.uses(layer, response + 1)
        visible = mask[:, :, :end, :end]
        if (window := decoder.windows[layer]) is not None:
            far = ~causal_mask(end, 0, window, mask.device)
            visible = visible.masked_fill(far, torch.finfo(mask.dtype).min)
        output = decoder.run_layer(layer, hidden[:, :end], part(rotary[layer], columns=slice(end)), visible)
        hidden = output if end == columns else torch.cat([output, hidden[:, end:]], dim=1)
    needed = hidden[:, batch.prompt_columns - 1 :]
    return decoder.logits(needed.flatten(0, 1)).view(*needed.shape[:2], -1)


class SkipTrainer(Trainer):
    """transformers' Trainer with the inference path of a speed drawn for each step."""

    def __init__(self, *, schedules: Mapping[float, Schedule], label_smoothing: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.model, PreTrainedModel)
        self.schedules = schedules
        self.smoothing = label_smoothing
        self.decoder = Decoder(self.model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Cross-entropy per response token, at the speed of this step: a function of seed and step alone."""
        speeds = sorted(self.schedules)
        speed = random.Random(f"{self.args.seed}/{self.state.global_step}").choice(speeds)
        total, count = self._summed_loss(Batch(**inputs), self.schedules[speed], self.smoothing)
        return total / (count if num_items_in_batch is None else num_items_in_batch)

    def _summed_loss(self, batch: Batch, schedule: Schedule, smoothing: float) -> tuple[Tensor, int]:
        with self.accelerator.autocast():  # Trainer sets it up around model.forward, which is not called here
            logits = response_logits(self.decoder, batch, schedule)
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            reduction="sum",
        )
        return total, int((batch.labels != IGNORED).sum())

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean dev-set loss per response token, nats, at every speed trained for, and their mean."""
        self.decoder.model.eval()
        losses: dict[str, float] = {}
        with torch.no_grad():
            for speed, schedule in sorted(self.schedules.items()):
                total, count = 0.0, 0
                for inputs in self.get_eval_dataloader():
                    batch = Batch(**cast(dict[str, Any], self._prepare_inputs(inputs)))
                    loss, tokens = self._summed_loss(batch, schedule, 0.0)
                    total, count = total + float(loss), count + tokens
                losses[f"eval_loss_{speed:g}x"] = total / count
        losses["eval_loss"] = statistics.mean(losses.values())
        self.decoder.model.train()
        self.log(dict(losses))  # adds to what it is given
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, losses)
        return losses


def tune(config: TuneConfig, source: str) -> Path:
    """Train as `config` says and write the checkpoint; a run that was cut off goes on where it stopped.

    Raises ValueError of one line, before anything is trained, if configuration or data are wrong.
    """
    began = time.monotonic()
    settings = config.training
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    train_pairs = read_pairs(config.data, config.data.train, config.data.train_reference)
    dev_pairs = read_pairs(config.data, config.data.dev, config.data.dev_reference)
    tokenizer, model = _start(config, train_pairs)
    train_rows = encode(tokenizer, train_pairs, config.data.max_tokens)
    dev_rows = encode(tokenizer, dev_pairs, config.data.max_tokens)
    dev_rows = dev_rows[:: max(1, len(dev_rows) // config.data.dev_rows)][: config.data.dev_rows]
    if not train_rows or not dev_rows:
        raise ValueError(f"{source}: data: no pair within max_tokens = {config.data.max_tokens} tokens")
    spec = _spec(config, train_rows)
    layers = model.config.num_hidden_layers
    schedules = {speed: spec.overridden({"speedup": speed}).build(layers) for speed in config.schedule.speedups}

    output = Path(config.output)
    state = output / "_training"
    trainer = SkipTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(state),
            num_train_epochs=settings.epochs,
            max_steps=settings.max_steps,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            adam_beta2=0.98,
            bf16=settings.bf16,
            use_cpu=not torch.cuda.is_available(),
            seed=settings.seed,
            train_sampling_strategy="group_by_length",
            remove_unused_columns=False,
            eval_strategy="steps",
            eval_steps=settings.eval_steps,
            save_steps=settings.save_steps,
            save_total_limit=1,
            logging_steps=20,
            report_to=[],
            dataloader_pin_memory=False,
        ),
        data_collator=collate,
        train_dataset=train_rows,
        eval_dataset=dev_rows,
        schedules=schedules,
        label_smoothing=settings.label_smoothing,
    )
    last = get_last_checkpoint(str(state)) if state.is_dir() else None
    recipe = config.model_dump_json(
        exclude={"training": {"epochs", "max_steps", "threads", "eval_steps", "save_steps"}}
    )
    if last is not None and (state / RECIPE).read_text() != recipe:
        raise ValueError(f"output: {state} holds a run of another recipe; remove it, or choose another output")
    if last is not None:
        log.warning("resuming from %s", last)
    else:
        state.mkdir(parents=True, exist_ok=True)
        (state / RECIPE).write_text(recipe)
    trainer.train(resume_from_checkpoint=last)
    losses = trainer.evaluate()
    resumed = 0 if last is None else int(last.rsplit("-", 1)[-1])
    _save(config, output, trainer, tokenizer, spec, losses, time.monotonic() - began, resumed)
    return output


def read_pairs(data: TuneDataConfig, paths: Sequence[str], reference: str) -> list[tuple[str, str]]:
    """(prompt, response) pairs; a list of references gives a pair each. ValueError names file and column."""
    pairs: list[tuple[str, str]] = []
    for path in paths:
        for prompt, given in zip(*read_columns(path, (data.prompt, reference)), strict=True):
            for response in given if isinstance(given, list) else [given]:
                if not isinstance(prompt, str) or not isinstance(response, str):
                    raise ValueError(f"{path}: {data.prompt} and {reference} must hold text")
                pairs.append((prompt, " ".join(response.split())))
    if not pairs:
        raise ValueError(f"{paths[0]}: no rows to train or evaluate on")
    return pairs


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], max_tokens: int
) -> list[dict[str, Any]]:
    """Token ids of each pair, the response ended by the end-of-sequence token; longer pairs are left out."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    responses = tokenizer([response for _, response in pairs], add_special_tokens=False)["input_ids"]
    rows: list[dict[str, Any]] = [
        {"input_ids": [*prompt, *response, tokenizer.eos_token_id], "prompt_tokens": len(prompt)}
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    short = [row for row in rows if len(row["input_ids"]) <= max_tokens]
    if len(short) < len(rows):
        log.warning("%d of %d pairs are longer than %d tokens: left out", len(rows) - len(short), len(rows), max_tokens)
    return short


def train_tokenizer(pairs: Sequence[tuple[str, str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE; a prompt becomes ``<s> prompt <sep>``, a response ends with ``</s>``."""
    special = ["<pad>", "<s>", "</s>", "<sep>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    prompts = {prompt for prompt, _ in pairs}
    bpe.train_from_iterator([*sorted(prompts), *(response for _, response in pairs)], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A <sep>", special_tokens=[("<s>", 1), ("<sep>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token="<sep>"
    )


def _start(config: TuneConfig, pairs: Sequence[tuple[str, str]]) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model to train, weights in fp32."""
    # eager attention: at lengths of this task 1.3 times the speed of sdpa's backward on CPU
    on_cpu = None if torch.cuda.is_available() else "eager"
    if config.model.path is not None:
        attention = on_cpu or family_of(inspect(config.model.path).config).attention
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
        return load_tokenizer(config.model.path), model
    assert config.model.new is not None
    tokenizer = train_tokenizer(pairs, config.model.vocab_size)
    sizes = {key: value for key, value in config.model.new.items() if key != "model_type"}
    architecture = AutoConfig.for_model(
        config.model.new["model_type"],
        **sizes,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    attention = family_of(architecture).attention
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=on_cpu or attention)
    log.warning("new model: %.2fM parameters", sum(one.numel() for one in model.parameters()) / 1e6)
    return tokenizer, model


def _spec(config: TuneConfig, rows: Sequence[Mapping[str, Any]]) -> ScheduleSpec:
    """The spec to store: the default speed, and the horizon that every job of this checkpoint will use."""
    asked = config.schedule
    lengths = [len(row["input_ids"]) - row["prompt_tokens"] for row in rows]
    horizon = asked.horizon or max(2, int(statistics.median(lengths)))
    return ScheduleSpec(
        speedup=asked.default or asked.speedups[-1],
        horizon=horizon,
        decay=asked.decay,
        warmup=asked.warmup,
        keep_order=asked.keep_order if isinstance(asked.keep_order, str) else tuple(asked.keep_order),
        prompt=asked.prompt,
    )


def _save(
    config: TuneConfig,
    output: Path,
    trainer: SkipTrainer,
    tokenizer: PreTrainedTokenizerBase,
    spec: ScheduleSpec,
    losses: Mapping[str, float],
    seconds: float,
    resumed: int,
) -> None:
    model: Any = trainer.decoder.model
    model.config._attn_implementation = "sdpa"
    model.to(torch.bfloat16).save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output)
    save_spec(spec, model.config.num_hidden_layers, output)
    record = {
        "config": config.model_dump(),
        "steps": trainer.state.global_step,
        "resumed_at_step": resumed,
        "seconds": round(seconds, 1),
        "dev_loss": {name: round(value, 4) for name, value in losses.items()},
    }
    (output / "tune.json").write_text(json.dumps(record, indent=2) + "\n")
