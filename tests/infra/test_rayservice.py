"""The RayService: by schemas, by Ray Serve's own, and by the settings that it mounts."""

from __future__ import annotations

import copy
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from infra_files import INFRA, document
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as SchemaError
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema
from referencing import Registry, Resource

from pipeline.config.load import parse_yaml, validated
from pipeline.config.serve import ServeConfig

FILE, KUBERNETES = "kuberay-rayservice.yaml", "1.33"
FIELDS = {  # of a RayService's spec, from KubeRay's API reference (v1.6), besides the cluster
    "serveConfigV2": {"type": "string"},
    "excludeHeadPodFromServeSvc": {"type": "boolean"},
    "rayClusterDeletionDelaySeconds": {"type": "integer"},
    "serveService": {"type": "object"},
    "suspend": {"type": "boolean"},
    "upgradeStrategy": {"type": "object"},
}


@cache
def schema() -> Draft202012Validator:
    """The RayJob's schema with a RayService's own fields; pods from Kubernetes' strict schema."""
    values = yaml.safe_load((Path(__file__).parent / "rayjob-schema.yaml").read_text())
    values["properties"]["kind"] = {"const": "RayService"}
    values["properties"]["spec"]["properties"] = {**FIELDS, "rayClusterConfig": {"$ref": "#/$defs/rayCluster"}}
    values["properties"]["spec"]["required"] = ["serveConfigV2", "rayClusterConfig"]
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    (strict,) = (one for one in folder.iterdir() if re.fullmatch(rf"v{KUBERNETES}\.\d+-local-strict", one.name))
    pods = Resource.from_contents(yaml.safe_load((strict / "_definitions.json").read_text()))
    return Draft202012Validator(values, registry=pods @ Registry())


def service() -> dict[str, Any]:
    return document(FILE, "RayService")


def deployed() -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(service()["spec"]["serveConfigV2"]))


def test_the_rayservice_is_valid_and_a_misspelt_key_is_found() -> None:
    schema().validate(service())
    kubernetes_validate.validate(document(FILE, "ConfigMap"), KUBERNETES, strict=True)
    for path in (("serveConfigV2",), ("rayClusterConfig", "authOptions"), ("rayClusterConfig", "headGroupSpec")):
        broken = copy.deepcopy(service())
        node = broken["spec"]
        for key in path[:-1]:
            node = node[key]
        node[f"{path[-1]}x"] = node.pop(path[-1])
        with pytest.raises(SchemaError):
            schema().validate(broken)


def test_the_application_exists_and_its_settings_are_mounted() -> None:
    (application,) = deployed().applications
    assert callable(import_attr(application.import_path))
    file = Path(application.args["config"])  # type: ignore[index]
    settings = document(FILE, "ConfigMap")
    config = validated(ServeConfig, parse_yaml(settings["data"][file.name]), file.name)
    cluster = service()["spec"]["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], worker["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        (volume,) = (one for one in pod["volumes"] if "configMap" in one)
        assert mounts[volume["name"]] == str(file.parent)
        assert volume["configMap"]["name"] == settings["metadata"]["name"]
        assert config.http.api_key_env in [one["name"] for one in container["env"]]
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["capabilities"] == {
            "drop": ["ALL"]
        }
    assert deployed().http_options.port == config.http.port
    assert (config.replicas.min, config.replicas.max) == (worker["minReplicas"], worker["maxReplicas"])
    assert config.replicas.gpus == float(
        worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert cluster["authOptions"]["mode"] == "token"


def test_no_key_is_in_the_file_and_the_images_are_those_of_the_jobs() -> None:
    text = (INFRA / FILE).read_text()
    assert "secretKeyRef" in text and "Bearer" not in text
    images = set(re.findall(r"image: (\S+)", text))
    assert images == set(re.findall(r"image: (\S+)", (INFRA / "kuberay-rayjob.yaml").read_text()))
