"""Whether Ray's Job API lets a job say how far it is: infra/README.md says that it does not."""

from __future__ import annotations

import inspect
import re

from ray.dashboard.modules.job import job_head, sdk


def test_nobody_can_change_metadata_or_message_of_a_submitted_job() -> None:
    """If this fails, Ray has learned it: `report.progress` can set the job's message, and RayJobs show it."""
    routes = re.findall(r'@routes\.(\w+)\(\s*"(/api/jobs[^"]*)"', inspect.getsource(job_head))
    job = "/api/jobs/{job_or_submission_id}"
    assert set(routes) == {
        ("post", "/api/jobs/"),
        ("get", "/api/jobs/"),
        ("get", job),
        ("delete", job),
        ("post", f"{job}/stop"),
        ("get", f"{job}/logs"),
        ("get", f"{job}/logs/tail"),
    }
    methods = {name for name in vars(sdk.JobSubmissionClient) if not name.startswith("_")}
    assert methods == {
        *("submit_job", "stop_job", "delete_job", "list_jobs"),
        *("get_job_info", "get_job_status", "get_job_logs", "tail_job_logs"),
    }
