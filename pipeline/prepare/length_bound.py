"""A lower bound on a text's tokens without tokenizing it: a tokenizer takes some 200 bytes per character.

Let m(b) be the length in bytes of the longest token that contains byte b, and let b weigh 1/m(b). The n bytes of a
token weigh at most n * 1/n = 1, so a text has at least as many tokens as its bytes weigh. This holds where the bytes
of the tokens are the bytes of the text: byte-level BPE, or BPE with a token for every byte to fall back to, if no stage
before removes text. Other tokenizers (WordPiece, Unigram, unknown tokens) get no bound.

Two exceptions. NFC composes a character with the marks after it, at most 3 bytes into 1: non-ASCII bytes, and an ASCII
byte before them, weigh 1 / (3 * longest token). An added token that strips white space takes any amount of it: bytes of
white space weigh nothing then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

CHUNK_CHARACTERS = 2**20
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece
# bytes that white space may hold: the ASCII ones, lead bytes of the others, bytes that continue a character
_WHITE = [*range(9, 14), *range(28, 33), 0xC2, 0xE1, 0xE2, 0xE3, *range(0x80, 0xC0)]


class LengthBound:
    """A lower bound on the tokens of texts.

    Args:
        tokenizer: of transformers. Without a bound (`is_known` is False), each text has at least 0 tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.weights = np.zeros(256)  # float64[256], tokens per byte
        self.merged_weight = 0.0  # of a byte that NFC may merge
        self.has_nfc = False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = {} if backend is None else json.loads(backend.to_str())
        token_bytes = _token_bytes(parts)
        if token_bytes is None:
            return
        added = parts["added_tokens"]
        longest = np.zeros(256)
        for token in (*token_bytes, *(token["content"].encode() for token in added)):
            for byte in set(token):
                longest[byte] = max(longest[byte], len(token))
        for byte in SPACE.encode():  # a token's "▁" may be a space, or 3 bytes of the text
            longest[byte] = max(longest[byte], 3 * longest[ord(" ")])
        self.weights = 1 / np.maximum(longest, 1)
        self.merged_weight = float(self.weights.min() / 3)
        if any(token["lstrip"] or token["rstrip"] for token in added):
            self.weights[_WHITE] = self.merged_weight = 0.0
        self.has_nfc = any(part["type"] == "NFC" for part in _flat(parts["normalizer"], "normalizers"))

    @property
    def is_known(self) -> bool:
        return bool(self.weights.any())

    def fewest_tokens(self, text: str, enough: int) -> int:
        """Tokens that a text has at least, special tokens aside; counted no further than `enough`."""
        weight = 0.0
        for start in range(0, len(text) if self.is_known else 0, CHUNK_CHARACTERS):
            data = np.frombuffer(text[start : start + CHUNK_CHARACTERS].encode(errors="replace"), np.uint8)
            if self.has_nfc:
                kept = data < 128
                kept[:-1] &= kept[1:]
                kept[-1] = False
                weight += (len(data) - int(kept.sum())) * self.merged_weight
                data = data[kept]
            weight += float(np.bincount(data, minlength=256) @ self.weights)
            if weight > enough:
                break
        return math.ceil(weight * (1 - 1e-9))


def _token_bytes(parts: Mapping[str, Any]) -> list[bytes] | None:
    """The bytes of each token of a tokenizer.json; None unless all bytes of a text come out as tokens."""
    model = parts.get("model", {})
    if model.get("type") != "BPE":
        return None
    vocabulary = model["vocab"]
    stages = [*_flat(parts["normalizer"], "normalizers"), *_flat(parts["pre_tokenizer"], "pretokenizers")]
    if any(stage["type"] == "ByteLevel" for stage in stages):
        alphabet = _byte_alphabet()
        if not vocabulary.keys() >= alphabet.keys() or not all(_keeps_bytes(stage, ()) for stage in stages):
            return None
        return [
            bytes(alphabet[character] for character in token) if alphabet.keys() >= set(token) else token.encode()
            for token in vocabulary
        ]
    has_all_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not has_all_bytes or not all(_keeps_bytes(stage, ("Metaspace", "Replace")) for stage in stages):
        return None
    return [token.replace(SPACE, " ").encode() for token in vocabulary]


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (Radford et al. 2019, GPT-2's encoder)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _flat(part: Mapping[str, Any] | None, children: str) -> Iterator[Mapping[str, Any]]:
    """The normalizers or pre-tokenizers of a sequence, or the only one."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for child in part[children]:
            yield from _flat(child, children)
    else:
        yield part


def _keeps_bytes(stage: Mapping[str, Any], spaces: Sequence[str]) -> bool:
    """Whether a normalizer or pre-tokenizer removes nothing; NFC apart. spaces: types that may write spaces as "▁"."""
    kind = stage["type"]
    if kind in ("Digits", "Punctuation", "Split"):
        return stage.get("behavior") != "Removed"
    if kind == "Replace" and kind in spaces:
        return bool(stage["pattern"] == {"String": " "} and stage["content"] == SPACE)
    if kind == "Metaspace" and kind in spaces:
        return bool(stage["replacement"] == SPACE)
    return kind in ("ByteLevel", "NFC", "Prepend")
