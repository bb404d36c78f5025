"""The Dockerfiles: by hadolint, by what they copy, and by what the clusters ask of them."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from infra_files import INFRA, ROOT, document, documents

DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]
HADOLINT = str(Path(sys.executable).with_name("hadolint"))


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, continued lines joined."""
    text = (INFRA / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    done = subprocess.run([HADOLINT, str(INFRA / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there_and_not_kept_from_the_build(name: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for keyword, rest in instructions(name)
        if keyword == "COPY" and not rest.startswith("--from=")
        for source in rest.split()[:-1]
    ]
    assert {"actors", "pipeline", "pyproject.toml", "constraints.txt"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in allowed), source


def test_what_packaging_needs_is_copied() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    shipped = re.findall(r'^"share/skipdecode.*" = \["(.+?)(?:/\*)?"\]', text, re.M)
    assert len(shipped) == 2
    folders = [str(Path(name).parent) if "/checkpoint" in name else name for name in shipped]
    for name in ("setup.py", "skipdecode.py", "README.md", *folders, *re.findall(r'license-files = \["(.+)"\]', text)):
        for dockerfile in DOCKERFILES:
            assert any(keyword == "COPY" and name in rest.split() for keyword, rest in instructions(dockerfile))


def test_both_images_have_one_python_pinned_versions_and_no_root() -> None:
    bases = {rest.split()[0] for name in DOCKERFILES for keyword, rest in instructions(name) if keyword == "FROM"}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases.pop())
    for name in DOCKERFILES:
        assert [rest for keyword, rest in instructions(name) if keyword == "USER"] == ["1000"]
        installs = [rest for keyword, rest in instructions(name) if keyword == "RUN" and "pip install" in rest]
        assert all("constraints.txt" in line for line in installs)
        assert not [rest for keyword, rest in instructions(name) if keyword in ("ARG", "ENV") and "SECRET" in rest]
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)  # the Dockerfiles grep it


def test_clusters_use_these_images_and_their_user() -> None:
    version = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    docker = documents("aws-cluster.yaml")[0]["docker"]
    cluster = document("kuberay-rayjob.yaml", "RayJob")["spec"]["rayClusterSpec"]
    pods = [one["template"]["spec"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    images = [docker["head_image"], docker["worker_image"], *(pod["containers"][0]["image"] for pod in pods)]
    assert [image.rsplit(":", 1)[1] for image in images] == [f"{version}-cpu", f"{version}-cuda"] * 2
    assert {pod["securityContext"]["runAsUser"] for pod in pods} == {1000}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_ray_in_an_image_asks_for_a_token(name: str) -> None:
    """Unless a cluster file says otherwise, and none does: whoever reaches Ray's ports runs code."""
    settings = " ".join(text for keyword, text in instructions(name) if keyword == "ENV").split()
    assert "RAY_AUTH_MODE=token" in settings
    assert not [one for one in settings if one.startswith("RAY_AUTH_TOKEN")]  # a token in an image is everybody's


def test_no_file_of_a_cluster_turns_tokens_off_or_holds_one() -> None:
    for path in INFRA.iterdir():
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"RAY_AUTH_MODE\W+(?!token)\w", text.replace("RAY_AUTH_MODE=token", "")), path.name
            assert not re.search(r"RAY_AUTH_TOKEN\s*[=:]\s*\w", text), path.name
