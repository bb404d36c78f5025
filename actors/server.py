"""Ray Serve deployment of the HTTP interface: a replica holds one engine. The only module of `actors` that imports ray.

    serve.run(Server.bind(load, Limits()))

`load` gives a replica its `ModelSettings`, on the replica's node. Ray Serve's autoscaling counts requests, those that
wait in a replica's own queue included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve._private import replica
from ray.util import get_node_ip_address
from starlette.types import ASGIApp

from actors.serving.http import Limits, create_app
from actors.serving.model import ModelSettings, Render, ServedModel


@serve.deployment
@serve.ingress()
class Server:
    """One replica.

    Args:
        load: Gives the model's settings; called on the replica's node, where it may fetch the checkpoint.
        limits: Bounds of requests.
        render: See `ServedModel`.
    """

    def __init__(self, load: Callable[[], ModelSettings], limits: Limits, render: Render | None = None) -> None:
        stay_on_loopback()
        self._limits, self._model = limits, ServedModel(load(), render)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._model, self._limits)

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine fails."""
        if not self._model.loop.healthy:
            raise RuntimeError("the engine fails")


def stay_on_loopback() -> None:
    """Call this while a replica is made: on a Ray of the loopback alone, its calls come from there alone.

    A replica takes calls of other deployments, as pickles, on every address of the machine, whatever the node's own is.
    """
    names = vars(replica)
    add_port = names["add_port_to_grpc_server"]
    if get_node_ip_address().startswith("127."):

        def on_loopback(server: Any, address: str) -> int:
            port: int = add_port(server, address.replace("[::]", "127.0.0.1"))
            return port

        names["add_port_to_grpc_server"] = on_loopback
