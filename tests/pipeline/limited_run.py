"""`skipdecode` without Ray, as the child of `timeout`, whose time is up when the first shard is committed.

timeout 10h python tests/pipeline/limited_run.py run job.yaml
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from in_process import InProcess, InProcessSession

from pipeline import job as jobs
from pipeline.cli.app import main
from pipeline.config.job import ActorsConfig
from pipeline.run import stages

commit_shard = stages.commit_shard


class Limited(InProcess):
    """Signals `timeout` as its own timer does, and waits until the job stops."""

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[InProcessSession]:
        session = InProcessSession()

        def commit_at_the_limit(*arguments: Any, **named: Any) -> Any:
            done = commit_shard(*arguments, **named)
            if not session.coordinator.stopped:
                os.kill(os.getppid(), signal.SIGALRM)
            while not session.coordinator.stopped:
                time.sleep(0.01)
            return done

        stages.commit_shard = commit_at_the_limit
        return nullcontext(session)


if __name__ == "__main__":
    jobs.ray_backend = lambda **_: Limited()  # type: ignore[assignment]
    main()
