"""Keeps `adapt.json`, the record of an adaptation's finished stages."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ValidationError

from actors.engine.errors import UserError
from pipeline.plan.manifest import difference
from pipeline.runtime.announce import announce
from pipeline.storage.local_output import replacing

log = logging.getLogger(__name__)
RECORD = "adapt.json"
Stage = Literal["sample", "answers", "tune", "before", "after"]
STAGES: tuple[str, ...] = get_args(Stage)


class _Done(BaseModel):
    """A finished stage in `adapt.json`."""

    settings: dict[str, Any]
    result: dict[str, Any]


class _Values(BaseModel):
    """The contents of `adapt.json`."""

    format: Literal[4]
    done: dict[Stage, _Done]
    seconds: dict[str, float]
    job_text: str = ""


class StageRecord:
    """The finished stages in an adaptation's folder: settings, results and seconds, stored in `adapt.json`.

    If a stage runs again, later stages no longer count as finished. Raises UserError if the record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / RECORD
        self.done: dict[str, dict[str, Any]] = {}  # stage -> {"settings", "result"}
        self.seconds: dict[str, float] = {}  # stage -> seconds of all attempts together
        self.job_text = ""  # the text last written to the job file
        self.settings: Mapping[str, Mapping[str, Any]] = {}  # stage -> settings, set by `check`
        try:
            read = _Values.model_validate_json(self.path.read_bytes()).model_dump()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValidationError) as error:
            problem = str(error.strerror) if isinstance(error, OSError) else _first_problem(error)
            raise UserError(f"{self.path}: cannot be read: {problem}; remove the folder") from None
        self.done, self.seconds, self.job_text = read["done"], read["seconds"], read["job_text"]

    def check_owner(self) -> None:
        """Raise UserError if the folder holds files but no record: then it belongs to the user."""
        held = sorted(os.listdir(self.folder)) if self.folder.is_dir() and not self.path.exists() else []
        if held:
            raise UserError(
                f"adapt.output: {self.folder} holds {held[0]!r} and no {RECORD} of an earlier run; choose an empty "
                "or a new folder"
            )

    def begin(self) -> None:
        """Create the folder and the record, unless they exist. Raise UserError if this is not possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"adapt.output: {self.folder}: cannot be created: {error.strerror}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UserError(f"adapt.output: {self.folder}: not writable")
        if not self.path.exists():
            self._save()

    def check(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise UserError if a finished stage had other settings than `settings`. The error names the keys."""
        self.settings = settings
        names = [name for stage, done in self.done.items() for name in difference(done["settings"], settings[stage])]
        if names:
            raise UserError(
                f"{self.folder}: holds another adaptation, which differs in {', '.join(dict.fromkeys(names))}; "
                "remove the folder, or choose another adapt.output"
            )

    def run(self, stage: str, purpose: str, files: Sequence[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `stage`. Call `work` to compute it, unless the stage is done and its `files` exist.

        purpose: text that is announced before `work` is called. The stage's seconds include failed attempts.
        """
        if stage in self.done and all((self.folder / name).exists() for name in files):
            return dict(self.done[stage]["result"])
        number = STAGES.index(stage)
        for later in STAGES[number:]:
            self.done.pop(later, None)
        announce(f"stage {number + 1} of {len(STAGES)}: {purpose}")
        began = time.monotonic()
        try:
            self.done[stage] = json.loads(json.dumps({"settings": self.settings[stage], "result": work()}))
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
            self._save()
        gc.collect()  # a trainer has reference cycles; the next stage needs its memory
        torch.cuda.empty_cache()
        return dict(self.done[stage]["result"])

    def write_job(self, job_file: Path, text: str) -> None:
        """Record the text of the job file, and write the file; an empty text removes it.

        A file that `write_job` has not written, or that the user has changed, is kept, with a warning.
        """
        if job_file.exists() and job_file.read_text() != self.job_text:
            log.warning("%s: kept, because adapt did not write it as it is; remove it to get the new one", job_file)
            return
        if not text:
            job_file.unlink(missing_ok=True)
            return
        job_file.unlink(missing_ok=True)  # if a killed run has recorded the text, but not written it, there is no file
        self.job_text = text
        self._save()
        with replacing(job_file) as temporary:
            temporary.write_text(text)

    def _save(self) -> None:
        values = {"format": 4, "done": self.done, "seconds": self.seconds, "job_text": self.job_text}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, problem["loc"])), problem["msg"]]))
