"""The worker that tokenizes imports neither torch nor the library's models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from actors.engine.model.loading import load_tokenizer, tokenizer_class_name

SCRIPT = """
import sys
import pyarrow as pa
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import PROMPT_IDS
from pipeline.prepare.stage import prepare
from pipeline.prepare.tokenizer import KnownTokenizer
from pipeline.input.rows import from_ipc, to_ipc
checkpoint = KnownTokenizer(sys.argv[1], sys.argv[2])
rows = to_ipc(pa.table({"prompt": ["name[Zizzi], area[riverside]"]}))
batch = {"shard": [0], "url": ["a"], "first_row": [0], "rows": [rows]}
[prepared] = prepare(batch, PromptSpec(checkpoint, 300, 64, column="prompt"))["rows"]
heavy = {"torch", "ray", "transformers.modeling_utils"}
print(len(from_ipc(prepared)[PROMPT_IDS][0]), sorted(heavy & set(sys.modules)))
"""


def test_a_worker_that_prepares_imports_no_torch(checkpoint: Path) -> None:
    name = tokenizer_class_name(load_tokenizer(checkpoint))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(checkpoint), name], capture_output=True, text=True)
    tokens, _, imported = done.stdout.partition(" ")
    assert imported == "[]\n" and int(tokens) > 3, done.stdout + done.stderr
