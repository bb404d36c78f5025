"""The files of infra/, and whether the commands in them are ones that the real command lines take."""

from __future__ import annotations

import copy
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer
import yaml
from jsonschema import Draft202012Validator
from ray.scripts.scripts import cli as ray_cli
from referencing import Registry, Resource

from pipeline.cli.app import app

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = "1.33"


def documents(name: str) -> list[dict[str, Any]]:
    """The YAML documents of a file in infra/."""
    return list(yaml.safe_load_all((INFRA / name).read_text()))


def document(name: str, kind: str, called: str | None = None) -> dict[str, Any]:
    """The one document of a kind, and of a name if there are several."""
    found = [
        one for one in documents(name) if one["kind"] == kind and (called is None or one["metadata"]["name"] == called)
    ]
    assert len(found) == 1, (name, kind, called)
    return found[0]


def kuberay_schema(kind: str, **spec: Any) -> Draft202012Validator:
    """The schema of a KubeRay document: fields from the fixture here, pods from Kubernetes' strict schema.

    spec: what takes the place of a RayJob's own `properties` and `required`.
    """
    schema = yaml.safe_load((Path(__file__).parent / "rayjob-schema.yaml").read_text())
    schema["properties"]["kind"] = {"const": kind}
    schema["properties"]["spec"] |= spec
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    (strict,) = (one for one in folder.iterdir() if re.fullmatch(rf"v{KUBERNETES}\.\d+-local-strict", one.name))
    pods = Resource.from_contents(yaml.safe_load((strict / "_definitions.json").read_text()))
    return Draft202012Validator(schema, registry=pods @ Registry())


def misspelt(whole: dict[str, Any], *path: str) -> dict[str, Any]:
    """The document with the key at the end of a path misspelt."""
    broken = copy.deepcopy(whole)
    node = broken
    for key in path[:-1]:
        node = node[key]
    node[f"{path[-1]}x"] = node.pop(path[-1])
    return broken


def parse_run(line: str) -> dict[str, Any]:
    """Options of a `skipdecode run ...` line, as the real command parses them; its error if it does not."""
    words = shlex.split(line)
    assert words[:2] == ["skipdecode", "run"], line
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.commands["run"].make_context("run", words[2:])
    return dict(context.params)


def parse_ray(line: str) -> dict[str, Any]:
    """Options of a `ray start ...` or `ray stop` line, as Ray's own command parses them."""
    words = shlex.split(line)
    assert words[0] == "ray", line
    context = ray_cli.commands[words[1]].make_context(words[1], words[2:])
    return dict(context.params)
