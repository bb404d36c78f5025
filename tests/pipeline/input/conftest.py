from __future__ import annotations

from pathlib import Path

import pytest
from table_stores import DeltaTables, IcebergTables, Tables, local_delta, local_iceberg, local_tables


@pytest.fixture(params=["iceberg", "delta"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    """No table yet, of either format."""
    return local_tables(request.param, tmp_path)


@pytest.fixture
def iceberg(tmp_path: Path) -> IcebergTables:
    return local_iceberg(tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> DeltaTables:
    return local_delta(tmp_path)
