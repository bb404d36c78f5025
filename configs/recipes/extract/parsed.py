"""Write the answers of the job with a column for each property of its schema."""

import io

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

# rows with an error have no complete answer; every other answer is JSON in one line
answers = pq.read_table("work/recipes/extract", columns=["id", "generated_text"], filters=pc.field("error").is_null())
columns = pj.read_json(io.BytesIO("\n".join(answers["generated_text"].to_pylist()).encode()))
pq.write_table(columns.add_column(0, "id", pa.array(answers["id"].to_pylist())), "work/recipes/extract.parquet")
print(columns.schema)
