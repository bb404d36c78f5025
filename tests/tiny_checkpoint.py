"""A checkpoint small enough to be made anew for every test session."""

from __future__ import annotations

from pathlib import Path

from new_model import save_model, train_tokenizer

from actors.engine.schedule.file import Trained, save_spec
from actors.engine.schedule.schedule import PROMPT_POLICIES, ScheduleSpec

CONTEXT = 64
LAYERS = 4
SENTENCES = {  # prompts and responses
    "name[Alimentum], area[city centre]": "Alimentum is a place in the city centre.",
    "name[The Eagle], food[French]": "The Eagle serves French food near the river.",
    "name[Zizzi], priceRange[cheap]": "Zizzi is a cheap pub that families like.",
}


def tiny_checkpoint(folder: Path) -> Path:
    """A random Llama of four layers with its tokenizer and a stored schedule of speed-up 2, in `folder`."""
    save_model(
        folder,
        train_tokenizer([*SENTENCES, *SENTENCES.values()], vocab_size=300),
        seed=11,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    spec = ScheduleSpec(speedup=2, horizon=6)
    stored = spec.build(LAYERS)
    # random weights, said to be trained for every depth, so that jobs run at any speed
    trained = Trained((1,), PROMPT_POLICIES, stored.keep_order, stored.warmup)
    save_spec(spec, LAYERS, folder, trained)
    return folder
