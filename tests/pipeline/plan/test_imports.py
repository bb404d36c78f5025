"""Planning a job, and describing its stages, load no Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["plan.manifest", "plan.columns", "generate.output", "job", "run.stages"])
def test_ray_is_not_imported(module: str) -> None:
    script = f"import sys, pipeline.{module}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
