"""Write prompts into folders by day and shop, as Hive names them: python configs/recipes/hive/make.py FOLDER"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

for day in ("2026-11-01", "2026-11-02"):
    for shop, name in (("north", "Zizzi"), ("south", "Cotto")):
        folder = Path(sys.argv[1], f"day={day}", f"shop={shop}")
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": [f"{day}-{shop}"], "prompt": [f"name[{name}], eatType[pub], area[riverside]"]})
        pq.write_table(table, folder / "part-0.parquet")
