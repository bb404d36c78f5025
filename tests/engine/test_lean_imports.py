"""transformers' models imported without what a CPU does not run them with: same answers, and nothing is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, tiny_model
from transformers import AutoModelForCausalLM

from actors.engine.checkpoint.loading import load_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo/checkpoint"
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"),
    *("accelerate", "peft", "scipy", "sklearn", "PIL", "pandas", "matplotlib"),
)
ANSWERS = """
import json, sys
from actors.engine.cpu.lean_imports import import_models
if sys.argv[2] == "lean":
    import_models()
    import_models()
from actors.generator import Generator
from actors.engine.forcing.divergence import Model, teacher_forced
sampling = {"max_new_tokens": 12, "temperature": 1.0}
texts = [f"name[Zizzi], area[{word}]" for word in ("riverside", "city centre", "river")]
found = {}
for dtype in ("bfloat16", "float32"):
    one = Generator(sys.argv[1], sampling=sampling, dtype=dtype, device="cpu", threads=1, unadapted=True)
    answers = one({"id": [1, 2, 3], "prompt": texts})
    ids = one.tokenizer(texts)["input_ids"]
    full = one.at(one.schedule_at(1.0))
    models = Model(full.engine.decoder, full.schedule), [Model(one.engine.decoder, one.schedule)]
    [scores] = teacher_forced(*models, [(prompt, prompt[:6]) for prompt in ids], first=1)
    logprobs = [float(one) for one in answers["cumulative_logprob"]]
    found[dtype] = [list(answers["generated_text"]), logprobs, scores.kl.tolist()]
heavy = [name for name in sys.argv[3].split(",") if name in sys.modules]
print(json.dumps([found, heavy]))
"""
AFTERWARDS = """
from actors.engine.cpu.lean_imports import import_models
import_models()
import torch
from transformers import masking_utils
assert type(masking_utils.TransformGetItemToIndex()).__module__ == "torch._dynamo._trace_wrapped_higher_order_op"
import torch._dynamo.config
assert torch._dynamo.list_backends and torch.compiler.disable(len)([1]) == 1
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist() == [1, 1]
assert torch.distributed.is_available()
import accelerate, scipy.optimize
"""


ASKED_BEFORE = """
from transformers.utils import import_utils
assert import_utils.is_accelerate_available() and import_utils.is_peft_available() and import_utils.is_scipy_available()
from actors.engine.cpu.lean_imports import import_models
import_models()
import sys
assert "transformers.modeling_utils" in sys.modules and "accelerate" not in sys.modules
"""


def outcome(script: str, *arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def test_answers_are_the_same_and_the_heavy_libraries_are_not_imported() -> None:
    found, heavy = outcome(ANSWERS, str(DEMO), "lean", ",".join(HEAVY))
    assert heavy == []
    wanted, known = outcome(ANSWERS, str(DEMO), "whole", ",".join(HEAVY))
    assert found == wanted
    assert {"torch._dynamo", "torch.distributed.tensor", "accelerate"} <= set(known), (
        "lean imports have no use any more"
    )


def test_what_was_left_out_can_be_imported_afterwards() -> None:
    outcome(AFTERWARDS)


def test_a_process_that_has_asked_for_the_libraries_before_imports_the_models() -> None:
    """A worker of Ray's that has tokenized, say."""
    outcome(ASKED_BEFORE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_is_the_one_that_the_library_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters and buffers, those too that no file holds."""
    tiny_model(name).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype, torch.device("cpu"), "eager")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    for kind in ("named_parameters", "named_buffers"):
        found, right = (dict(getattr(model, kind)()) for model in (loaded, wanted))
        assert list(found) == list(right)
        for key, tensor in right.items():
            assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    head, table = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is table.weight) == (
        wanted.get_output_embeddings().weight is wanted.get_input_embeddings().weight
    )


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    before = torch.get_rng_state()
    load_model(tmp_path, torch.float32, torch.device("cpu"), "eager")
    assert torch.equal(torch.get_rng_state(), before)
