"""The files of KubeRay, Kubernetes and AWS fit their schemas and one another, and a script waits for the job's end."""

from __future__ import annotations

import inspect
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from infra_files import INFRA, KUBERNETES, document, documents, kuberay_schema, misspelt, parse_ray, parse_run
from jsonschema import ValidationError as SchemaError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.modules.job import job_supervisor
from ray.serve.schema import ServeDeploySchema

from pipeline.config.job import JobConfig
from pipeline.config.load import load_config

CRON, RAYJOB, NAME = "kubernetes-labelling-cronjob.yaml", "kuberay-rayjob.yaml", "skipdecode-labelling"
RAYSERVICE = "kuberay-rayservice.yaml"
SHUTDOWN_SECONDS = 10  # of Ray and the lease, after the grace


def cron_pod() -> dict[str, Any]:
    pod: dict[str, Any] = document(CRON, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return pod


def test_the_rayjob_is_valid_and_a_misspelt_key_is_found() -> None:
    rayjob, schema = document(RAYJOB, "RayJob"), kuberay_schema("RayJob")
    schema.validate(rayjob)
    for path in (
        ("entrypoint",),
        ("rayClusterSpec", "authOptions"),
        ("rayClusterSpec", "headGroupSpec", "template", "spec", "containers"),
    ):
        with pytest.raises(SchemaError):
            schema.validate(misspelt(rayjob, "spec", *path))


def test_the_rayjob_has_a_token_and_goes_on_after_a_lost_cluster() -> None:
    spec = document(RAYJOB, "RayJob")["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["backoffLimit"] >= 1
    assert spec["shutdownAfterJobFinishes"] is True
    (worker,) = cluster["workerGroupSpecs"]
    assert (worker["minReplicas"], cluster["enableInTreeAutoscaling"]) == (0, True)
    for pod in (cluster["headGroupSpec"]["template"]["spec"], worker["template"]["spec"]):
        assert pod["serviceAccountName"] == document(CRON, "ServiceAccount", "skipdecode-job")["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert all(one["securityContext"]["allowPrivilegeEscalation"] is False for one in pod["containers"])
    assert cluster["rayVersion"] in (INFRA.parent / "constraints.txt").read_text().split("ray==")[1].splitlines()[0]


def test_a_stopped_job_has_time_for_its_grace_and_for_ray_to_end() -> None:
    needed = load_config(JobConfig, INFRA / "labelling-job.yaml").grace_seconds + SHUTDOWN_SECONDS
    pod = document(RAYJOB, "RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert pod["terminationGracePeriodSeconds"] > int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= needed
    assert "RAY_JOB_STOP_WAIT_TIME_S" in inspect.getsource(job_supervisor)


def test_the_rayjob_runs_a_job_file_that_is_mounted() -> None:
    spec = document(RAYJOB, "RayJob")["spec"]
    file = Path(parse_run(spec["entrypoint"])["job"])
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounts = {one["name"]: one["mountPath"] for one in head["containers"][0]["volumeMounts"]}
    (volume,) = (one for one in head["volumes"] if "configMap" in one)
    assert mounts[volume["name"]] == str(file.parent)
    (generated,) = documents("kustomization.yaml")[0]["configMapGenerator"]
    assert volume["configMap"]["name"] == generated["name"]
    assert file.name in generated["files"]
    with pytest.raises(Exception, match="No such option: --resume"):  # typer brings a click of its own
        parse_run(spec["entrypoint"] + " --resume")


def test_the_labelling_job_loads_and_fits_the_cluster() -> None:
    job = load_config(JobConfig, INFRA / "labelling-job.yaml")
    assert job.input.model_dump()["since"] == "last_success"
    (worker,) = document(RAYJOB, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (job.actors.min, job.actors.max) == (1, worker["maxReplicas"])
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert job.actors.gpus == float(limits["nvidia.com/gpu"])


@pytest.mark.parametrize("one", documents(CRON), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_kubernetes_own_kinds_are_valid(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_one_run_at_a_time_with_the_rights_for_it_and_no_more() -> None:
    spec = document(CRON, "CronJob")["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] >= 60
    rayjob = document(RAYJOB, "RayJob")
    # the RayJob ends before the pod that waits for it, or the next night would begin a second one beside it
    assert rayjob["spec"]["activeDeadlineSeconds"] < spec["jobTemplate"]["spec"]["activeDeadlineSeconds"]
    assert cron_pod()["serviceAccountName"] == "skipdecode-scheduler"
    assert document(CRON, "Role")["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get"]}
    ]
    binding = document(CRON, "RoleBinding")
    assert binding["subjects"][0]["name"] == "skipdecode-scheduler"
    assert binding["roleRef"]["name"] == document(CRON, "Role")["metadata"]["name"]
    spaces = {one["metadata"]["namespace"] for one in [*documents(CRON), rayjob]}
    assert spaces == {documents("kustomization.yaml")[0]["namespace"]}


def test_the_kustomization_names_files_that_are_there() -> None:
    (kustomization,) = documents("kustomization.yaml")
    assert kustomization["resources"] == [CRON]
    (generated,) = kustomization["configMapGenerator"]
    assert generated["files"] == [RAYJOB, "labelling-job.yaml"]
    assert all((INFRA / name).is_file() for name in [*kustomization["resources"], *generated["files"]])
    assert kustomization["generatorOptions"]["disableNameSuffixHash"] is True
    env = {one["name"]: one.get("value") for one in cron_pod()["containers"][0]["env"]}
    (mount,) = (one for one in cron_pod()["containers"][0]["volumeMounts"] if one["name"] == "template")
    (volume,) = (one for one in cron_pod()["volumes"] if one["name"] == "template")
    assert volume["configMap"]["name"] == generated["name"]
    assert env["TEMPLATE"] == f"{mount['mountPath']}/{RAYJOB}"


FAKE_KUBECTL = """#!/bin/sh
# kubectl of a cluster that is a folder: one file a RayJob, and the statuses it goes through, one a line
case "$1 $2" in
  "get rayjob")
    [ -f "$CLUSTER/$3.yaml" ] || { case "$*" in *--ignore-not-found*) exit 0 ;; *) exit 1 ;; esac; }
    case "$*" in
      *"-o name"*) echo "rayjob.ray.io/$3" ;;
      *) head -n 1 "$CLUSTER/statuses"; sed -i 1d "$CLUSTER/statuses" ;;
    esac ;;
  "create -f")
    cat > "$CLUSTER/made"
    mv "$CLUSTER/made" "$CLUSTER/$(sed -n 's/^  name: //p' "$CLUSTER/made").yaml" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


def wait_for_rayjob(folder: Path, *statuses: str) -> subprocess.CompletedProcess[str]:
    """Runs the CronJob's script against a cluster whose RayJob goes through these statuses."""
    kubectl = folder / "kubectl"
    kubectl.write_text(FAKE_KUBECTL)
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    (folder / "statuses").write_text("".join(f"{one}\n" for one in statuses))
    container = cron_pod()["containers"][0]
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CLUSTER": str(folder),
        "RUN": f"{NAME}-29000000",
        "TEMPLATE": str(INFRA / RAYJOB),
        "POLL_SECONDS": "0",
    }
    assert {one["name"] for one in container["env"]} <= {*env, "HOME"}
    return subprocess.run(
        [*container["command"], *container["args"]], env=env, capture_output=True, text=True, timeout=600
    )


def test_the_script_makes_the_rayjob_and_waits_for_its_success(tmp_path: Path) -> None:
    done = wait_for_rayjob(tmp_path, " ", "Initializing ", "Running RUNNING", "Retrying ", "Complete SUCCEEDED")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{NAME}-29000000 succeeded\n")
    made = yaml.safe_load((tmp_path / f"{NAME}-29000000.yaml").read_text())
    kuberay_schema("RayJob").validate(made)
    template = document(RAYJOB, "RayJob")
    assert made == {**template, "metadata": {**template["metadata"], "name": f"{NAME}-29000000"}}


@pytest.mark.parametrize("end", ["Failed FAILED", "Failed ", "Complete STOPPED", "ValidationFailed "])
def test_the_script_fails_if_the_rayjob_does(tmp_path: Path, end: str) -> None:
    done = wait_for_rayjob(tmp_path, "Running RUNNING", end)
    assert done.returncode == 1
    assert f"{NAME}-29000000: {end.strip()}" in done.stderr


def test_the_script_started_again_waits_for_the_rayjob_that_is_there(tmp_path: Path) -> None:
    made = tmp_path / f"{NAME}-29000000.yaml"
    made.write_text("made by the pod before")
    assert wait_for_rayjob(tmp_path, "Complete SUCCEEDED").returncode == 0
    assert made.read_text() == "made by the pod before"


SERVICE_FIELDS = {  # of this RayService's spec, from KubeRay's API reference (v1.6)
    "serveConfigV2": {"type": "string"},
    "excludeHeadPodFromServeSvc": {"type": "boolean"},
    "rayClusterConfig": {"$ref": "#/$defs/rayCluster"},
}


def service() -> dict[str, Any]:
    return document(RAYSERVICE, "RayService")


def deployed() -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(service()["spec"]["serveConfigV2"]))


def test_the_rayservice_is_valid() -> None:
    schema = kuberay_schema("RayService", properties=SERVICE_FIELDS, required=["serveConfigV2", "rayClusterConfig"])
    schema.validate(service())


def test_the_application_is_ray_serve_llm_with_the_arguments_of_the_recipe() -> None:
    (application,) = deployed().applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    (config,) = application.args["llm_configs"]  # type: ignore[index]
    arguments, recipe = (
        config["engine_kwargs"],
        (INFRA.parent / "configs" / "recipes" / "vllm" / "ray_serve_llm.py").read_text(),
    )
    assert all(f'"{name}": "{arguments[name]}"' in recipe for name in ("worker_cls", "scheduler_cls"))
    section = arguments["additional_config"]["skipdecode"]
    assert list(section) == re.findall(r'"(\w+)": ', recipe.partition('"skipdecode": {')[2].partition("}")[0])
    cluster = service()["spec"]["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    scaling = config["deployment_config"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (worker["minReplicas"], worker["maxReplicas"])
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for pod in (cluster["headGroupSpec"]["template"]["spec"], worker["template"]["spec"]):
        (container,) = pod["containers"]
        folders = {Path(section["speed_adapter"]).parent, Path(config["model_loading_config"]["model_source"]).parent}
        (mount,) = (one for one in container["volumeMounts"] if {Path(one["mountPath"])} == folders)
        assert mount["name"] in [one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert container["image"].endswith("-vllm")
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert cluster["authOptions"]["mode"] == "token"


def cluster() -> dict[str, Any]:
    (found,) = documents("aws-cluster.yaml")
    return found


def test_the_launcher_takes_it() -> None:
    config = prepare_config(cluster())
    validate_config(config)
    assert config["head_node_type"] == "head"
    assert config["available_node_types"]["head"]["max_workers"] == 0


def test_head_without_gpu_and_spot_workers_from_none() -> None:
    config = cluster()
    head, worker = (config["available_node_types"][name] for name in ("head", "gpu-worker"))
    assert "GPU" not in head["resources"]
    assert "InstanceMarketOptions" not in head["node_config"]
    assert worker["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert (worker["min_workers"], worker["max_workers"]) == (0, config["max_workers"])
    assert worker["resources"]["GPU"] == 1
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert {node["node_config"]["IamInstanceProfile"]["Name"] for node in (head, worker)} == {
        "skipdecode-head",
        "skipdecode-worker",
    }


def test_nothing_is_open_and_every_node_has_the_token() -> None:
    config = cluster()
    assert config["provider"]["use_internal_ips"] is True
    assert "security_group" not in config["provider"]  # the launcher's own group lets SSH in from anywhere
    for node in config["available_node_types"].values():
        assert node["node_config"]["SecurityGroupIds"]
        assert node["node_config"]["SubnetIds"]
        assert node["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    (stop,) = (one for one in config["docker"]["run_options"] if "RAY_JOB_STOP_WAIT_TIME_S" in one)
    assert int(stop.partition("TIME_S=")[2]) >= JobConfig.model_fields["grace_seconds"].default + 10
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert not [option for option in config["docker"]["run_options"] if "publish" in option or option == "-p"]


def test_ray_takes_the_start_commands() -> None:
    config = cluster()
    head = [parse_ray(line) for line in config["head_start_ray_commands"]][-1]
    assert head["head"] is True
    assert head["dashboard_host"] == "127.0.0.1"
    assert head["object_store_memory"] == 4_000_000_000
    assert head["autoscaling_config"].endswith("ray_bootstrap_config.yaml")
    worker = [parse_ray(line) for line in config["worker_start_ray_commands"]][-1]
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"
