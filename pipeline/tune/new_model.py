"""A new model for `tune`: a tokenizer trained on the data, and the config of random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from actors.engine.checkpoint.families import family_of
from actors.engine.errors import UserError, flat, nearest
from pipeline.tune.data import Pair


def train_tokenizer(pairs: Sequence[Pair], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE; a prompt becomes ``<s> prompt <sep>``, a response ends with ``</s>``.

    Raises UserError if the pairs hold token ids instead of text.
    """
    special = ["<pad>", "<s>", "</s>", "<sep>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    prompts = {pair.prompt for pair in pairs if isinstance(pair.prompt, str)}
    responses = [pair.response for pair in pairs if isinstance(pair.response, str)]
    if not prompts or not responses:
        raise UserError("data: a new model's tokenizer is trained on text, and these are token ids: give model.path")
    bpe.train_from_iterator([*sorted(prompts), *responses], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A <sep>", special_tokens=[("<s>", 1), ("<sep>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token="<sep>"
    )


def new_config(sizes: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Build the Hugging Face config of a new model.

    Args:
        sizes: `model_type` (required) and other keys of its Hugging Face config.
        tokenizer: sets vocab_size and the ids of the pad, begin and end tokens.

    Raises:
        UserError: `sizes` has one of these four keys, a key or type that transformers does not have, a value that it
            refuses, or a family that the engine does not support.
    """
    kind = sizes["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UserError(f"model.new.model_type: transformers has no {kind!r}")
    derived = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"}
    known = set(CONFIG_MAPPING[kind]().to_dict()) - derived
    for key in derived & set(sizes):
        raise UserError(f"model.new.{key} follows from the tokenizer that is trained; see model.vocab_size")
    for key in sizes:
        if key not in known:
            raise UserError("; ".join(filter(None, (f"model.new: unknown key {key}", nearest(key, known)))))
    try:
        config = AutoConfig.for_model(
            **sizes,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    except (StrictDataclassError, TypeError) as error:
        raise UserError(f"model.new: {flat(error)}") from None
    family_of(config)
    return config
