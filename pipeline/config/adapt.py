"""Defines the `adapt` section of job files: every key, its unit and its default. Only `skipdecode adapt` reads it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Place, Section

Metric = Literal["fidelity", "agreement_rouge_l", "agreement_exact", "token_kl", "bleu", "rouge_l", "exact_match"]
OF_TEXTS = ("bleu", "rouge_l")  # metrics of texts, not of labels
OF_REFERENCES = (*OF_TEXTS, "exact_match")
SHORT = 8  # tokens; without references, answers up to this length are judged by agreement_exact, else by fidelity
# default of `tolerance` for each metric: percentage points, but nats for token_kl
TOLERANCES = {
    "fidelity": 10.0,
    "agreement_rouge_l": 10.0,
    "agreement_exact": 5.0,
    "token_kl": 0.1,
    "bleu": 2.0,
    "rouge_l": 2.0,
    "exact_match": 2.0,
}
MEANINGS = {
    "fidelity": "how likely full depth finds the answers' tokens, relative to its own choice at each token, times the "
    "ratio of the answers' length to that of full depth's answers, times the share of their 4-grams that are not "
    "repeated; full depth's own answers score 100, less their repeated 4-grams",
    "agreement_rouge_l": "ROUGE-L of the answers against full depth's; low even for an equally good paraphrase",
    "agreement_exact": "share of the answers that equal full depth's answer, character by character",
    "token_kl": "KL divergence of the next-token distributions from full depth's, per token of full depth's answers",
    "bleu": "BLEU of the answers against the references",
    "rouge_l": "ROUGE-L of the answers against the references",
    "exact_match": "share of the answers that equal a reference of their row",
}
LOSS = {"references": 0.0, "distillation": 1.0}
# full weights take small steps, because the model knows its task; an adapter starts from zero
LEARNING_RATE = {"adapter": 1e-3, "full": 1e-4}
# defaults for a few thousand rows
TRAINING = {
    "epochs": 3.0,
    "batch_size": 16,
    "warmup_steps": 20,
    "eval_steps": 100,
    "save_steps": 100,
}


class AdaptConfig(Section):
    """Settings of an adaptation.

    An adaptation keeps the schedule's horizon, decay, warmup and keep_order, and chooses its depths and prompt.
    """

    removed: ClassVar[dict[str, tuple[Any, str]]] = {"seed": (0, "the draw of rows is fixed; leave it out")}
    renamed: ClassVar[dict[str, str]] = {"lora": "adapter, which is trained unless weights: full is set"}

    rows: int = Field(2000, ge=3, description="input rows to draw and answer at full depth, including held-out rows")
    held_out: int = Field(200, ge=2, description="drawn rows to evaluate on, which are not trained on")
    output: Place | None = Field(
        None,
        description="local folder for the adaptation's files; default: output.path followed by -adapt; on a cluster "
        "it must be set, to a folder on a file system that all nodes share",
    )
    speedups: list[float] = Field([1, 2, 3, 4, 5], min_length=1, description="nominal speed-ups to train and evaluate")
    prompt: Literal["auto", "full", "first"] = Field(
        "auto",
        description="prompt policies (schedule.prompt) to train and evaluate: full, first, or auto. auto: the "
        "schedule's policy; if the job sets none, first too where prompts take a third of the time at full depth",
    )
    metric: Metric | None = Field(
        None,
        description="metric that tolerance limits. Default with references: exact_match for labels, bleu if a row has "
        "several references, else rouge_l. Default without references: agreement_exact with choices or if the median "
        "answer has at most 8 tokens, else fidelity (the answers' likelihood under full depth, their length and their "
        "freedom from repetition)",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="largest loss against full depth (upper end of its interval), in points of 100, for token_kl in "
        "nats; default: fidelity and agreement_rouge_l 10, agreement_exact 5, token_kl 0.1, others 2",
    )
    references: str | None = Field(None, description="input column with right answers: a string, or a list of strings")
    max_tokens: int | None = Field(
        None, ge=4, description="most tokens of prompt and answer together in a training row; default: no limit"
    )
    loss: dict[str, Any] = Field(
        default_factory=dict, description="keys of the section loss of tune files; default: distillation: 1 alone"
    )
    weights: Literal["adapter", "full"] = Field(
        "adapter",
        description="adapter: train a speed adapter for the job's checkpoint, which stays unchanged and runs alone at "
        "1x; full: train all weights, and write a new checkpoint",
    )
    adapter: dict[str, Any] = Field(
        default_factory=dict, description="keys of the section adapter of tune files; default: rank: 32"
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the section training of tune files; default: 3 epochs, 16 rows and all speeds per "
        "step, learning rate 1e-3 (1e-4 with weights: full), 20 warm-up steps, bf16 unless model.dtype is float32",
    )
    workers: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the section workers of tune files; count: 2, for example, trains in two processes; "
        "default: one process",
    )
    runs: int = Field(2, ge=1, description="how often each speed of the tuned model is timed; the median counts")

    @model_validator(mode="after")
    def _fits_together(self) -> AdaptConfig:
        if self.rows <= self.held_out:
            raise UserError(f"rows = {self.rows} leaves none to train on: raise it above held_out = {self.held_out}")
        if max(self.speedups) <= 1 or min(self.speedups) < 1:
            raise UserError("speedups must be 1 or above, and at least one above 1")
        if len(set(self.speedups)) < len(self.speedups):
            raise UserError("speedups: a value is repeated")
        if self.metric in OF_REFERENCES and self.references is None:
            raise UserError(f"metric: {self.metric} needs references, a column of right answers")
        if self.adapter and self.weights == "full":
            raise UserError("adapter has no effect with weights: full; leave one of them out")
        return self
