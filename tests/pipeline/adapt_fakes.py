"""What tests of `skipdecode adapt` share: inputs, a job, and stand-ins for the pipeline, training and scoring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from pipeline.config.job import JobConfig
from pipeline.learn.adapt import run as adaptation
from pipeline.learn.adapt.task import Task
from pipeline.learn.score.lines import Line, Score
from pipeline.learn.train.recipe import Recipe
from pipeline.runtime.signals import Interrupted

ROWS = 30
END = 2  # of the tiny checkpoint
WORDS = ["alpha", "bravo", "charlie", "delta"]


def write_inputs(folder: Path) -> Path:
    """Three files, 30 rows, in row groups of 4; row 7 has no prompt, row 11 two references, row 12 none."""
    folder.mkdir()
    prompts: list[str | None] = [f"{WORDS[row % 4]} {row}" for row in range(ROWS)]
    prompts[7] = None
    references = [[f"answer {row}"] * (1 + (row == 11)) for row in range(ROWS)]
    references[12] = []
    for number, (first, end) in enumerate(((0, 13), (13, 14), (14, ROWS))):
        table = pa.table(
            {
                "key": pa.array(range(first, end), pa.int16()),
                "q": prompts[first:end],
                "right": references[first:end],
                "unused": ["x"] * (end - first),
            }
        )
        pq.write_table(table, folder / f"in-{number}.parquet", row_group_size=4)
    return folder


def values(inputs: Path | str, answers: Path, checkpoint: Path, **adapt: Any) -> dict[str, Any]:
    return {
        "input": {"path": str(inputs), "id": "key", "template": "say {{ q }}"},
        "output": {"path": str(answers), "keep": ["key"]},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "schedule": {"speedup": 2, "horizon": 6},
        "sampling": {"max_new_tokens": 8, "stop": ["1e5"]},
        "adapt": {"rows": 20, "held_out": 6, "speedups": [1, 2, 3], "tolerance": 10.0, **adapt},
    }


class Fakes:
    """Stands in for the pipeline, training and scoring. Row r of the sample: r % 5 tokens of answer, of every fourth
    one cut off; `fail` names a stage that is interrupted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.fail, self.empty = list[str](), "", False
        self.error: Exception | None = None
        self.deadly: int | None = None  # row of the sample whose process died
        self.prompt_seconds = 0.0  # of ten
        self.harmed: list[str] = []
        self.recipe: Recipe
        self.chance: dict[str, dict[str, float]] = {}
        self.losses: dict[float, float] = {1.0: 0.0, 2.0: 3.0, 3.0: 8.0}
        patch.setattr(adaptation.jobs, "run", self.run)
        patch.setattr(adaptation, "_tune", self.tune)
        patch.setattr(adaptation, "_score", self.score)

    def note(self, stage: str) -> None:
        self.calls.append(stage)
        if stage == self.fail:
            raise Interrupted("SIGTERM")

    def run(self, config: JobConfig, *, verbose: bool) -> Any:
        self.note("answers")
        self.job = config
        sample = pq.read_table(config.input.path[0])
        rows = []
        for row, prompt in enumerate(sample["q"].to_pylist()):
            tokens = [] if self.empty else [5 + row] * (row % 5)
            rows.append(
                {
                    "id": f"sample.parquet:{row}",
                    "sample_index": 0,
                    "generated_text": "x" * len(tokens),
                    "token_ids": tokens if row % 4 == 3 else [*tokens, END],
                    "error": "died" if row == self.deadly else None if prompt else "prompt is null",
                }
            )
        types = {"token_ids": pa.list_(pa.int32()), "error": pa.string()}
        schema = pa.schema([(name, types.get(name, pa.infer_type([value]))) for name, value in rows[0].items()])
        out = Path(config.output.path)
        out.mkdir(exist_ok=True)
        for part, first in enumerate(range(0, len(rows), 7)):
            pq.write_table(pa.Table.from_pylist(rows[first : first + 7], schema), out / f"part-{part:06d}.parquet")
        batching = SimpleNamespace(planned=0.0, threads=3, cache_bytes=2**20)
        seconds = {"prefill_seconds": self.prompt_seconds, "decode_seconds": 10 - self.prompt_seconds}
        ended = {"stopped": sum(row["error"] is None for row in rows), "cut_off": 0}
        totals = SimpleNamespace(**seconds, **ended, prompt_tokens=900, generated_tokens=60, warnings=[])
        return SimpleNamespace(manifest=SimpleNamespace(batching=batching), totals=totals)

    def tune(self, task: Task, prompt_share: float) -> dict[str, Any]:
        self.note("tune")
        if self.error is not None:
            raise self.error
        variants = task.variants(task.planned_spec, prompt_share)
        self.recipe = task.recipe(variants[0].spec, task.schedules(variants))
        task.trained.mkdir(exist_ok=True)
        (task.trained / "tune.json").write_text("{}")
        return {"harmed": self.harmed}

    def score(self, task: Task, prompt_share: float, *, tuned: bool) -> dict[str, Any]:
        """Skipping in the prompt takes half the time and loses half a point more; so does a uniform schedule again."""
        self.note("after" if tuned else "before")
        self.actors = task.config.actors
        lines = [self.line("reference model", None, 0.0, 0.1)] if tuned and task.options.weights == "full" else []
        for variant in task.variants(task.planned_spec, prompt_share):
            further = 0.5 * (variant.spec.prompt == "first") + 0.5 * variant.is_uniform
            loss = self.losses[variant.nominal or 1.0] + further + 40 * (not tuned)
            seconds = (0.1 - further / 20) / (variant.nominal or 1.0)
            lines.append(
                self.line(variant.name, variant.nominal, loss, seconds, variant.spec.prompt, variant.is_uniform)
            )
        return {"lines": lines, "chance": self.chance, "engine": "builtin"}

    @staticmethod
    def line(
        name: str, nominal: float | None, loss: float, seconds: float, prompt: str = "full", uniform: bool = False
    ) -> dict[str, Any]:
        names = ("fidelity", "agreement_exact", "exact_match", "rouge_l", "bleu", "token_kl")
        scores = dict.fromkeys(names, Score(100 - loss, loss, loss + 1))
        return asdict(Line(name, nominal, prompt, nominal, seconds, scores, uniform=uniform))


Run = Callable[..., Result]
