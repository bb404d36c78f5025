"""Answers in a given form, against a full check of the vocabulary at every token, one row at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from llguidance import LLMatcher, LLTokenizer
from oracle import oracle_logits_each
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.answers import Prompt
from actors.engine.constraints.constraint import words_of
from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.json_schema import wrong_key
from actors.engine.constraints.output_format import KEPT_CHARACTERS, OutputFormat, library_grammar
from actors.engine.sampling.sampler import sample
from actors.engine.sampling.state import RowSampling
from actors.engine.types import Request, SamplingParams
from actors.generator import Generator
from actors.requests import RequestBuilder
from actors.settings import EngineSettings

REGEXES = [r"[a-z]{3,9}( [a-z]+){0,2}\.?", r"(yes|no|perhaps), [0-9]{1,3}%", r" ?The [A-Z][a-z]*", r"x{0,2}"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["cheap", "river"]}, "b": {"type": "integer", "minimum": -20, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: /[a-c]/ | list\n'
STRING: dict[str, Any] = {"enum": ["x", "y"]}
OVERLAP = {"type": "object", "properties": {"ab": STRING}, "patternProperties": {"^a": {"type": "integer"}}}
FREE = {"type": "object", "patternProperties": {"^x_[ab]$": {"type": "boolean"}}, "additionalProperties": False}
COUNTED: list[dict[str, Any]] = [  # the grammar counts a key that is written twice as two
    {**FREE, "minProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"type": "object", "minProperties": 2},
    {"$defs": {"m": FREE}, "$ref": "#/$defs/m", "minProperties": 2, "maxProperties": 2},
    {"type": "object", "minProperties": 2, "anyOf": [FREE, {"type": "null"}]},
    {"allOf": [{"type": "object", "minProperties": 2}, FREE]},
    {"properties": {"a": {**FREE, "minProperties": 2}}, "required": ["a"]},
]
CAT, DOG = (
    {
        "type": "object",
        "properties": {"kind": {"const": kind, "default": kind}, name: {"enum": [1, 2]}},
        "required": [name],
        "additionalProperties": False,
    }
    for kind, name in (("cat", "lives"), ("dog", "bones"))
)
SAMPLINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 14},
    {"max_new_tokens": 14, "temperature": 1.0},
    {"max_new_tokens": 5, "temperature": 1.4, "top_p": 0.8, "repetition_penalty": 1.2},
    {"max_new_tokens": 14, "temperature": 0.7, "top_k": 6, "n": 2},
]
SPEEDS = [1.0, 2.0]
FORMS = [OutputFormat("regex", text) for text in REGEXES]
FORMS += [OutputFormat("json_schema", json.dumps(SCHEMA)), OutputFormat("grammar", GRAMMAR)]
END, VOCAB = 2, 300


def make(checkpoint: Path, **changes: Any) -> Generator:
    return Generator(
        EngineSettings(str(checkpoint), **{"dtype": "float32", "device": "cpu", "max_batch": 3, **changes})
    )


def prompts(generator: Generator, **changes: Any) -> list[Prompt]:
    texts = ["a", "name[Zizzi]", "The Eagle serves", "cheap food", "b c d"]
    return [Prompt(generator.tokenizer(text)["input_ids"], "f", row, **changes) for row, text in enumerate(texts)]


def accepts(form: OutputFormat, text: str) -> bool:
    """Whether a grammar takes `text` as a whole answer, byte by byte."""
    matcher = LLMatcher(LLTokenizer("byte"), library_grammar(form)[0], log_level=0)
    return (
        matcher.validate_tokens(list(text.encode())) == len(text.encode())
        and matcher.consume_tokens(list(text.encode()))
        and matcher.is_accepting()
    )


class Rematch:
    """Which tokens may follow, by matching the whole text again with each token of the vocabulary."""

    def __init__(self, generator: Generator, form: OutputFormat) -> None:
        self.form = form
        self.texts = [generator.tokenizer.decode([token], skip_special_tokens=True) for token in range(VOCAB)]
        self.start = GrammarCompiler(generator.tokenizer, VOCAB, [END]).compile(form).begin()._matcher
        self.known: dict[tuple[int, ...], list[int]] = {}

    def _by_regex(self, tokens: list[int], token: int) -> bool:
        """Independent of llguidance: a partial match of Python's `regex`. Bytes that are no character match nothing."""
        before, text = "".join(self.texts[one] for one in tokens), self.texts[token]
        if token == END:
            return regex.fullmatch(self.form.text, before) is not None
        return text != "" and regex.fullmatch(self.form.text, before + text, partial=True) is not None

    def _by_replay(self, tokens: list[int], token: int) -> bool:
        """A matcher at its start, whose state does not change, reads all tokens."""
        return bool(self.start.validate_tokens([*tokens, token]) == len(tokens) + 1)

    def allowed(self, tokens: list[int]) -> list[int]:
        if tuple(tokens) not in self.known:
            may_follow = self._by_regex if self.form.kind == "regex" else self._by_replay
            self.known[tuple(tokens)] = [token for token in range(VOCAB) if may_follow(tokens, token)]
        return self.known[tuple(tokens)]


def oracle(generator: Generator, rematch: Rematch, prompt: Prompt, request: Request, answer: list[int]) -> list[int]:
    """The row's tokens up to the first that differs from `answer`; a row that only the end can follow ends without it.

    The logits after all tokens of the answer come from one pass without a cache: a token sees none that follow it.
    """
    params, tokens = request.sampling, list[int]()
    each = oracle_logits_each(generator.engine.decoder, generator.schedule, prompt.ids, answer)
    while len(tokens) < params.max_new_tokens and tokens == answer[: len(tokens)]:
        allowed = rematch.allowed(tokens)
        if allowed == [END] and tokens:
            break
        state = RowSampling.begin(params, request.key, prompt.ids)
        for token in tokens:
            state.add(token)
        state.barred = [token for token in range(VOCAB) if token not in allowed]
        tokens.append(sample(each[len(tokens)][None], [state]).tokens[0])
        if tokens[-1] == END:
            break
    return tokens


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> list[Generator]:
    return [make(checkpoint, schedule={"speedup": speed}) for speed in SPEEDS]


@pytest.fixture(scope="module")
def checks(pair: list[Generator]) -> dict[OutputFormat, Rematch]:
    return {form: Rematch(pair[0], form) for form in FORMS}


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("speed", range(len(SPEEDS)))
def test_answers_are_those_of_the_full_check(
    pair: list[Generator], checks: dict[OutputFormat, Rematch], scheduler: str, speed: int
) -> None:
    generator = pair[speed]
    generator.calls.scheduler = scheduler
    rows = prompts(generator)
    rows = [
        Prompt(rows[number % 5].ids, "f", number, sampling=sampling, output_format=form)
        for number, (form, sampling) in enumerate((form, sampling) for form in FORMS for sampling in SAMPLINGS)
    ]
    rows.insert(3, Prompt(rows[0].ids, "f", 99))  # a free row in the same batch
    answers = generator.answer(rows)
    for answer in answers:
        form = rows[answer.row].output_format
        if form is None:
            assert answer.error is None
            continue
        request = generator.builder.requests(rows[answer.row])[answer.sample_index]
        assert answer.token_ids is not None
        want = oracle(generator, checks[form], rows[answer.row], request, answer.token_ids)
        assert answer.token_ids == want, (form, request.sampling)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_a_whole_answer_is_valid_and_one_that_is_cut_off_an_error_with_its_text(pair: list[Generator]) -> None:
    generator = pair[1]
    form = OutputFormat("json_schema", json.dumps(SCHEMA))
    whole, cut = 0, 0
    for limit in (4, 40):
        sampling = {"max_new_tokens": limit, "temperature": 1.2, "n": 4}
        for answer in generator.answer(prompts(generator, output_format=form, sampling=sampling)):
            assert answer.generated_text is not None
            if answer.error is None:
                jsonschema.validate(json.loads(answer.generated_text), SCHEMA)
                assert answer.finish_reason == "stop"
                whole += 1
            else:
                message = f"json_schema: the answer was cut off after {limit} tokens: raise max_new_tokens"
                assert (answer.finish_reason, answer.error) == ("length", message)
                assert answer.generated_text.startswith("{") and answer.generated_tokens == limit
                cut += 1
    assert whole and cut


def test_a_form_of_all_rows_and_white_space_that_it_asks_for(checkpoint: Path) -> None:
    generator = make(checkpoint, output_format={"regex": " [a-c]{2} "}, cumulative_logprob=False)
    done = generator({"prompt": ["a", "b c", "cheap"]})
    assert all(regex.fullmatch(" [a-c]{2} ", text) for text in done["generated_text"])
    assert done["error"].tolist() == [None] * 3
    assert "choice_probability" not in done


def test_large_formats_and_label_lists_do_not_pile_up(pair: list[Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    builder = pair[0].builder
    monkeypatch.setattr("actors.requests.KEPT_CHARACTERS", 100)
    for text in ("a", "b", "c"):
        builder._constraint((text, text * 60))
    assert list(builder._constraints) == [("c", "c" * 60)]
    long = OutputFormat("regex", "a" * (KEPT_CHARACTERS + 1))
    long.check()
    assert library_grammar(long) is not library_grammar(long)


def test_a_matcher_that_gives_up_is_an_error(pair: list[Generator]) -> None:
    progress = GrammarCompiler(pair[0].tokenizer, VOCAB, [END]).compile(OutputFormat("regex", "[b-d]")).begin()
    assert progress.error is None
    assert not progress.advance(pair[0].tokenizer("x", add_special_tokens=False)["input_ids"][-1])
    assert progress.error is not None and "\n" not in progress.error and "<state>" not in progress.error
    assert not progress.is_complete() and not progress.advance(END)


def test_a_tokenizer_of_words_and_bytes() -> None:
    """As Llama's: a space is part of a word, and a character without a token is spelled by its bytes."""
    words = ["\u2581", "\u2581cheap", "cheap", "c", "\u2581c", "a", "1", "\u25811", "x"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: token for token, name in enumerate(names)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    spaces = decoders.Replace("\u2581", " ")
    model.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    how: Any = {"seed": 0, "strip": True, "vocab_size": len(names), "stop_ids": [END]}
    builder = RequestBuilder(tokenizer, SamplingParams(), None, None, **how)
    shown = ["</s>", "<0xC3>", "\u2581", "\u2581cheap", "cheap"]  # as log-probabilities show them
    assert [builder.token_text(vocabulary[one]) for one in shown] == ["</s>", "\ufffd", " ", " cheap", "cheap"]
    for vocab_size in (len(names), len(names) + 70):
        grammar = GrammarCompiler(tokenizer, vocab_size, [END]).compile(OutputFormat("regex", " ?(cheap|\u00e9a) 1"))
        progress, spelled = grammar.begin(), ["\u2581", "<0xC3>", "<0xA9>", "a", "\u25811"]
        wanted = [
            {"<0x20>", "<0x63>", "<0xC3>", "\u2581", "\u2581cheap", "cheap", "c", "\u2581c"},
            {"<0x63>", "<0xC3>", "cheap", "c"},
            {"<0xA9>"},
            {"<0x61>", "a"},
            {"<0x20>", "\u2581", "\u25811"},
        ]
        for token, allowed in zip(spelled, wanted, strict=True):
            bits = np.zeros(words_of(vocab_size), dtype=np.int32)
            progress.write(bits)
            found = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]
            assert {names[one] for one in found.tolist()} == allowed
            ended = progress.advance(vocabulary[token])
        assert ended
        assert grammar.text([vocabulary[token] for token in spelled], None) == " \u00e9a 1"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "0 formats; give one of json_schema, regex, grammar"),
        ({"regex": "a", "grammar": "b"}, "2 formats"),
        ({"json": {}}, "unknown key json;"),
        ({"regex": 7}, "regex is a int; it must be text"),
        ({"regex": " "}, "regex: is empty"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no answer can begin; "),
        ({"json_schema": {"anyOf": [{"$ref": "#"}]}}, "json_schema: no answer can begin; "),
        ({"regex": "[^\\x00-\\U0010ffff]"}, "regex: no answer can begin; "),
        ({"grammar": 'start: start "a"'}, "grammar: no answer can begin; "),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"grammar": 'start: "a" b'}, 'grammar: .*unknown name: "b"'),
        ({"json_schema": "[1]"}, "json_schema: is a list; it must be an object"),
        ({"json_schema": "{"}, "json_schema: not JSON"),
        ({"json_schema": {"not": {}}}, r"json_schema: Unimplemented keys: \[.not.\]"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json_schema": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired.*; leave it out$"),
        (
            {"json_schema": {"type": "object", "properties": {"a": {}}, "minProperties": 1}},
            "minP.*.*|min/maxP.*; leave it out$",
        ),
        ({"json_schema": OVERLAP}, r"patternProperties '\^a' at # matches the property 'ab', whose schema differs: w"),
        (
            {"json_schema": {"$defs": {"x": OVERLAP}, "$ref": "#/$defs/x"}},
            r"patternProperties '\^a' at #/\$defs/x match",
        ),
        (
            {"json_schema": {"allOf": [{"properties": {"ab": {}}}, {"patternProperties": {"b$": {"type": "null"}}}]}},
            "b..",
        ),
        ({"json_schema": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf at #: its branches do not excl"),
        (
            {"json_schema": {"properties": {"p": {"oneOf": [CAT, {"$ref": "#/properties/p/oneOf/0"}]}}}},
            "#/properties/p: ",
        ),
        ({"json_schema": {}, "check": "after"}, "unknown key check; give one of json_schema, regex, grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema: .*nothing"),
        ({"json_schema": {"anyOf": 5}}, "json_schema: not a JSON Schema: "),
        ({"json_schema": {"anyOf": None}}, "json_schema: not a JSON Schema: "),
        ({"json_schema": {"properties": ["a"]}}, "json_schema: not a JSON Schema: "),
        (
            {"json_schema": {"properties": {"a": {}}, "patternProperties": {"(?=a)b": {"type": "null"}}}},
            r"'\(\?=a\)b' cannot be checked \(look-around",
        ),
        *(
            (
                {"json_schema": schema},
                "json_schema: minProperties at #.*: the grammar cannot tell whether 2 keys differ",
            )
            for schema in COUNTED
        ),
        ({"grammar": "start: <|end|>"}, "grammar: .*special_token"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_by_name(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        OutputFormat.of(value).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "text", "follows"),
    [
        (r"\d", "\u0664", False),
        (r"\d", "4", True),
        (r"[\d.]", "\u0664", False),
        (r"[\d.]", ".", True),
        (r"[^\d]", "\u0664", True),
        (r"\D", "\u0664", True),
        (r"\D", "4", False),
        (r"\\d", "\\d", True),
        (r"\\d", "4", False),
        (r"\[\d\]", "[4]", True),
    ],
)
def test_a_digit_of_a_regex_is_0_to_9_as_in_a_schemas_pattern(pattern: str, text: str, follows: bool) -> None:
    """It was any script's, so a date held digits that few readers take."""
    schema = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    assert accepts(OutputFormat("regex", pattern), text) is follows
    assert accepts(OutputFormat("json_schema", schema), json.dumps(text, ensure_ascii=False)) is follows


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG]},
        {
            "$defs": {"Cat": CAT, "Dog": DOG},
            "type": "object",
            "properties": {
                "pet": {
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                    "discriminator": {"propertyName": "kind"},
                }
            },
            "required": ["pet"],
            "additionalProperties": False,
        },
        {"$defs": {"n": {"type": "null"}}, "oneOf": [{"$ref": "#/$defs/n"}, {"type": "boolean"}, CAT]},
        {"oneOf": [CAT, DOG], "anyOf": [{"required": ["lives"]}, {"required": ["bones"]}]},
    ],
    ids=["inline", "pydantic", "types", "beside-any-of"],
)
def test_branches_that_exclude_each_other_run_as_any_of(checkpoint: Path, schema: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 1.5, "n": 4}
    generator = make(checkpoint, output_format={"json_schema": schema}, sampling=sampling)
    answers = generator.answer(prompts(generator))
    assert all(answer.error is None for answer in answers)
    for answer in answers:
        jsonschema.validate(json.loads(str(answer.generated_text)), schema)
    assert len({answer.generated_text for answer in answers}) > 1


LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
OBJECT = {"type": "object", "properties": {"a": STRING, "b": STRING}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "neutral"),
    [
        *(
            (LIST, {key: value})
            for key, value in (("uniqueItems", False), ("unevaluatedItems", True), ("maxContains", 1))
        ),
        (LIST, {"contains": {"const": 7}, "minContains": 0}),
        *((OBJECT, {key: {}}) for key in ("dependentRequired", "dependentSchemas", "dependencies", "propertyNames")),
        (OBJECT, {"dependentRequired": {"b": []}, "dependentSchemas": {"b": True}, "unevaluatedProperties": {}}),
        (OBJECT, {"minProperties": 1, "maxProperties": 2}),
        (STRING, {"not": False, "format": "password"}),
        *((STRING, {"format": name}) for name in ("path", "byte", "json-string", "unknown", "uri-reference")),
        *((STRING, {"if": {"const": "x"}, **then}) for then in ({}, {"then": True}, {"then": {}, "else": True})),
        (STRING, {"then": False, "else": {"const": "x"}}),
        (STRING, {"if": False, "then": False}),
        (STRING, {"if": {}, "else": False}),
    ],
)
@pytest.mark.parametrize(
    "around", [lambda one: one, lambda one: {"$defs": {"d": one}, "anyOf": [{"$ref": "#/$defs/d"}]}]
)
def test_a_keyword_that_restricts_nothing_is_ignored(
    schema: dict[str, Any], neutral: dict[str, Any], around: Callable[[Any], Any]
) -> None:
    """Generators write them; they were refused by their name."""
    form, plain = (OutputFormat.of({"json_schema": around(one)}) for one in ({**schema, **neutral}, schema))
    form.check()
    assert form.lark() == plain.lark()


def test_a_propertys_name_is_no_keyword_and_openapis_schemas_are_read() -> None:
    held = {"type": "object", "properties": {"not": {"type": "null"}, "format": STRING}, "required": ["not", "format"]}
    text = '{"not": null, "format": "x"}'
    assert accepts(OutputFormat.of({"json_schema": held}), text)
    held["properties"]["format"] = {**STRING, "format": "byte"}  # type: ignore[index]
    inside = {"components": {"schemas": {"X": held}}, "$ref": "#/components/schemas/X"}
    assert accepts(OutputFormat.of({"json_schema": inside}), text)


def test_an_answer_that_has_a_key_twice_is_an_error_with_its_text(pair: list[Generator]) -> None:
    """It counted as good: one property for every reader, two for the grammar."""
    schema = {"type": "object", "patternProperties": {"^[xy]$": {"type": "null"}}, "additionalProperties": False}
    schema |= {"minProperties": 1, "maxProperties": 3}
    form = OutputFormat("json_schema", json.dumps({"type": "array", "items": schema, "minItems": 1, "maxItems": 1}))
    sampling = {"max_new_tokens": 60, "temperature": 1.5, "n": 6}
    answers = pair[0].answer(prompts(pair[0], output_format=form, sampling=sampling))
    twice = 0
    for answer in answers:
        text = str(answer.generated_text)
        if any(text.count(key) > 1 for key in ('"x"', '"y"')):
            assert answer.finish_reason == "error" and str(answer.error).startswith(
                "json_schema: an object has the key"
            )
            twice += 1
        else:
            assert answer.error is None
            [one] = json.loads(text)
            jsonschema.validate(one, schema)
    assert 0 < twice < len(answers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": true, "b": [{"a": 1}, {"a": {"a": 2}}]}', None),
        ('{"a": [{"x": 1, "y": 2, "x": 3}]}', "the key 'x' twice"),
        ('{"a": 1, "b": {}, "a": 1}', "the key 'a' twice"),
        (f'[{"9" * 5000}, "\\u000a\\u001F\\\\u0061\\n"]', None),
        ('{"\\u0061": 5}', "escapes"),
        ('{"\\\\\\u00e9": 5}', "escapes"),
        ("[" * 100_000 + "]" * 100_000, "RecursionError|recursion"),
    ],
)
def test_keys_that_a_reader_would_read_otherwise_are_found(text: str, message: str | None) -> None:
    """A grammar compares keys as they are written."""
    found = wrong_key(text)
    assert found is None if message is None else re.search(message, str(found))


def test_the_grammar_writes_escapes_only_in_keys_that_no_property_names() -> None:
    held = {"type": "object", "properties": {"a": STRING}, "additionalProperties": {"type": "integer"}}
    form = OutputFormat("json_schema", json.dumps(held))
    assert accepts(form, '{"\\u0061": 5}') and not accepts(form, '{"a": 5}')
    for schema in ({}, {"type": "string"}, {"type": "string", "pattern": "^.$"}, {"const": "\u00e9"}):
        written = OutputFormat("json_schema", json.dumps(schema))
        assert not accepts(written, '"\\u0041"') and not accepts(written, '"\\u00e9"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": STRING, "uniqueItems": True},
        {"type": "array", "items": STRING, "contains": {"const": "x"}, "maxContains": 1},
        {"enum": ["x", "y", "z"], "not": {"const": "x"}},
        {"enum": ["x", "y", 1], "if": {"type": "string"}, "then": {"const": "x"}, "else": False},
        {"type": "object", "properties": {"a": STRING, "b": STRING}, "dependentRequired": {"a": ["b"]}},
    ],
    ids=["uniqueItems", "contains", "not", "if", "dependentRequired"],
)
def test_a_keyword_that_no_grammar_holds_is_refused_by_name(schema: dict[str, Any], request: Any) -> None:
    with pytest.raises(ValueError, match=rf"Unimplemented keys: .*\"{request.node.callspec.id}\".*; leave it out$"):
        OutputFormat.of({"json_schema": schema}).check()


def test_an_answer_that_is_cut_off_in_white_space_says_so(checkpoint: Path) -> None:
    forms = [{"regex": " {90}x"}, {"regex": "x {90}x"}, {"regex": "x{90}"}]
    errors = [make(checkpoint, output_format=form).answer([Prompt([5], "f", 0)])[0].error for form in forms]
    assert "regex: cut off after 63 tokens: all of its text is white space" in str(errors[0])
    assert "regex: cut off after 63 tokens: most of its text is white space" in str(errors[1])
    assert errors[2] == "regex: the answer was cut off after 63 tokens: the context is full: shorten the prompt"


def test_settings_that_do_not_go_with_a_form(checkpoint: Path, pair: list[Generator]) -> None:
    with pytest.raises(ValueError, match="give choices or output_format, not both"):
        make(checkpoint, choices=["a", "b"], output_format={"regex": "a"})
    with pytest.raises(ValueError, match="Unimplemented keys"):
        make(checkpoint, output_format={"json_schema": {"not": {}}})
    form = OutputFormat("regex", "a+")
    rows = prompts(pair[0], output_format=form)
    given = [{"stop": "x"}, {"min_new_tokens": 2}, {"ignore_eos": True}, {"stop_token_ids": [7]}]
    rows = [Prompt(row.ids, "f", 0, sampling=one, output_format=form) for row, one in zip(rows, given, strict=False)]
    rows.append(Prompt(rows[0].ids, "f", 9, output_format=OutputFormat("json_schema", '{"not": {}}')))
    errors = [answer.error for answer in pair[0].answer(rows)]
    for error, one in zip(errors, given, strict=False):
        assert (
            error
            == f"output_format cannot be combined with sampling.{next(iter(one))}: the format alone ends the answer"
        )
    assert errors[4] == 'json_schema: Unimplemented keys: ["not"]: no grammar can express this; leave it out'
