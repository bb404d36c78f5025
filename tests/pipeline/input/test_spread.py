"""The rows on which a new job is measured: its own, each once, spread over all that is cheap to read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.input.files import InputFile
from pipeline.input.shards import SCANNED_BYTES, SCANNED_ROWS, Shard, cut_shards, spread_rows
from pipeline.plan.manifest import limited

GROUPS = st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 2 * SCANNED_BYTES)), max_size=5)


def file(name: str, groups: list[tuple[int, int]]) -> InputFile:
    return InputFile(name, 1, "v", tuple(rows for rows, _ in groups), tuple(size for _, size in groups))


@given(st.lists(GROUPS, min_size=1, max_size=3), st.integers(1, 20), st.none() | st.integers(1, 9000))
def test_rows_are_the_jobs_own_and_near_the_beginning_of_a_row_group(
    groups: list[list[tuple[int, int]]], count: int, limit: int | None
) -> None:
    files = [file(f"f{number}", of_file) for number, of_file in enumerate(groups)]
    shards = limited(cut_shards(files, 500, 2**30), limit)
    rows = spread_rows(files, shards, count)
    places = [(row.url, row.first_row) for row in rows]
    assert places == sorted(set(places)) and all(row.rows == 1 for row in rows)
    cheap = set()
    for one in files:
        first = 0
        for length, size in zip(one.group_rows, one.group_bytes, strict=True):
            near = min(length, SCANNED_ROWS, max(1, length * SCANNED_BYTES // max(size, 1)))
            cheap |= {(one.url, row) for row in range(first, first + near)}
            first += length
    own = {(shard.url, row) for shard in shards for row in range(shard.first_row, shard.first_row + shard.rows)}
    assert set(places) <= cheap & own
    assert len(places) == min(count, len(cheap & own))


def test_they_are_evenly_spaced_over_files_and_row_groups() -> None:
    files = [file("a", [(10, 1), (10, 1)]), file("b", [(20, 1)])]
    shards = [Shard(0, "a", 0, 20), Shard(1, "b", 0, 20)]
    assert [(row.url, row.first_row) for row in spread_rows(files, shards, 4)] == [
        ("a", 0),
        ("a", 10),
        ("b", 0),
        ("b", 10),
    ]
