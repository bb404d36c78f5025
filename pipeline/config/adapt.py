"""Defines the `adapt` section of job files: every key, its unit and its default. Only `skipdecode adapt` reads it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Place, Section, place

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
LOSS = {"references": 0.0, "distillation": 1.0}
LOSS_OF_RESPONSES = {"references": 1.0, "distillation": 0.5}
# full weights need a smaller rate, because the model can do its task already; an adapter starts from zero
LEARNING_RATE = {"adapter": 1e-3, "full": 1e-4}
# defaults for a few thousand rows
TRAINING = {"epochs": 3.0, "batch_size": 16, "warmup_steps": 20, "eval_steps": 100, "save_steps": 100}


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
    loss: dict[str, Any] = Field(
        default_factory=dict,
        description="keys as in section loss of training files; default: {distillation: 1}; with "
        "responses: {references: 1, distillation: 0.5}",
    )
    weights: Literal["adapter", "full"] = Field(
        "adapter",
        description="adapter: train a speed adapter; the job's checkpoint stays unchanged, and at 1x it runs without "
        "the adapter. full: train all weights, and write a new checkpoint",
    )
    adapter: dict[str, Any] = Field(
        default_factory=dict, description="keys as in section adapter of training files; default: {rank: 32}"
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        description="keys as in section training of training files; default: 3 epochs; 16 rows per step, each at all "
        "speeds; learning rate 1e-3 (full weights: 1e-4); 20 warm-up steps; bf16 unless model.dtype is float32",
    )
    runs: int = Field(2, ge=1, description="how often each speed of the tuned model is timed; the median is used")

    @model_validator(mode="after")
    def _fits_together(self) -> AdaptConfig:
        if self.rows <= self.held_out:
            raise UserError(f"rows = {self.rows} leaves no row to train on: raise it above held_out = {self.held_out}")
        if max(self.speedups) <= 1 or min(self.speedups) < 1:
            raise UserError("speedups must be at least 1, and one or more must be above 1")
        if len(set(self.speedups)) < len(self.speedups):
            raise UserError("speedups: a value is listed twice; remove one")
        if self.metric in OF_REFERENCES and self.references is None:
            raise UserError(f"metric: {self.metric} needs references: set this key to a column of right answers")
        if self.adapter and self.weights == "full":
            raise UserError("adapter has no effect with weights: full; leave one of them out")
        if isinstance(start := self.adapter.get("start"), str):
            self.adapter["start"] = place(start)
        return self
