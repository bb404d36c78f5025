"""Budget of a job: sums the use of all runs and stops the job at a limit.

Tokens come from the commit records. Device time is the wall-clock time of all runs times the number of devices, kept in
`_job/spent.json`. A killed driver does not write that file, so at least the actors' seconds in the records are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.commit.finalize import totals_of
from pipeline.commit.records import read_records
from pipeline.config.job import JobConfig
from pipeline.generate.coordinator import Coordinator
from pipeline.runtime.signals import Interrupted, interrupter, shielded
from pipeline.storage.concurrency import repeating
from pipeline.storage.folder import Folder, read_json, write_json

log = logging.getLogger(__name__)
SPENT = "_job/spent.json"
POLL_SECONDS = 0.25


class BudgetSpent(Interrupted):
    """A limit of the job's budget is reached. With a higher limit the same command resumes the job."""

    advice = "all answers so far are kept; raise the limit and run the same command to resume"


class Budget:
    """Limits of a job and the use of its earlier runs, in device-seconds and generated tokens."""

    def __init__(self, config: JobConfig, folder: Folder, device_seconds: float, tokens: int) -> None:
        self.config, self.folder = config, folder
        self.device_seconds, self.tokens = device_seconds, tokens
        self.began = time.monotonic()

    def spent(self, seconds: float, tokens: int) -> str | None:
        """Return a line that names a limit reached by earlier runs plus `seconds` and `tokens` of this run, or None."""
        limits = self.config.budget
        if limits is None:
            return None
        hours = (self.device_seconds + seconds * self.config.devices) / 3600
        used = {"hours": hours, "money": hours * (self.config.price_per_hour or 0.0), "tokens": self.tokens + tokens}
        for name, limit in limits.model_dump(exclude_none=True).items():
            if used[name] >= limit:
                return f"budget.{name}: {used[name]:,.6g} of {limit:,.6g} used"
        return None

    @contextmanager
    def spending(self, coordinator: Coordinator, shards: int) -> Iterator[None]:
        """Watch the budget while the block runs, and interrupt the run at a limit. shards: number of the run's shards.

        A run whose shards have all begun is not interrupted. Raises BudgetSpent in place of the interrupt.
        """
        if self.config.budget is None:
            yield
            return
        ask, reached = interrupter(with_grace=True), list[str]()

        def watch() -> None:
            try:
                run = coordinator.read()
            except Exception as error:  # an error of Ray, which the run itself reports
                log.debug("the budget was not checked: %s", error)
                return
            found = self.spent(time.monotonic() - self.began, run.tokens)
            if found is not None and not reached and run.shards + run.at_work < shards:
                reached.append(found)
                ask()

        try:
            with repeating(watch, POLL_SECONDS, "budget"):
                yield
        except Interrupted:
            if reached:
                raise BudgetSpent(reached[0]) from None
            raise
        finally:
            with shielded():
                used = self.device_seconds + (time.monotonic() - self.began) * self.config.devices
                write_json(self.folder, SPENT, {"device_seconds": used})


def open_budget(config: JobConfig, folder: Folder, fingerprint: str) -> Budget:
    """Return the budget of a job that is about to run. Raises BudgetSpent if the budget is used up."""
    if config.budget is None:
        return Budget(config, folder, 0.0, 0)
    totals, stored = totals_of(read_records(folder, fingerprint)), read_json(folder, SPENT)
    known = float(stored["device_seconds"]) if isinstance(stored, dict) and "device_seconds" in stored else 0.0
    budget = Budget(config, folder, max(known, totals.device_seconds), totals.generated_tokens)
    if (found := budget.spent(0.0, 0)) is not None:
        raise BudgetSpent(found)
    return budget
