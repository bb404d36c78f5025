"""infra/aws-cluster.yaml by the launcher's own schema and code, and what we ask of it beyond them."""

from __future__ import annotations

from typing import Any

from infra_files import documents, parse_ray
from ray.autoscaler._private.util import prepare_config, validate_config

from pipeline.config.job import JobConfig


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
