"""Defines the Ray Serve deployment of the HTTP interface. Only this module of `actors` imports ray.

serve.run(Server.bind(load, Limits()))
"""

from __future__ import annotations

from collections.abc import Callable

from ray import serve
from starlette.types import ASGIApp

from actors.serving.http import Limits, create_app
from actors.serving.model import ServedModel


@serve.deployment
@serve.ingress()
class Server:
    """One replica of the server, with one engine.

    Args:
        load: Loads the model, and may fetch the checkpoint first. Called on the replica's node.
        limits: Limits on requests.
    """

    def __init__(self, load: Callable[[], ServedModel], limits: Limits) -> None:
        self._limits, self._model = limits, load()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._model, self._limits)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine keeps failing; Ray Serve then replaces the replica."""
        if not self._model.loop.healthy:
            raise RuntimeError("the engine keeps failing: Ray Serve replaces this replica")
