"""Budget of a job: sums the use of all runs and stops the job at a limit.

Tokens come from the commit records. Device time is the wall clock of each session, kept in `_job/spent.json`. A killed
driver does not write that file; the actors' seconds in the commit records are then the lower bound.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.commit.finalize import totals_of
from pipeline.commit.records import read_records
from pipeline.config.job import JobConfig
from pipeline.generate.coordinator import Coordinator
from pipeline.runtime.signals import Interrupted, asker, shielded
from pipeline.storage.folder import Folder

log = logging.getLogger(__name__)
SPENT = "_job/spent.json"
POLL_SECONDS = 0.25


class BudgetSpent(Interrupted):
    """A limit of the job's budget is reached. With a higher limit the same command resumes the job."""


class Budget:
    """Limits of a job and the use of its earlier runs.

    Args:
        config: The job's config.
        folder: The job's output.
        device_seconds: Device seconds of earlier runs.
        tokens: Tokens that earlier runs generated.
    """

    def __init__(self, config: JobConfig, folder: Folder, device_seconds: float, tokens: int) -> None:
        self.config, self.folder = config, folder
        self.device_seconds, self.tokens = device_seconds, tokens
        self.began = time.monotonic()

    def spent(self, seconds: float, tokens: int) -> str | None:
        """One line that names the reached limit and its use; None below all limits.

        Args:
            seconds: Wall-clock seconds of this run.
            tokens: Tokens that this run has generated.
        """
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
        """Watch the run in the block; interrupt it at a limit, so that no further shard begins.

        Args:
            coordinator: Coordinator of the run.
            shards: Number of shards of the run. Once all have begun, nothing is interrupted.

        Raises:
            BudgetSpent: A limit was reached; replaces the interrupt.
        """
        if self.config.budget is None:
            yield
            return
        ended, reason = threading.Event(), [""]
        thread = threading.Thread(
            target=self._watch, args=(coordinator, shards, asker(), ended, reason), name="budget", daemon=True
        )
        thread.start()
        try:
            yield
        except Interrupted:
            if reason[0]:
                raise spent_error(reason[0]) from None
            raise
        finally:
            ended.set()
            thread.join()
            with shielded():
                self._save()

    def _watch(
        self, coordinator: Coordinator, shards: int, ask: Any, ended: threading.Event, reason: list[str]
    ) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                run = coordinator.read()
            except Exception as error:  # of Ray; the run itself reports it
                log.debug("the budget was not checked: %s", error)
                continue
            found = self.spent(time.monotonic() - self.began, run.tokens)
            if found is not None and run.shards + run.at_work < shards:
                reason[0] = found
                ask(found)
                return

    def _save(self) -> None:
        used = self.device_seconds + (time.monotonic() - self.began) * self.config.devices
        self.folder.replace(SPENT, (json.dumps({"device_seconds": used}) + "\n").encode())


def open_budget(config: JobConfig, folder: Folder, fingerprint: str) -> Budget:
    """The budget of a job that is about to run. Raises BudgetSpent if nothing is left of it."""
    if config.budget is None:
        return Budget(config, folder, 0.0, 0)
    totals = totals_of(read_records(folder, fingerprint))
    budget = Budget(config, folder, max(_stored(folder), totals.device_seconds), totals.generated_tokens)
    found = budget.spent(0.0, 0)
    if found is not None:
        raise spent_error(found)
    return budget


def spent_error(found: str) -> BudgetSpent:
    """The error for a reached limit. found: the line of `Budget.spent`."""
    error = BudgetSpent(found)
    error.advice = "what is answered is kept; raise the limit, and the same command goes on"
    return error


def _stored(folder: Folder) -> float:
    try:
        return float(json.loads(folder.read(SPENT))["device_seconds"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return 0.0
