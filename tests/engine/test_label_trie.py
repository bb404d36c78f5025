"""Answers bound to labels: against the probabilities of all labels, worked out one by one."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from engine_cases import answer
from hypothesis import given
from hypothesis import strategies as st
from oracle import oracle_logits
from tiny_models import LAYERS

from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import FinishReason, Request, SamplingParams

END, ENDS = 2, [2, 3]
LABELS = [(5, 6, 7), (5, 6), (5, 9), (11,), (11, 12, 13, 14), (20, 21, 22)]  # two are beginnings of others
SCHEDULE = ScheduleSpec(max_depth=6, min_depth=2, horizon=4).build(LAYERS)


def exact(decoder: Decoder, schedule: Schedule, prompt: list[int], temperature: float = 1.0) -> list[float]:
    """Probability of each label: at every token the model's own, narrowed to what can still become a label."""
    found = []
    for label in LABELS:
        probability = 1.0
        for place, token in enumerate([*label, END]):
            begun = label[:place]
            going_on = {other[place] for other in LABELS if len(other) > place and other[:place] == begun}
            options = sorted(going_on | ({END} if begun in LABELS else set()))
            if len(options) > 1:
                logits = oracle_logits(decoder, schedule, prompt, list(begun)).clone()
                logits[END] = logits[ENDS].logsumexp(0)
                probability *= float((logits[options] / temperature).softmax(-1)[options.index(token)])
        found.append(probability)
    assert abs(sum(found) - 1) < 1e-5
    return found


def bound(prompt: list[int], key: int = 0, **sampling: float) -> Request:
    return Request(prompt, SamplingParams(max_new_tokens=1, **sampling), key, constraint=ChoiceTrie(LABELS, ENDS))  # type: ignore[arg-type]


def test_every_answer_is_a_label_with_its_probability(llama: Decoder) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 12))] for _ in range(20)]
    free = Request([4, 5], SamplingParams(max_new_tokens=9))
    engine = Engine(llama, SCHEDULE, {END})
    alone = answer(engine, [free])[0]
    *answers, last = answer(engine, [*map(bound, prompts), free], 8)
    assert last.token_ids == alone.token_ids and last.choice is None is last.choice_probability
    for prompt, one in zip(prompts, answers, strict=True):
        assert one.choice is not None and one.choice_probability is not None
        assert one.finish_reason == FinishReason.STOP
        drawn = [token for token in one.token_ids if token not in ENDS]
        assert drawn == list(LABELS[one.choice][: len(drawn)])
        assert abs(one.choice_probability - exact(llama, SCHEDULE, prompt)[one.choice]) < 1e-4
    assert len({one.choice for one in answers}) > 1


def test_labels_are_drawn_as_often_as_their_probability_says(llama: Decoder) -> None:
    prompt, draws = [7, 8, 9], 4000
    rows = [bound(prompt, key * 7919, temperature=2.0) for key in range(draws)]
    seen = Counter(one.choice for one in answer(Engine(llama, SCHEDULE, {END}), rows, 1000))
    wanted = exact(llama, SCHEDULE, prompt, temperature=2.0)
    statistic = sum((seen[label] - draws * p) ** 2 / (draws * p) for label, p in enumerate(wanted))
    freedom = len(LABELS) - 1
    assert statistic < freedom + 4.9 * math.sqrt(2 * freedom) + 15


def test_a_single_label_has_probability_1(llama: Decoder) -> None:
    [one] = answer(Engine(llama, SCHEDULE, {END}), [Request([4], constraint=ChoiceTrie([(8, 9)], [END]))])
    assert (one.token_ids, one.choice, one.choice_probability) == ((8,), 0, 1.0)


@given(st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True))
def test_every_way_through_the_trie_ends_at_its_label(labels: list[tuple[int, ...]]) -> None:
    trie = ChoiceTrie(labels, [END])
    reached = []

    def walk(drawn: tuple[int, ...]) -> None:
        assert len(drawn) <= trie.most_tokens
        for token in range(7):
            progress = trie.begin()
            assert not any(progress.advance(one) for one in drawn)
            if progress.allows(token) and not progress.advance(token):
                walk((*drawn, token))
            elif progress.label is not None:
                reached.append(progress.label)
                tokens = drawn if token == END else (*drawn, token)
                assert labels[progress.label][: len(tokens)] == tokens
                others = [one for one in labels if one[: len(tokens)] == tokens and one != labels[progress.label]]
                assert not others or token == END

    walk(())
    if len(labels) > 1:
        assert sorted(reached) == list(range(len(labels)))


def test_a_label_may_be_long() -> None:
    long = [tuple(range(3, 3000)), (*range(3, 2999), 7)]
    trie = ChoiceTrie(long, [END])
    assert trie.most_tokens == 2997


def test_what_cannot_be_told_apart_is_refused() -> None:
    for labels, end, message in (
        ([], END, "no choices"),
        ([(5,), ()], END, "choice 1 has no tokens"),
        ([(5,), (5, END)], END, "choice 1 contains a token that ends an answer"),
        ([(5, 6), (7,), (5, 6)], END, "choices 0 and 2 have the same tokens"),
        ([(5, 6), (5,)], None, "choice 1 is the start of another choice, and the model has no end token"),
    ):
        with pytest.raises(ValueError, match=message):
            ChoiceTrie(labels, [end])


def test_choices_that_do_not_fit_the_context_are_refused(llama: Decoder) -> None:
    engine = Engine(llama, SCHEDULE, {END})
    assert bound([3] * 61).new_tokens_limit(engine.decoder.context_length) == 3
    with pytest.raises(ValueError, match="choices have up to 3 tokens, but the context has room for only 2"):
        bound([3] * 62).new_tokens_limit(engine.decoder.context_length)
