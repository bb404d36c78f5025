"""A checkpoint small enough to be made anew for every test session."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engine.schedules.file import save_spec
from actors.engine.schedules.schedule import PROMPT_POLICIES, ScheduleSpec
from actors.engine.schedules.trained import Trained
from pipeline.tune.data import Pair
from pipeline.tune.new_model import train_tokenizer

CONTEXT = 64
LAYERS = 4
SENTENCES = [
    Pair("name[Alimentum], area[city centre]", "Alimentum is a place in the city centre."),
    Pair("name[The Eagle], food[French]", "The Eagle serves French food near the river."),
    Pair("name[Zizzi], priceRange[cheap]", "Zizzi is a cheap pub that families like."),
]


def tiny_checkpoint(folder: Path) -> Path:
    """A random Llama of four layers with its tokenizer and a stored schedule of speed-up 2, in `folder`."""
    tokenizer = train_tokenizer(SENTENCES, vocab_size=300)
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec = ScheduleSpec(speedup=2, horizon=6)
    stored = spec.build(LAYERS)
    # random weights, said to be trained for every depth, so that jobs run at any speed
    trained = Trained((1,), PROMPT_POLICIES, stored.keep_order, stored.warmup)
    save_spec(spec, LAYERS, folder, trained)
    return folder
