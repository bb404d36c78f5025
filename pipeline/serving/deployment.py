"""Ray Serve deployment of files and batches: one replica for all of the model's, which forward to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve

from actors.server import call_app, stay_on_loopback
from pipeline.config.serve import ServeConfig
from pipeline.runtime.loopback import loopback_environment
from pipeline.serving.batches import BatchRunner
from pipeline.serving.files_api import create_files_app
from pipeline.serving.plan import batch_job
from pipeline.serving.store import Store


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=32)
class Batches:
    """Keeps files and batches in the folder of `config.batches`; batches run on the cluster of this replica."""

    def __init__(self, config: ServeConfig) -> None:
        assert config.batches is not None
        stay_on_loopback()
        address = ray.get_runtime_context().gcs_address
        store = Store(Path(config.batches.folder))
        self._runner = BatchRunner(
            store, partial(batch_job, config), config.batches.at_once, loopback_environment(address)
        )
        self._app = create_files_app(self._runner, config.batches.max_file_bytes)

    async def handle(self, plain: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Answer what `actors.server.forward` sends."""
        return await call_app(self._app, plain, body)

    def __del__(self) -> None:
        if hasattr(self, "_runner"):  # else the constructor has failed
            self._runner.close()
