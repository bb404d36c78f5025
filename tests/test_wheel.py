"""The wheel works by itself: it holds every module and kernel source, and answers rows outside of the checkout."""

from __future__ import annotations

import os
import re
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
    shutil.copytree(ROOT / "configs" / "demo", folder / "configs" / "demo")
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py", "skipdecode.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "configs" / "demo.yaml", folder / "configs")
    # with the setuptools that is here and without pip: an environment of its own takes longer than the build
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, stdout=subprocess.DEVNULL)
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


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds this wheel alone; the dependencies are those of the environment of the tests."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(environment, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--disable-pip-version-check", wheel], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")  # .pth files in these folders are not read
    return environment


def installed(environment: Path, folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in a folder."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    program = [environment / "bin" / command[0], *command[1:]]
    return subprocess.run(program, cwd=folder, env={**env, **more}, capture_output=True, text=True)


def write_own_modules(folder: Path) -> None:
    """Write a package and a module of the user's own, which end a process that imports them."""
    (folder / "pipeline").mkdir()
    for module in ("pipeline/__init__.py", "actors.py"):
        (folder / module).write_text("raise SystemExit('the wrong module')\n")


def test_the_page_of_the_wheel_has_absolute_links(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    page = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert "/raw/main/tests/benchmarks/pictures/speed.svg" in page  # a page of the host, in place of a picture, is none
    assert len(links) > 5 and [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("command", [["skipdecode"], ["python", "-m", "skipdecode"]])
def test_try_answers_rows_from_an_installed_wheel(environment: Path, tmp_path: Path, command: list[str]) -> None:
    """`try` imports neither Ray nor modules of the user's own. Messages name the command that adds to this wheel."""
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
    asked = "import pipeline, pipeline.messages as m; print(pipeline.__file__, m.install_command('tune'))"
    where = installed(environment, tmp_path, "python", "-c", asked).stdout
    assert where.startswith(str(environment)) and "pip install 'skipdecode[tune] @ file:///" in where
    write_own_modules(tmp_path)
    more = {"PYTHONPROFILEIMPORTTIME": "1", "PYTHONPATH": str(tmp_path)}
    done = installed(environment, tmp_path, *command, "try", "job.yaml", "--rows", "2", **more)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0, done.stderr
    assert "torch" in imported and "ray" not in imported
    assert "name[Zizzi]" in done.stdout and "name[Aromi]" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.ray
def test_the_demo_runs_from_an_installed_wheel(environment: Path, tmp_path: Path) -> None:
    """Prompts, job file and checkpoint come with the wheel. A user's own modules reach neither command nor workers."""
    write_own_modules(tmp_path)
    done = installed(environment, tmp_path, "skipdecode", "demo", "für mich", "--rows", "24")
    assert done.returncode == 0, done.stderr
    assert "24 rows in " in done.stdout
    assert str(environment) in (tmp_path / "für mich" / "demo.yaml").read_text()
