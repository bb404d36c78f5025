"""Loads a checkpoint's tokenizer, so that `tokenizer.json` alone decides how text is cut into tokens."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError, flat
from actors.engine.model.file_digests import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PLAIN_TYPE = "deepseek_v3"  # a model type whose folders AutoTokenizer reads by tokenizer.json alone
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# texts for `difference`: classes of transformers cut digits, spaces, line ends and scripts in different ways
TEXTS = ("x  5 12345\n\n| 7 |  1987 |\r\n\tend ", "I'LL can't", "Grüße, 日本語 العربية हिन्दी", "👩‍👩‍👧 ok👍🏽")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer. Raises UserError if it is damaged.

    If the folder has a tokenizer.json, token ids are those of the library tokenizers with this file. The other files
    give named special tokens and the chat template only. AutoTokenizer is not used then: it would rebuild the rule that
    cuts text from the class in tokenizer_config.json or from the model type, and that class may not fit the file.
    """
    import transformers

    has_file = (Path(path) / TOKENIZER).is_file()
    loader: Any = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        if has_file and tokenizer.eos_token is None:
            _name_tokens(tokenizer, Path(path))
        tokenizer("a")  # some damaged files raise an error only here
    except Exception as error:  # transformers raises errors of any class for a damaged file
        raise UserError(f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {flat(error)}") from None
    return tokenizer


def _name_tokens(tokenizer: Any, folder: Path) -> None:
    """Set the special tokens that no file names to the defaults of the declared class, if the vocabulary has them."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    values, model = (
        read_object(folder / name) if (folder / name).is_file() else {} for name in (TOKENIZER_CONFIG, "config.json")
    )
    name = values.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model.get("model_type", ""))
    declared: Any = None if name is None else tokenizer_class_from_name(name.removesuffix("Fast"))
    if declared is None:
        return
    parameters = inspect.signature(declared.__init__).parameters
    for key in NAMED:
        default = parameters[key].default if key in parameters else None
        if getattr(tokenizer, key) is None and isinstance(default, str) and default in tokenizer.get_vocab():
            setattr(tokenizer, key, default)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a folder of its own, from which AutoTokenizer and vLLM read it without a class's own rule.

    vLLM needs a config.json with a model type. A type may decide the rule; `PLAIN_TYPE` decides none.
    """
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": PLAIN_TYPE, "architectures": ["none"]}))


def difference(folder: Path) -> str | None:
    """Describe how the AutoTokenizer of other programs differs from tokenizer.json; return None if they agree.

    Token ids of a few texts are compared. A folder without a tokenizer.json has no difference.
    """
    from transformers import AutoTokenizer

    if not (folder / TOKENIZER).is_file():
        return None
    right = load_tokenizer(folder)
    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        texts = [text for text in TEXTS if theirs(text)["input_ids"] != right(text)["input_ids"]]
    except Exception as error:  # transformers raises errors of any class
        return f"transformers' class fails: {type(error).__name__}: {flat(error)}"
    return f"transformers' {type(theirs).__name__} cuts {texts[0]!r} otherwise than {TOKENIZER}" if texts else None
