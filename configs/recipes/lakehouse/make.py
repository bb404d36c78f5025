"""Write a small Delta table, and delete one of its rows: python configs/recipes/lakehouse/make.py FOLDER"""

import sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

names = ("Zizzi", "Cotto", "Aromi", "The Mill")
prompts = [f"name[{name}], eatType[pub], area[riverside]" for name in names]
write_deltalake(sys.argv[1], pa.table({"id": names, "prompt": prompts}), mode="overwrite")
DeltaTable(sys.argv[1]).delete("id = 'Cotto'")
