"""On a Ray of one node Ray Data runs without actors of its own: each would be a process that imports Ray Data.

An execution starts four: for the dashboard's figures, for usage statistics, for the reservation of nodes that may
come, and for where actors are. Here there is no dashboard, nodes neither come nor go, and everything is on this one.
The command line turns Ray's usage statistics off.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler import AutoscalingCoordinator, rate_based_cluster_autoscaler
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import STANDARD_RESOURCE_TYPES
from ray.data._internal.execution.operators import actor_pool_map_operator
from ray.data._internal.stats import _StatsManager
from ray.data._internal.utils import cached_ray_internals

from pipeline.runtime.replaced import Replaced, Replacement


class _Call:
    """A method of what stands in for an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class Locations:
    """In place of the actor that knows on which nodes actors are. node: on which all are. Workers hold copies."""

    def __init__(self, node: str) -> None:
        self.node = node

    @property
    def update_actor_location(self) -> _Call:
        """Of an actor, which says where it is."""
        return _Call(lambda actor, node: None)

    @property
    def get_actor_locations(self) -> _Call:
        """Of actors: a reference to their nodes, by actor."""
        return _Call(lambda actors: ray.put(dict.fromkeys(actors, self.node)))


class FixedNodes(AutoscalingCoordinator):
    """In place of the actor that reserves nodes for executions: each has all of them, and asks for none."""

    def __init__(self, requester_id: str, subcluster_selector: dict[str, str] | None = None) -> None:
        self._nodes = {
            node["NodeID"]: {name: node["Resources"].get(name, 0.0) for name in STANDARD_RESOURCE_TYPES}
            for node in ray.nodes()
            if node["Alive"]
        }

    def request_resources(self, resources: Sequence[Any], expire_after_s: float, *others: Any, **settings: Any) -> None:
        """Nothing can be added."""

    def cancel_request(self) -> None:
        """Nothing was requested."""

    def get_reserved_resources(self) -> dict[str, dict[str, float]]:
        """All resources, by node."""
        return self._nodes


def _replacements() -> list[Replacement]:
    def locations() -> Locations:
        return Locations(ray.get_runtime_context().get_node_id())

    return [
        (_StatsManager, "register_dataset_to_stats_actor", staticmethod(lambda *_: None)),
        (_StatsManager, "update_execution_metrics", staticmethod(lambda *_: None)),
        (_StatsManager, "update_iteration_metrics", staticmethod(lambda *_, **named: None)),
        (_StatsManager, "gen_dataset_id_from_stats_actor", staticmethod(lambda: uuid.uuid4().hex)),
        (rate_based_cluster_autoscaler, "DefaultAutoscalingCoordinator", FixedNodes),
        (actor_pool_map_operator, "get_or_create_actor_location_tracker", locations),
        (cached_ray_internals, "get_or_create_actor_location_tracker", locations),
    ]


few_actors = Replaced(_replacements)
