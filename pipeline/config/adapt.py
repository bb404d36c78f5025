"""Defines the `adapt` section of job files: every key, its unit and its default. `adapt` and `evaluate` read it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Place, Section

Metric = Literal["fidelity", "agreement_exact", "token_kl", "bleu", "rouge_l", "exact_match"]
OF_TEXTS = ("bleu", "rouge_l")  # metrics for free text, not for labels
OF_REFERENCES = (*OF_TEXTS, "exact_match")
SHORT = 8  # tokens; without references, the default metric is agreement_exact for answers up to this length
# metric -> default of `tolerance`, in points of 100 (nats for token_kl)
TOLERANCES = {
    "fidelity": 10.0,
    "agreement_exact": 5.0,
    "token_kl": 0.1,
    "bleu": 2.0,
    "rouge_l": 2.0,
    "exact_match": 2.0,
}
MEANINGS = {
    "fidelity": "product of three factors: (1) probability of the answers' tokens at full depth, relative to the "
    "likeliest token at each position; (2) length of the answers and of those at full depth, as shorter ÷ longer; (3) "
    "share of 4-grams that repeat no earlier 4-gram. For full depth's own answers, only factor 3 may be below 1",
    "agreement_exact": "share of the answers that equal full depth's answer, character by character",
    "token_kl": "KL divergence of next-token distributions from those at full depth, per token of full depth's answers",
    "bleu": "BLEU of the answers against the references",
    "rouge_l": "ROUGE-L of the answers against the references",
    "exact_match": "share of the answers that equal a reference of their row",
}
# defaults that depend on a key of another section
LOSS_OF_RESPONSES = {"references": 1.0, "distillation": 0.5}
RATE_OF_ALL_WEIGHTS = 1e-4  # the model can do its task already; an adapter starts from zero
RANK = 32  # default rank of a speed adapter


class LossConfig(Section):
    """The training objective: a weighted sum of loss terms, summed over all response tokens."""

    references: float = Field(
        0.0, ge=0, description="weight of the cross-entropy loss on the responses; default with adapt.responses: 1"
    )
    distillation: float = Field(
        1.0,
        ge=0,
        description="weight of the KL divergence from the teacher at full depth; default with adapt.responses: 0.5",
    )
    temperature: float = Field(1.0, gt=0, description="temperature of teacher and student in the KL divergence")
    teacher: Place | None = Field(None, description="checkpoint with the same tokenizer; default: the start weights")
    teacher_top_k: int = Field(64, ge=1, description="number of likeliest teacher tokens; all others count as one")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of probability to spread evenly over all tokens")

    @model_validator(mode="after")
    def _some(self) -> LossConfig:
        if self.references == self.distillation == 0:
            raise UserError("references and distillation are both 0: the loss has no terms; raise one")
        if self.references == 0 and self.label_smoothing > 0:
            raise UserError("label_smoothing has no effect while references is 0: leave label_smoothing out")
        if self.teacher is not None and self.distillation == 0:
            raise UserError("teacher has no effect while distillation is 0: raise distillation")
        return self


class AdapterConfig(Section):
    """A speed adapter: low-rank weights beside the frozen model. One adapter is trained for all speeds above 1x."""

    start: Place | None = Field(None, description="speed adapter to train further, with its rank, alpha and targets")
    rank: int | None = Field(None, ge=1, description=f"rank of the low-rank matrices; default {RANK}")
    alpha: int | None = Field(None, ge=1, description="adapter outputs are scaled by alpha / rank; default 2 × rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="ends of the names of linear layers that get an adapter, such as q_proj; default: all linear "
        "layers inside decoder layers",
    )

    @model_validator(mode="after")
    def _of_start(self) -> AdapterConfig:
        given = [name for name in ("rank", "alpha", "targets") if getattr(self, name) is not None]
        if self.start is not None and given:
            raise UserError(f"adapter.{given[0]} is set by adapter.start: leave it out")
        return self


class TrainingConfig(Section):
    epochs: float = Field(3.0, gt=0, description="passes over the training pairs")
    max_steps: int = Field(-1, description="number of optimizer steps; -1: as many as the epochs need")
    batch_size: int = Field(16, ge=1, description="training pairs per optimizer step")
    speeds_per_step: int | None = Field(
        None,
        ge=1,
        description="number of schedules drawn for each step, among those that run the same layers over prompts, which "
        "they process together; default: all",
    )
    prompt_gradient: bool = Field(
        True,
        description="whether gradients flow through all prompt tokens; false: only through each prompt's last token",
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens to compute at once. Default on a CPU: as many as fit in 3 GiB of "
        "activations; on a GPU: as many as fit in a quarter of its memory",
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")
    learning_rate: float = Field(
        1e-3,
        gt=0,
        description="peak learning rate; it falls to zero along a cosine. Default with adapt.weights: full: 1e-4",
    )
    warmup_steps: int = Field(20, ge=0, description="optimizer steps over which the learning rate rises to its peak")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW, applied to matrices only")
    seed: int = Field(0, ge=0, description="seed for initial weights, the order of pairs, and the drawn speeds")
    eval_steps: int = Field(100, ge=1, description="steps between dev-set loss measurements, at most 1/10 of all steps")
    save_steps: int = Field(100, ge=1, description="optimizer steps between two checkpoints to resume from")
    early_stopping: int | None = Field(
        None, ge=1, description="stop if the dev-set loss has not improved in this many measurements; default: never"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; default: all cores")


class AdaptConfig(Section):
    """Settings of `skipdecode adapt`, which trains a checkpoint for a job and chooses the job's speed.

    The command keeps the schedule's horizon, decay, warmup and keep_order. It chooses depths and prompt policy.
    """

    rows: int = Field(2000, ge=3, description="input rows to draw and answer at full depth, including held-out rows")
    held_out: int = Field(200, ge=2, description="number of drawn rows for evaluation, which are not used for training")
    output: Place | None = Field(
        None,
        description="local folder for the adaptation's files; default: output.path with -adapt at its end. On a "
        "cluster, set it to a folder on a file system that all nodes share",
    )
    speedups: list[float] = Field([1, 2, 3, 4, 5], min_length=1, description="nominal speed-ups to train and evaluate")
    prompt: Literal["auto", "full", "first"] = Field(
        "auto",
        description="prompt policies (see schedule.prompt) to train and evaluate. auto: the schedule's policy, and "
        "also `first` if the job sets no policy and prompts take at least a third of the time at full depth",
    )
    metric: Metric | None = Field(
        None,
        description="metric to which tolerance applies. Default with references: exact_match for labels; for texts, "
        "bleu if a row has several references, else rouge_l. Default without references: agreement_exact for choices "
        "and for a median answer of at most 8 tokens; else fidelity (probability of the answers at full depth, their "
        "length, and how little they repeat)",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="largest loss against full depth (upper end of its confidence interval), in points of 100, or nats "
        "for token_kl. Default: fidelity 10, agreement_exact 5, token_kl 0.1, any other metric 2",
    )
    references: str | None = Field(None, description="input column with right answers: a string, or a list of strings")
    responses: str | None = Field(
        None,
        description="input column with the answers to train on, such as the best of several samples of each row; a row "
        "without one is not trained on. Default: the model's answers at full depth",
    )
    max_tokens: int | None = Field(
        None, ge=4, description="maximum tokens of prompt and answer together in a training row; default: no limit"
    )
    loss: LossConfig = Field(default_factory=LossConfig)
    weights: Literal["adapter", "full"] = Field(
        "adapter",
        description="adapter: train a speed adapter; the job's checkpoint stays unchanged, and at 1x it runs without "
        "the adapter. full: train all weights, and write a new checkpoint",
    )
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    runs: int = Field(2, ge=1, description="how often each speed of the tuned model is timed; the median is used")

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, values: Any) -> Any:
        """Set the defaults of keys that depend on keys of other sections."""
        if not isinstance(values, dict):
            return values
        implied: dict[str, dict[str, float]] = {}
        if values.get("responses") is not None:
            implied["loss"] = LOSS_OF_RESPONSES
        if values.get("weights") == "full":
            implied["training"] = {"learning_rate": RATE_OF_ALL_WEIGHTS}
        for section, defaults in implied.items():
            given = values.get(section) or {}
            if isinstance(given, dict):
                values = {**values, section: {**defaults, **given}}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> AdaptConfig:
        if self.rows <= self.held_out:
            raise UserError(f"rows = {self.rows} leaves no row to train on: raise it above held_out = {self.held_out}")
        if max(self.speedups) <= 1 or min(self.speedups) < 1:
            raise UserError("speedups must be at least 1, and one or more must be above 1")
        if len({f"{speedup:g}" for speedup in self.speedups}) < len(self.speedups):
            raise UserError("speedups: two values are equal, to six digits; remove one")
        if self.metric in OF_REFERENCES and self.references is None:
            raise UserError(f"metric: {self.metric} needs references: set this key to a column of right answers")
        if self.adapter != AdapterConfig() and self.weights == "full":
            raise UserError("adapter has no effect with weights: full; leave one of them out")
        return self
