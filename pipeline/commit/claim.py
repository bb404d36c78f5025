"""Finds the job that an output folder belongs to, and claims the folder for a new job."""

from __future__ import annotations

import io
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.commit.lease import LeaseHeld
from pipeline.commit.records import read_all
from pipeline.commit.results import remove_results
from pipeline.commit.sink import PART, PARTS_AT_ONCE, SUCCESS, clear, clear_temporaries, part_files, part_name
from pipeline.plan import manifest as manifests
from pipeline.plan import plan_files
from pipeline.plan.manifest import Manifest
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder

LEDGER = "_ledger"  # folder with the records of incremental runs


def stored_job(folder: Folder, *, overwrite: bool) -> Manifest | None:
    """Return the plan (manifest) of the job in the folder; None if there is no job, or if `overwrite` is set.

    Raises UserError if the folder holds incremental runs, another program's file that the new job would replace, or
    Parquet files without a job (unless `overwrite` is set).
    """
    if folder.names(LEDGER):
        raise UserError(
            f"{folder.url}: holds incremental runs; set input.since to last_success, or choose another folder"
        )
    if overwrite:
        _check_replaceable(folder)
        return None
    stored = plan_files.load(folder)
    if stored is None and any(name.endswith(".parquet") for name in folder.names()):
        raise UserError(
            f"{folder.url}: holds Parquet files, but no job; choose another folder, or use --overwrite if a job wrote "
            "them"
        )
    _check_success(folder)
    return stored


def _check_success(folder: Folder) -> None:
    """Raise UserError if another program wrote the file `_SUCCESS`: then the file holds no fingerprint."""
    with suppress(FileNotFoundError):
        if b'"fingerprint"' not in folder.read(SUCCESS):
            raise _foreign(folder, SUCCESS)


def _check_replaceable(folder: Folder) -> None:
    """Raise UserError if --overwrite would remove a file that no job of this program wrote.

    An output file (part) counts as written by a job if it has the recorded size, or a fingerprint in its footer.
    """
    _check_success(folder)
    for name in folder.names():
        if name.endswith(".parquet") and not PART.fullmatch(name):
            raise _foreign(folder, name)
    sizes: dict[int, int] = {}
    try:
        stored = plan_files.load(folder)
        if stored is not None:
            records, _ = read_all(folder, stored.fingerprint)
            sizes = dict(zip(records["shard"].to_pylist(), records["bytes"].to_pylist(), strict=True))
    except UserError:  # another program wrote the plan, or it is damaged; --overwrite replaces a damaged one
        if not plan_files.is_own(folder.read(plan_files.JOB)):
            raise _foreign(folder, plan_files.JOB) from None
    parts = sorted(part_files(folder, ()).items())
    unknown = [part_name(shard) for shard, info in parts if sizes.get(shard) != info.size]
    for name, data in zip(unknown, in_parallel(folder.read, unknown, PARTS_AT_ONCE), strict=True):
        metadata: dict[bytes, bytes] = {}
        with suppress(OSError, pa.ArrowException):
            metadata = pq.read_schema(io.BytesIO(data)).metadata or {}
        if b"skipdecode.fingerprint" not in metadata:
            raise _foreign(folder, name)


def _foreign(folder: Folder, name: str) -> UserError:
    return UserError(
        f"{folder.url}/{name}: skipdecode did not write this file and does not replace it; move it away, or choose "
        "another folder"
    )


class OtherJob(UserError):
    """A folder holds another job. names: the keys in which the jobs differ."""

    def __init__(self, folder: Folder, names: str) -> None:
        remedy = "--overwrite replaces it, another output.path keeps it"
        super().__init__(f"{folder.url}: holds another job, which differs in {names}; {remedy}")
        self.names = names


def check_same_job(folder: Folder, stored: Manifest | None, planned: Manifest) -> None:
    """Raise OtherJob if `stored`, the folder's job, is not the planned job."""
    if stored is not None and stored.fingerprint != planned.fingerprint:
        raise OtherJob(folder, ", ".join(manifests.difference(stored.identity, planned.identity)))


def claim(folder: Folder, stored: Manifest | None, planned: Manifest, *, overwrite: bool) -> None:
    """Claim the folder for the planned job, and save the job's manifest. The caller must hold the lease.

    Raises:
        UserError: another run has begun another job in the folder since `stored` was read, or `overwrite` would replace
            files that no job wrote.
        LeaseHeld: another run has begun this job since `stored` was read.
    """
    clear_temporaries(folder)
    now = stored_job(folder, overwrite=overwrite)
    if overwrite:
        remove_results(folder)
        clear(folder)
    elif (now and now.fingerprint) != (stored and stored.fingerprint):
        if now and now.fingerprint == planned.fingerprint:
            raise LeaseHeld("it began this job while this run was being planned, and may have finished it")
        raise UserError(f"{folder.url}: another run has just begun another job here; choose another folder")
    if stored is None:
        plan_files.save(folder, planned)
