"""The RayService: by schemas, by Ray Serve's own, and by the settings that it mounts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from infra_files import INFRA, KUBERNETES, document, kuberay_schema, misspelt
from jsonschema import ValidationError as SchemaError
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from pipeline.config.load import parse_yaml, validated
from pipeline.config.serve import ServeConfig

FILE = "kuberay-rayservice.yaml"
FIELDS = {  # of a RayService's spec, from KubeRay's API reference (v1.6)
    "serveConfigV2": {"type": "string"},
    "excludeHeadPodFromServeSvc": {"type": "boolean"},
    "rayClusterDeletionDelaySeconds": {"type": "integer"},
    "serveService": {"type": "object"},
    "suspend": {"type": "boolean"},
    "upgradeStrategy": {"type": "object"},
    "rayClusterConfig": {"$ref": "#/$defs/rayCluster"},
}


def service() -> dict[str, Any]:
    return document(FILE, "RayService")


def deployed() -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(service()["spec"]["serveConfigV2"]))


def test_the_rayservice_is_valid_and_a_misspelt_key_is_found() -> None:
    schema = kuberay_schema("RayService", properties=FIELDS, required=["serveConfigV2", "rayClusterConfig"])
    schema.validate(service())
    kubernetes_validate.validate(document(FILE, "ConfigMap"), KUBERNETES, strict=True)
    for path in (("serveConfigV2",), ("rayClusterConfig", "authOptions"), ("rayClusterConfig", "headGroupSpec")):
        with pytest.raises(SchemaError):
            schema.validate(misspelt(service(), "spec", *path))


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
