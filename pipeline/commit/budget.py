"""Adds up the device time and tokens that all runs of a job have used. Stops the job at a limit of its budget.

The commit records hold the tokens. The file `_job/spent.json` holds the device time: wall-clock time multiplied by the
number of devices. If the driver was killed before it wrote this file, the actor times in the commit records count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from pipeline.commit.finalize import totals_of
from pipeline.commit.records import read_records
from pipeline.config.job import JobConfig
from pipeline.generate.coordinator import Coordinator
from pipeline.runtime.signals import Interrupted, interrupter, shielded
from pipeline.storage.concurrency import repeating
from pipeline.storage.folder import STORE_ERRORS, Folder, read_json, write_json

log = logging.getLogger(__name__)
SPENT = "_job/spent.json"
POLL_SECONDS = 0.25


class BudgetSpent(Interrupted):
    """A limit of the job's budget has been reached. To resume the job, raise the limit and run the same command."""

    advice = "all answers so far are kept; raise the limit and run the same command to resume"


class Budget:
    """A job's budget. device_seconds, tokens: device time and number of generated tokens of the job's earlier runs."""

    def __init__(self, config: JobConfig, folder: Folder, device_seconds: float, tokens: int) -> None:
        self.config, self.folder = config, folder
        self.device_seconds, self.tokens = device_seconds, tokens

    def used(self, seconds: float = 0.0, tokens: int = 0) -> dict[str, float]:
        """Return limit name -> amount that all runs have used. seconds, tokens: the amounts that this run has used."""
        hours = (self.device_seconds + seconds * self.config.devices) / 3600
        return {"hours": hours, "money": hours * (self.config.price_per_hour or 0.0), "tokens": self.tokens + tokens}

    def spent(self, seconds: float = 0.0, tokens: int = 0) -> str | None:
        """Return one line that names a limit that is used up, else None. For the arguments see `used`."""
        limits, used = self.config.budget, self.used(seconds, tokens)
        for name, limit in limits.model_dump(exclude_none=True).items() if limits else ():
            if used[name] >= limit:
                return f"budget.{name}: {used[name]:,.6g} of {limit:,.6g} used"
        return None

    def checked(self) -> Budget:
        """Return the budget. Raises BudgetSpent if earlier runs have used it up."""
        if (found := self.spent()) is not None:
            raise BudgetSpent(found)
        return self

    @contextmanager
    def spending(self, coordinator: Coordinator, shards: int) -> Iterator[None]:
        """Check the budget repeatedly while the `with` block runs. At a limit, interrupt the run and raise BudgetSpent.

        Do not interrupt the run if all of its shards have begun. shards: number of shards that this run must answer.
        Record the device time even if the job has no budget, because a later run of the job may have one.
        """
        began = time.monotonic()
        interrupt, reached = interrupter(with_grace=True), list[str]()

        def watch() -> None:
            try:
                run = coordinator.read()
            except Exception as error:  # an error of Ray; the run reports it
                log.debug("the budget was not checked: %s", error)
                return
            found = self.spent(time.monotonic() - began, run.tokens)
            if found is not None and not reached and run.shards + run.at_work < shards:
                reached.append(found)
                interrupt()

        try:
            with nullcontext() if self.config.budget is None else repeating(watch, POLL_SECONDS, "budget"):
                yield
        except Interrupted:
            if reached:
                raise BudgetSpent(reached[0]) from None
            raise
        finally:
            # if the job has no budget, ignore a failed write: at most a later run needs the record
            with shielded(), suppress(*(STORE_ERRORS if self.config.budget is None else ())):
                used = self.device_seconds + (time.monotonic() - began) * self.config.devices
                if _recorded_seconds(self.folder) <= self.device_seconds:  # else another run has taken over
                    write_json(self.folder, SPENT, {"device_seconds": used})


def open_budget(config: JobConfig, folder: Folder, fingerprint: str) -> Budget:
    """Return the job's budget, with the device time and tokens that earlier runs have used."""
    known = _recorded_seconds(folder)
    if config.budget is None:
        return Budget(config, folder, known, 0)
    totals = totals_of(read_records(folder, fingerprint))
    return Budget(config, folder, max(known, totals.device_seconds), totals.generated_tokens)


def _recorded_seconds(folder: Folder) -> float:
    """Return the device time in the file `SPENT`; 0 if the file is missing or damaged."""
    return (read_json(folder, SPENT, dict[str, float]) or {}).get("device_seconds", 0.0)
