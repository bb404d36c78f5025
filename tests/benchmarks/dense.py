"""Why not simply a smaller model? The demo's checkpoint beside dense models as deep as 3x and 5x are on average.

    .venv/bin/python tests/benchmarks/dense.py [--rows N]

`configs/demo/train.py` trains the dense models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.config.job import JobConfig
from pipeline.config.load import load_config
from pipeline.learn.evaluate import evaluate
from pipeline.learn.score.lines import print_tables
from pipeline.runtime.wide_console import wide_console

TEST = [
    "input.path=../shared/data/e2e/test.parquet",
    "sampling.max_new_tokens=72",
    "adapt.references=references",
    "adapt.runs=3",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=630, help="of E2E's test prompts")
    changes = [*TEST, f"adapt.held_out={parser.parse_args().rows}"]
    others = {f"dense, {layers} layers": Path(f"work/evidence/dense-{layers}") for layers in (7, 5)}
    print_tables(wide_console(), evaluate(load_config(JobConfig, "configs/demo.yaml", changes), [1, 3, 5], others))


if __name__ == "__main__":
    main()
