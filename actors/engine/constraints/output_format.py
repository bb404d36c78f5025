"""The requested format of answers: a JSON Schema, a regular expression or a grammar. This module needs no tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from actors.engine.constraints.json_schema import mapped, restrictions, unkept, without_one_of
from actors.engine.errors import UserError, flat

KINDS = ("json_schema", "regex", "grammar")
KEPT_CHARACTERS = 2**16  # formats with more characters are not cached, because rows may have many
DIGITS = {r"\d": "[0-9]", r"\D": "[^0-9]"}
# white space in JSON answers is that of Python's json.dumps; with free white space, a model may write it without end
ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class OutputFormat:
    """An answer format as hashable text, so that equal formats are compiled only once."""

    kind: str  # one of KINDS
    text: str  # a JSON Schema, a regular expression, or a grammar in llguidance's dialect of Lark

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> OutputFormat:
        """Convert a mapping with one key of KINDS. A schema may be JSON text. Raises UserError if a value is wrong."""
        given = [kind for kind in KINDS if value.get(kind) is not None]
        unknown = [name for name in value if name not in KINDS]
        if unknown or len(given) != 1:
            wrong = f"unknown key {unknown[0]}" if unknown else f"{len(given)} formats"
            raise UserError(f"{wrong}; give one of {', '.join(KINDS)}")
        kind, text = given[0], value[given[0]]
        if kind == "json_schema" and not isinstance(text, str):
            try:
                # not sorted, because an answer has its properties in the schema's order
                text = json.dumps(text, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"json_schema cannot be written as JSON: {flat(error)}") from None
        if not isinstance(text, str):
            raise UserError(f"{kind} is a {type(text).__name__}; it must be text")
        return cls(kind, text)

    def to_dict(self) -> dict[str, str]:
        """Return the format as a mapping that `of()` reads."""
        return {self.kind: self.text}

    def check(self) -> None:
        """Raise UserError (a one-line message) if the format is wrong, or if llguidance does not support it."""
        error = library_grammar(self)[1]
        if error is not None:
            raise UserError(f"{self.kind}: {error}")

    def json_rule(self) -> str:
        """Return the JSON Schema as the right-hand side of a grammar rule. Any `$ref` is resolved in this schema."""
        [grammar] = json.loads(library_grammar(self)[0])["grammars"]
        return f"%json {json.dumps(grammar['json_schema'])}"

    def lark(self) -> str:
        """Return the format in llguidance's dialect of Lark. Raises ValueError if a schema is not a JSON object.

        By default, if only one text can follow, llguidance forces the tokens that the tokenizer makes of this text. A
        tokenizer that puts a space before words would add a wrong space, so `no_forcing` turns this off.
        """
        lark = self.text
        if self.kind == "json_schema":
            lark = f"start: {self.json_rule()}"
        elif self.kind == "regex":
            lark = json.loads(library_grammar(self)[0])["grammars"][0]["lark_grammar"]
        return f'%llguidance {{"no_forcing": true}}\n{lark}'


def library_grammar(form: OutputFormat) -> tuple[str, str | None]:
    """Return llguidance's grammar for a format, and an error message if the format cannot be used (else None)."""
    return _kept_grammar(form) if len(form.text) <= KEPT_CHARACTERS else _grammar(form)


def _grammar(form: OutputFormat) -> tuple[str, str | None]:
    if not form.text.strip():
        return "", "is empty"
    if form.kind != "json_schema":
        return _validated(form.kind, form.text)
    try:
        schema = json.loads(form.text)
    except (ValueError, RecursionError) as error:
        return "", f"not JSON: {flat(error)}"
    if not isinstance(schema, dict):
        return "", f"is a {type(schema).__name__}; it must be an object"
    try:
        kept = mapped(schema, restrictions)
        if (wrong := unkept(kept)) is not None:
            return "", wrong
        grammar, wrong = _validated(form.kind, form.text if kept == schema else json.dumps(kept, ensure_ascii=False))
        if wrong is not None and "oneOf" in wrong:
            any_of = mapped(kept, lambda one, place: without_one_of(one, kept, place))
            grammar, wrong = _validated(form.kind, json.dumps(any_of, ensure_ascii=False))
    except (UserError, RecursionError) as error:
        return "", flat(error)
    except (TypeError, AttributeError, LookupError) as error:  # the value of a keyword has a wrong type
        return "", f"not a JSON Schema: {flat(error)}"
    if wrong is not None and wrong.startswith(("Unimplemented keys", "min/maxProperties")):
        wrong += ": no grammar can express this; leave it out"
    return grammar, wrong


_kept_grammar = lru_cache(1024)(_grammar)


@cache
def _byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single bytes. It is cached: making it takes longer than a small grammar."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _validated(kind: str, text: str) -> tuple[str, str | None]:
    from llguidance import LLMatcher

    try:
        if kind == "json_schema":
            # lenient = False makes every unsupported keyword an error, even if `x-guidance` in the schema is lenient
            grammar = LLMatcher.grammar_from_json_schema(text, ONE_LINE, {"lenient": False})
        elif kind == "regex":
            # the library's \d is a digit of any script, but in a schema's pattern 0 to 9
            ascii_only = re.sub(r"\\.", lambda found: DIGITS.get(found[0], found[0]), text, flags=re.DOTALL)
            grammar = LLMatcher.grammar_from_regex(ascii_only)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        return "", flat(error)
    # treat warnings as errors, because each reports a part of the grammar that would be ignored
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if not messages and not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_accepting():
            messages = ["no answer can begin; correct a $ref or rule that leads only to itself, or an empty choice"]
    return str(grammar), flat(messages[0]) if messages else None
