"""The wheel works by itself: it holds every module and kernel source, and answers rows outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "pipeline")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: a build writes into its source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # with the setuptools that is here: an environment of its own takes longer than the build
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", folder], check=True
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_module_kernel_source_and_template(wheel: Path) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".typed", ".html", ".css")
    }
    assert sources - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_try_answers_rows_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """The environment holds this wheel alone; the dependencies are those of the environment of the tests. `try` does
    not import ray."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", wheel], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")  # .pth files in these folders are not read
    pq.write_table(
        pa.table({"prompt": ["name[Zizzi], food[Italian]", "name[Aromi], area[riverside]"]}), tmp_path / "in.parquet"
    )
    job = {
        "input": {"path": "in.parquet", "prompt": "prompt"},
        "output": {"path": "out"},
        "model": {"path": str(ROOT / "configs" / "demo" / "checkpoint")},
        "schedule": {"speedup": 3},
        "sampling": {"max_new_tokens": 24},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = subprocess.run(
        [python, "-c", "import pipeline; print(pipeline.__file__)"],
        cwd=tmp_path,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(site))
    command = [environment / "bin" / "skipdecode", "try", "job.yaml", "--rows", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**alone, "PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0, done.stderr
    assert "torch" in imported and "ray" not in imported
    assert "name[Zizzi]" in done.stdout and "name[Aromi]" in done.stdout
    assert not (tmp_path / "out").exists()
