"""`adapt.json`: which stages of an adaptation are done, what they were done with, came to and cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from pipeline.plan.manifest import difference
from pipeline.storage.folder import LocalFolder

RECORD = "adapt.json"
FORMAT = 2


class Record:
    """The stages done in a folder, in their order; a stage done anew undoes those behind it."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """ValueError if the folder's record cannot be read."""
        self.folder = LocalFolder(str(folder), folder)
        self.names = names
        self.done: dict[str, dict[str, Any]] = {}  # name -> {"settings", "result"}
        self.seconds: dict[str, float] = {}  # of every attempt
        try:
            values = json.loads(self.folder.read(RECORD))
            if values["format"] != FORMAT:
                raise UserError(f"format {values['format']}, this version writes {FORMAT}")
            self.done, self.seconds = dict(values["done"]), dict(values["seconds"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder}/{RECORD}: not of this version: {' '.join(str(error).split())}; remove the folder"
            ) from None

    def check(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """ValueError names the settings in which a stage that is done differs from what is asked for now."""
        names = [
            name
            for stage in self.names
            if stage in self.done
            for name in difference(self.done[stage]["settings"], _plain(settings[stage]))
        ]
        if names:
            raise UserError(
                f"{self.folder.url}: holds another adaptation, which differs in {', '.join(dict.fromkeys(names))}; "
                "remove the folder, or choose another adapt.output"
            )

    def settings(self, stage: str) -> dict[str, Any] | None:
        """What a stage was done with; None if it is not done."""
        return self.done[stage]["settings"] if stage in self.done else None

    def run(
        self, stage: str, settings: Mapping[str, Any], files: Sequence[str], work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Result of a stage, done now unless it is done and its files are there. An attempt cut off costs too."""
        if stage in self.done and all((self.folder.path / name).exists() for name in files):
            return dict(self.done[stage]["result"])
        for later in self.names[self.names.index(stage) :]:
            self.done.pop(later, None)
        began = time.monotonic()
        try:
            result = _plain(work())
            self.done[stage] = {"settings": _plain(settings), "result": result}
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
            self._save()
        return result

    def _save(self) -> None:
        values = {"format": FORMAT, "done": self.done, "seconds": self.seconds}
        self.folder.replace(RECORD, (json.dumps(values, indent=2) + "\n").encode())


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found
