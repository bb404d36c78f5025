"""Which job an output folder belongs to, and how a new job claims it."""

from __future__ import annotations

from actors.engine.errors import UserError
from pipeline.commit.results import remove_results
from pipeline.commit.sink import PART, clear, clear_temporaries
from pipeline.commit.table import check_no_table
from pipeline.plan import manifest as manifests
from pipeline.plan import plan_files
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import Folder

LEDGER = "_ledger"  # folder with the records of incremental runs


def stored_job(folder: Folder, *, overwrite: bool) -> Manifest | None:
    """The job that the folder holds; None if there is none, or it is to be replaced.

    Raises UserError for a folder that holds incremental runs, Parquet files without a job, or data files of a table
    that would be replaced.
    """
    if folder.names(LEDGER):
        raise UserError(
            f"{folder.url}: holds incremental runs; set input.since: last_success, or choose another folder"
        )
    if overwrite:
        check_no_table(folder)
        return None
    stored = plan_files.load(folder)
    if stored is None and any(name.endswith(".parquet") for name in folder.first_names()):
        raise UserError(
            f"{folder.url}: holds Parquet files of no job known here; choose another folder, or --overwrite"
        )
    return stored


def check_same_job(folder: Folder, stored: Manifest | None, planned: Manifest) -> None:
    """UserError if the folder's stored job is not the planned one; it names the differing keys."""
    if stored is not None and stored.fingerprint != planned.fingerprint:
        names = ", ".join(manifests.difference(stored.identity, planned.identity))
        raise UserError(f"{folder.url}: holds another job, which differs in {names}; --overwrite replaces it")


def claim(folder: Folder, stored: Manifest | None, planned: Manifest, *, overwrite: bool) -> None:
    """Under the lease: make the folder the planned job's, with its manifest saved.

    Raises UserError if another run began a job here since `stored` was read, or overwriting would touch files of
    no job.
    """
    clear_temporaries(folder)
    if overwrite:
        foreign = [name for name in folder.names() if name.endswith(".parquet") and not PART.fullmatch(name)]
        if foreign:
            raise UserError(f"{folder.url}: {foreign[0]} is no part of a job; --overwrite leaves it, so move it away")
        remove_results(folder)
        clear(folder)
    else:
        now = stored_job(folder, overwrite=False)
        if (now and now.fingerprint) != (stored and stored.fingerprint):
            raise UserError(f"{folder.url}: another run began a job here meanwhile; look at it, then run again")
    if stored is None:
        plan_files.save(folder, planned)
