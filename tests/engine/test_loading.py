from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import LAYERS, tiny_model

from actors.engine.loading import inspect, load_decoder
from actors.engine.schedule import ScheduleSpec
from actors.engine.schedule_file import save_spec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkpoint_is_looked_at_and_loaded(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    assert (found.num_layers, found.context_length, found.spec) == (LAYERS, 64, None)
    assert found.schedule({}).depths == (LAYERS,)
    decoder = load_decoder(checkpoint, torch.bfloat16, torch.device("cpu"))
    assert (decoder.num_layers, decoder.kv_heads, decoder.head_dim, decoder.dtype) == (LAYERS, 2, 8, torch.bfloat16)


def test_the_stored_schedule_comes_along(checkpoint: Path) -> None:
    save_spec(ScheduleSpec(speedup=2, horizon=9), LAYERS, checkpoint)
    found = inspect(checkpoint)
    assert len(found.schedule({}).depths) == 9
    assert found.schedule({"speedup": 1.0}).depths == (LAYERS,)
    with pytest.raises(ValueError, match=r"^schedule: keep_order has 2 entries"):
        found.schedule({"keep_order": (0, 1)})


def test_bad_checkpoints_are_refused_in_one_line(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def refused(match: str, path: Path = checkpoint) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            inspect(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)

    refused("no such checkpoint folder", checkpoint / "none")
    refused("no config.json", tmp_path_factory.mktemp("empty"))
    edit(checkpoint / "config.json", model_type="bloom")
    refused("'bloom' is not supported; supported: llama, mistral, ")
    edit(checkpoint / "config.json", model_type="nobody-knows")
    refused("nobody-knows")
    edit(checkpoint / "config.json", model_type="llama", auto_map={"AutoConfig": "x.py"})
    refused("auto_map")
    text = json.loads((checkpoint / "config.json").read_text())
    del text["auto_map"]
    (checkpoint / "config.json").write_text(json.dumps(text))
    (checkpoint / "skipdecode.json").write_text('{"num_layers": 4}')
    refused("made for num_layers = 4, but the model has 6 layers")
    (checkpoint / "skipdecode.json").unlink()
    inspect(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    refused("no tokenizer")
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused("no safetensors weights .* pytorch_model.bin is a pickle")
    (checkpoint / "config.json").write_text("{")
    refused("not JSON")
