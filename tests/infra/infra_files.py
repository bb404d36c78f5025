"""The files of infra/: documents, queries of the dashboard, and commands as the real command lines parse them."""

from __future__ import annotations

import copy
import json
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
DASHBOARD, SCRAPE = INFRA / "grafana-dashboard.json", INFRA / "prometheus.yml"
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


def panels() -> list[dict[str, Any]]:
    """Of the Grafana dashboard."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> dict[str, str]:
    """Each query of the dashboard as Prometheus gets it, by panel and reference."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m").replace("$output", ".*")
        for panel in panels()
        for target in panel["targets"]
    }


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
    return _parse("skipdecode", typer.main.get_command(app), line)


def parse_ray(line: str) -> dict[str, Any]:
    """Options of a `ray start ...` or `ray stop` line, as Ray's own command parses them."""
    return _parse("ray", ray_cli, line)


def _parse(program: str, group: Any, line: str) -> dict[str, Any]:
    first, command, *words = shlex.split(line)
    assert first == program, line
    return dict(group.commands[command].make_context(command, words).params)
