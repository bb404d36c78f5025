"""The `adapt` section of a job file: every key, its unit and its default. `skipdecode adapt` alone reads it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Place, Section

Metric = Literal["fidelity", "agreement_rouge_l", "agreement_exact", "token_kl", "bleu", "rouge_l", "exact_match"]
OF_TEXTS = ("bleu", "rouge_l")  # metrics of texts, not of labels
OF_REFERENCES = (*OF_TEXTS, "exact_match")
SHORT = 8  # tokens; answers up to this median length are compared with full depth's as a whole
# default tolerances: points of 100, token_kl in nats
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
    "fidelity": "probability of the answers' tokens under full depth against the tokens that it would choose there, "
    "times their length against its own answers', times the share of their 4-grams that are no repeats; its own "
    "answers have 100, less their repeats",
    "agreement_rouge_l": "ROUGE-L of the answers with full depth's own, of which an equally good paraphrase lacks much",
    "agreement_exact": "share of the answers that are full depth's own, character by character",
    "token_kl": "distance of the next-token distributions from full depth's, over full depth's own answers",
    "bleu": "BLEU of the answers with the references",
    "rouge_l": "ROUGE-L of the answers with the references",
    "exact_match": "share of the answers that are among the references",
}
LOSS = {"references": 0.0, "distillation": 1.0}
# full: small steps, because the model knows its task; an adapter begins at zero
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

    It keeps the job's horizon, decay, warmup and keep_order, and chooses depths and prompt.
    """

    removed: ClassVar[dict[str, tuple[Any, str]]] = {"seed": (0, "the draw of rows is fixed; leave it out")}
    renamed: ClassVar[dict[str, str]] = {"lora": "adapter, which is trained unless weights: full is set"}

    rows: int = Field(2000, ge=3, description="input rows answered at full depth, held-out ones included")
    held_out: int = Field(200, ge=2, description="rows of the sample that are evaluated and not trained on")
    output: Place | None = Field(
        None,
        description="local folder; default output.path followed by -adapt; required on a cluster, on a file "
        "system that all nodes share",
    )
    speedups: list[float] = Field([1, 2, 3, 4, 5], min_length=1, description="nominal, each trained and evaluated")
    prompt: Literal["auto", "full", "first"] = Field(
        "auto",
        description="prompt policies trained and evaluated: full, first, or auto: that of the job's schedule; if it "
        "sets none, full, and first too where prompts take a third of the job's time at full depth",
    )
    metric: Metric | None = Field(
        None,
        description="metric of the tolerance; default with references: exact_match of labels, bleu where a row has "
        "several, else rouge_l; without: agreement_exact with choices and for answers of at most 8 tokens in the "
        "median, else fidelity, the likelihood, length and freedom from repetition of the answers in the eyes of full "
        "depth",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="largest loss against full depth, points of 100, or nats of token_kl, by the upper end of its "
        "interval; default 10 of fidelity and agreement_rouge_l, 5 of agreement_exact, 2 of others, 0.1 nats",
    )
    references: str | None = Field(None, description="input column with right answers, a string or a list of strings")
    max_tokens: int | None = Field(
        None, ge=4, description="tokens of a pair that is trained on, at most; default no limit"
    )
    loss: dict[str, Any] = Field(default_factory=dict, description="keys of tune's loss; default distillation: 1 alone")
    weights: Literal["adapter", "full"] = Field(
        "adapter",
        description="adapter: train a speed adapter, and the job keeps its checkpoint, at 1x unchanged; full: train "
        "all weights, into a checkpoint of the job's own",
    )
    adapter: dict[str, Any] = Field(default_factory=dict, description="keys of tune's adapter; default rank 32")
    training: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of tune's training; default 3 epochs, 16 rows and all speeds a step, learning rate 1e-3, of "
        "all weights 1e-4, 20 warm-up steps, bf16 unless model.dtype is float32",
    )
    workers: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of tune's workers: processes that train, such as count: 2 on two cores; default one",
    )
    runs: int = Field(2, ge=1, description="timed runs of each speed of the tuned checkpoint; the median counts")

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
