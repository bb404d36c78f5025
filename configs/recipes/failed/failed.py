"""Print the ids that occur twice, and write the input's rows that have an error."""

import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

answers = pq.read_table("work/recipes/failed", columns=["id", "sample_index", "error"])
ids = answers.filter(pc.field("sample_index") == 0).group_by("id").aggregate([([], "count_all")])
print("occur twice:", ids.filter(pc.field("count_all") > 1)["id"].to_pylist())

failed = answers.filter(pc.field("error").is_valid())["id"]
rows = pj.read_json("configs/recipes/failed/notes.jsonl")
pq.write_table(rows.filter(pc.is_in(rows["id"], value_set=failed.combine_chunks())), "work/recipes/failed-rows.parquet")
print("with an error:", failed.to_pylist())
