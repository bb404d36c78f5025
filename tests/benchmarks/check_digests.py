"""Seconds that a run needs to check the digests of an earlier run's parts on a local disk.

python tests/benchmarks/check_digests.py [PARTS] [MEGABYTES]
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.commit.sink import damaged_parts, part_files, part_name
from pipeline.storage.folder import LocalFolder


def main(parts: int = 1000, megabytes: int = 10) -> None:
    body = np.random.default_rng(0).bytes(megabytes * 10**6 - 8)
    with tempfile.TemporaryDirectory() as path:
        folder, records = LocalFolder(path, Path(path)), []
        for shard in range(parts):
            data = shard.to_bytes(8, "little") + body
            (Path(path) / part_name(shard)).write_bytes(data)
            records.append({"shard": shard, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tag": ""})
        for cached in (True, False):
            os.sync()
            for file in () if cached else map(os.open, Path(path).iterdir(), [os.O_RDONLY] * parts):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
            began = time.perf_counter()
            assert not damaged_parts(folder, pa.Table.from_pylist(records), part_files(folder, range(parts)))
            took, size = time.perf_counter() - began, parts * megabytes / 1000
            print(f"{parts:,} parts, {size:g} GB, cached: {cached}: {took:.1f} s; 100 GB: {took * 100 / size:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
