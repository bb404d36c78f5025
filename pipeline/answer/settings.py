"""Fetches the checkpoint and the speed adapter that `EngineSettings` name."""

from __future__ import annotations

from dataclasses import replace

from actors.settings import EngineSettings
from pipeline.checkpoints.resolve import fetch


def fetched(settings: EngineSettings) -> EngineSettings:
    """Fetch checkpoint and speed adapter. Return the settings with local folders in place of these sources."""
    checkpoint, adapter = (
        None if source is None else str(fetch(source)) for source in (settings.checkpoint, settings.speed_adapter)
    )
    return replace(settings, checkpoint=checkpoint, speed_adapter=adapter)
