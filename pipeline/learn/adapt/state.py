"""Keeps `adapt.json`: the finished stages of an adaptation with their settings, results, cost and files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, flat
from pipeline.config.base import without_removed
from pipeline.config.job import JobConfig
from pipeline.plan.manifest import difference
from pipeline.storage.owned_folder import FILES, OwnedFolder

RECORD, FORMAT = "adapt.json", 3
STAGES = ("sample", "answers", "tune", "before", "after")


class StageRecord:
    """The finished stages in a folder, in order. A stage that runs again removes later stages.

    folder: where the adaptation is written. Raises UserError if its record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = OwnedFolder(folder, RECORD, "adapt.output")
        self.done: dict[str, dict[str, Any]] = {}  # name -> {"settings", "result"}
        self.seconds: dict[str, float] = {}  # seconds of every attempt
        values = self.folder.values()
        if not values.keys() - {FILES}:
            return  # no record, or no stage yet
        try:
            if values["format"] != FORMAT:
                raise UserError(f"format {values['format']}, this version writes {FORMAT}")
            self.done, self.seconds = dict(values["done"]), dict(values["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}/{RECORD}: not of this version: {flat(error)}; remove the folder") from None

    def settings(self, stage: str) -> dict[str, Any] | None:
        """Return the settings of a finished stage, else None."""
        return self.done[stage]["settings"] if stage in self.done else None

    def check(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise UserError that names the settings of finished stages that differ from the present ones."""
        names = [
            name
            for stage, done in self.done.items()
            for name in difference(without_removed(done["settings"], JobConfig), _plain(settings[stage]))
        ]
        if names:
            raise UserError(
                f"{self.folder.path}: holds another adaptation, which differs in {', '.join(dict.fromkeys(names))}; "
                "remove the folder, or choose another adapt.output"
            )

    def run(
        self, stage: str, settings: Mapping[str, Any], files: Sequence[str], work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the stage's result; `work` is called unless the stage is done and its `files` exist.

        The seconds of an attempt that failed count too.
        """
        if stage in self.done and all((self.folder.path / name).exists() for name in files):
            return dict(self.done[stage]["result"])
        for later in STAGES[STAGES.index(stage) :]:
            self.done.pop(later, None)
        began = time.monotonic()
        try:
            self.done[stage] = _plain({"settings": settings, "result": work()})
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
            self.folder.save({"format": FORMAT, "done": self.done, "seconds": self.seconds})
        return dict(self.done[stage]["result"])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values after a round trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
