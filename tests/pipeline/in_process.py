"""Whole jobs in the process of a test: every stage is real, there is no Ray."""

from __future__ import annotations

from typing import Any

from pipeline import job as jobs
from pipeline.backends.in_process import InProcess
from pipeline.config.job import JobConfig
from pipeline.report.summary import JobResult


def run_in_process(config: JobConfig, **options: Any) -> JobResult:
    """`pipeline.job.run` on the in-process backend."""
    return jobs.run(config, backend=InProcess(), **options)
