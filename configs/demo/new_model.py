"""Make a checkpoint with random weights and a tokenizer trained on prompts and responses, to start a training from.

python configs/demo/new_model.py work/demo-new ../shared/data/e2e/train.parquet --layers 24 --seed 1

tests/benchmarks/fetch_data.py fetches that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; a prompt becomes ``<s> prompt <sep>``, a response ends with ``</s>``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>", "<sep>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A <sep>", special_tokens=[("<s>", 1), ("<sep>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token="<sep>"
    )


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> None:
    """Write a Llama with random fp32 weights and its tokenizer. sizes: keys of its Hugging Face config."""
    torch.manual_seed(seed)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ids, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, data: Path, *, layers: int, vocab_size: int = 2048, seed: int = 1) -> None:
    """Write a model with random weights and a tokenizer for the texts in `data`."""
    columns = pq.read_table(data, columns=["prompt", "reference"]).to_pydict()
    texts = [*sorted(set(columns["prompt"])), *(" ".join(text.split()) for text in columns["reference"])]
    save_model(folder, train_tokenizer(texts, vocab_size), seed, num_hidden_layers=layers, **SIZES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path, help="Parquet with columns prompt and reference")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_model(options.folder, options.data, layers=options.layers, vocab_size=options.vocab_size, seed=options.seed)


if __name__ == "__main__":
    main()
