"""Write prompts for the evidence on a published model from the data sets that `fetch_data.py` fetches.

    .venv/bin/python tests/benchmarks/real_data.py {text,labels,groups,emotion,summaries,gemma-text,gemma-labels}

text: E2E's facts; own.parquet has its dev prompts, and the test prompts that are not scored; recombined.parquet has
prompts of six to eight facts drawn from those. labels: Banking77 with its most similar training questions as
examples; further.parquet has more of them. gemma-text, gemma-labels: the same for Gemma 3 270M. groups: Banking77's
77 intents as 10 topics. emotion: tweets of TweetEval's train and val splits, in work/tweeteval (a clone of
github.com/cardiffnlp/tweeteval). summaries: passages of QMSum's meetings, cut so that a prompt has 1,500 tokens,
those to adapt to 250. Writes the job's input (train.parquet, without answers) and the rows to score (test.parquet)
into work/real/<name>. A scored row's prompt is the token ids that the job configs/real/<name>.yaml makes of it.
Without the data sets: exit status 3.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from real_model import values_stated
from restaurant_slots import errors_of, slots_of

from actors.engine.model.tokenizer import load_tokenizer
from pipeline.advise.demo_data import OPTIONAL_SLOTS
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config
from pipeline.learn.rows import prompt_ids
from pipeline.learn.score.metrics import rouge_l_statistics
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.storage.local_output import replacing

DATA, WORK, JOBS = Path("../shared/data"), Path("work/real"), Path("configs/real")
TWEETS = Path("work/tweeteval/datasets/emotion")
MODEL = WORK / "model"
NO_DATA, FETCH = 3, "tests/benchmarks/fetch_data.py fetches them"  # exit status, and what to do
SCORED = 300  # of E2E's test prompts; others may be adapted to, without their references
EXAMPLES = 6  # similar questions before each
ADAPTED, FURTHER = 3000, 1900  # training questions that a job of labels adapts to, and those of its second training
PROMPT_TOKENS, AROUND = 1500, 80  # of a summary's prompt, and of the chat around the passage
ADAPT_TOKENS = 250  # of such prompts that are adapted to: a step takes a fifth of the time
CHOSEN_HELD_OUT = 151  # of the chosen answers
RECOMBINED, FACTS = 1600, (6, 8)  # such prompts; facts of each, name included
SEED = 7
# Banking77's intents by topic, a word of their names each; the first match counts
TOPICS: dict[str, Sequence[str]] = {
    "exchange": ("exchange", "fiat"),
    "top up": ("top_up", "topping_up"),
    "cash": ("cash", "atm", "swallowed"),
    "transfer": ("transfer", "beneficiary", "receiving_money", "cheque"),
    "identity": ("identity", "source_of_funds", "personal_details", "age_limit", "country", "terminate"),
    "security": ("lost", "compromised", "pin", "passcode"),
    "virtual card": ("virtual", "disposable", "apple_pay"),
    "card order": ("arrival", "delivery", "physical", "spare", "linking", "activate", "expire", "visa", "supported"),
    "refund": ("refund", "reverted", "twice"),
    "card payment": ("payment", "charge", "not_working", "contactless", "card_acceptance"),
}

LABELLING = "You name the topic of a bank customer's question."
EMOTIONS, FEELING = ("anger", "joy", "optimism", "sadness"), "You name the emotion of a tweet."

Rows = list[dict[str, Any]]
Made = tuple[Rows, Rows, dict[str, Rows]]  # to adapt to, to score, for further trainings by file


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MAKERS)
    if not write_rows(parser.parse_args().name):
        sys.exit(NO_DATA)


def write_rows(name: str) -> bool:
    """Write the rows of a job; False, with a line, without the data set."""
    data = TWEETS if name == "emotion" else DATA
    if not data.is_dir():
        where = "git clone https://github.com/cardiffnlp/tweeteval work/tweeteval" if data == TWEETS else FETCH
        print(f"skipped: the data sets are not in {data}: {where}", file=sys.stderr)
        return False
    train, test, more = MAKERS[name]()
    random.Random(SEED).shuffle(train)
    kept = [
        {**row, "text": row.get("prompt", ""), "prompt": tokens}
        for row, tokens in zip(test, tokens_of(name, test), strict=True)
        if tokens is not None
    ]
    write_tables(WORK / name, {"train": train, "test": kept, **more})
    longest = max(len(row["prompt"]) for row in kept)
    print(f"{WORK / name}: {len(train):,} rows to adapt to, {len(kept):,} to score, prompts of up to {longest} tokens")
    return True


def tokens_of(name: str, rows: Rows) -> list[list[int] | None]:
    """The rows' prompts as the job configs/real/<name>.yaml makes them; None for a row with an error."""
    job = load_config(JobConfig, JOBS / f"{name}.yaml", [])
    spec = prompt_spec(job, resolve_checkpoint(job.model, job.storage), 0.0)
    return prompt_ids(pa.Table.from_pylist(rows), spec)


def write_tables(folder: Path, tables: dict[str, Rows]) -> None:
    """Write each of {name: rows} as Parquet into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)


def read(name: str) -> Rows:
    rows: Rows = pq.read_table(DATA / f"{name}.parquet").to_pylist()
    return rows


def text() -> Made:
    """The distinct prompts of E2E's training set; its test prompts with all references."""
    prompts = dict.fromkeys(row["prompt"] for row in read("e2e/train"))
    train = [{"id": f"e2e-{number:05d}", "prompt": prompt} for number, prompt in enumerate(prompts)]
    test = [{key: row[key] for key in ("id", "prompt", "references")} for row in read("e2e/test")]
    return train, test, {"own": own(test), "recombined": recombined(own(test))}


def own(test: Rows) -> Rows:
    """What a job that scores the first test prompts would adapt to beside them."""
    prompts = dict.fromkeys(row["prompt"] for row in read("e2e/dev"))
    dev = [{"id": f"dev-{number:04d}", "prompt": prompt} for number, prompt in enumerate(prompts)]
    return dev + [{key: row[key] for key in ("id", "prompt")} for row in test[SCORED:]]


def recombined(rows: Rows) -> Rows:
    """Prompts that name more facts: each fact from another of the rows, in E2E's order of facts."""
    chance = random.Random(SEED)
    values: dict[str, list[str]] = {}
    for row in rows:
        for fact, value in slots_of(row["prompt"]).items():
            values.setdefault(fact, []).append(value)
    order = [fact for fact in ("name", *OPTIONAL_SLOTS) if fact in values]
    made: dict[str, None] = {}
    while len(made) < RECOMBINED:
        chosen = {"name", *chance.sample(order[1:], chance.randint(*FACTS) - 1)}
        made[", ".join(f"{fact}[{chance.choice(values[fact])}]" for fact in order if fact in chosen)] = None
    return [{"id": f"recombined-{number:04d}", "prompt": prompt} for number, prompt in enumerate(made)]


def choose_best(name: str) -> None:
    """Write pairs to train on into work/real/<name>/best: of each prompt's drawn answers the one with the best score.

    Raises KeyError if the answers, in work/real/<name>/sampled, lack a column that the score needs.
    """
    best: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {}
    for row in pq.read_table(WORK / name / "sampled").to_pylist():
        score = SCORES[name](row) if row["error"] is None else None
        if score is not None and (row["id"] not in best or score > best[row["id"]][0]):
            best[row["id"]] = score, row
    rows = [row for _, row in best.values()]
    pairs = [
        {"prompt": ids, "response": row["generated_text"], "ended": row["finish_reason"] == "stop"}
        for row, ids in zip(rows, tokens_of(name, rows), strict=True)
    ]
    random.Random(SEED).shuffle(pairs)
    parts = {"held-out": pairs[-CHOSEN_HELD_OUT:], "train": pairs[:-CHOSEN_HELD_OUT]}
    write_tables(WORK / name / "best", parts)


def facts_score(row: dict[str, Any]) -> tuple[float, ...] | None:
    """Facts stated less facts that are false or added, then facts stated; None: the answer was cut off."""
    if row["finish_reason"] != "stop":
        return None
    prompt, text = row["prompt"], row["generated_text"]
    stated, errors = values_stated([prompt], [text])[0], errors_of(prompt, text)
    return stated - errors.wrong - errors.added, stated


def summary_score(row: dict[str, Any]) -> tuple[float, ...]:
    """ROUGE-L against the reference, times the share of runs of four words that are not repeated."""
    text = row["generated_text"]
    words = text.split()
    fours = [tuple(words[place : place + 4]) for place in range(len(words) - 3)]
    [[rouge, _]] = rouge_l_statistics([text], [[row["reference"]]])
    return (rouge * len(set(fours)) / max(1, len(fours)),)


def labels() -> Made:
    """Each question after the most similar training questions and their intents."""
    return questions(lambda intent: intent, FURTHER)


def groups() -> Made:
    """The same with topics in place of intents."""
    return questions(topic_of)


def topic_of(intent: str) -> str:
    """The topic of an intent."""
    return next(topic for topic, parts in TOPICS.items() if any(part in intent.lower() for part in parts))


def questions(label_of: Callable[[str], str], further: int = 0) -> Made:
    known, asked = (
        [{**row, "label": label_of(row["label"])} for row in read(f"banking77/{split}")] for split in ("train", "test")
    )
    random.Random(SEED).shuffle(asked)
    random.Random(SEED).shuffle(known)
    made = with_examples(known, LABELLING)
    more = {"further": made(known[ADAPTED : ADAPTED + further], 1)} if further else {}
    return made(known[:ADAPTED], 1), made(asked, 0), more


def emotion() -> Made:
    """Each tweet of the val split, and of the train split, after the most similar other tweets of the train split."""
    train, val = (
        [
            {"id": f"{split}-{number:04d}", "prompt": tweet.strip(), "label": EMOTIONS[int(label)]}
            for number, (tweet, label) in enumerate(
                zip(
                    (TWEETS / f"{split}_text.txt").read_text().splitlines(),
                    (TWEETS / f"{split}_labels.txt").read_text().split(),
                    strict=True,
                )
            )
        ]
        for split in ("train", "val")
    )
    made = with_examples(train, FEELING)
    return made(train, 1), made(val, 0), {}


def with_examples(known: Rows, system: str) -> Callable[[Rows, int], Rows]:
    """Return a function that puts the most similar known rows, with their labels, before each of some rows."""
    similar = Similar([row["prompt"] for row in known])

    def made(rows: Rows, first: int) -> Rows:
        """first: most similar rows that are left out: one where the row itself is among them."""
        result = []
        for given, near in zip(rows, similar.nearest([row["prompt"] for row in rows], EXAMPLES + first), strict=True):
            shots = [known[place] for place in reversed(near[first:])]
            messages = [{"role": "system", "content": system}]
            for shot in shots:
                messages.append({"role": "user", "content": shot["prompt"]})
                messages.append({"role": "assistant", "content": shot["label"]})
            messages.append({"role": "user", "content": given["prompt"]})
            row = {"id": given["id"], "messages": messages, "references": [given["label"]]}
            result.append({**row, "nearest": shots[-1]["label"]})  # for comparison
        return result

    return made


class Similar:
    """Texts by similarity: cosine of their words' tf-idf.

    Args:
        texts: to choose from.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words = [Counter(_words(text)) for text in texts]
        frequency = Counter(word for one in words for word in one)
        self.weights = {word: math.log(len(texts) / count) for word, count in frequency.items()}
        self.places = {word: place for place, word in enumerate(self.weights)}
        self.vectors = np.stack([self._vector(one) for one in words])

    def nearest(self, texts: Sequence[str], count: int) -> list[list[int]]:
        """For each text the indices of the most similar ones, best first."""
        found: list[list[int]] = []
        for first in range(0, len(texts), 256):
            vectors = np.stack([self._vector(Counter(_words(text))) for text in texts[first : first + 256]])
            found += np.argsort(-(vectors @ self.vectors.T), axis=1, kind="stable")[:, :count].tolist()
        return found

    def _vector(self, words: Counter[str]) -> np.ndarray:
        vector = np.zeros(len(self.places), dtype=np.float32)
        for word, count in words.items():
            if word in self.places:
                vector[self.places[word]] = (1 + math.log(count)) * self.weights[word]
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def summaries() -> Made:
    """A question on a meeting and the passage that answers it, cut at its end."""
    tokenizer = load_tokenizer(MODEL)

    def row(given: dict[str, Any], most: int) -> dict[str, Any]:
        question, _, passage = given["prompt"].partition("\n")
        room = most - AROUND - len(tokenizer(question, add_special_tokens=False)["input_ids"])
        passage = re.sub(r"\{\w+\} ?", "", passage)  # {vocalsound}, {disfmarker}
        ends = tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        cut = passage[: ends[room - 1][1]] if len(ends) > room else passage
        return {"id": given["id"], "prompt": f"{cut}\n\n{question}"}

    train = [
        {**row(given, ADAPT_TOKENS), "reference": given.get("reference") or given["references"][0]}
        for name in ("train", "dev")
        for given in read(f"qmsum/{name}")
    ]
    test = [{**row(given, PROMPT_TOKENS), "references": given["references"]} for given in read("qmsum/test")]
    return train, test, {}


SCORES: dict[str, Callable[[dict[str, Any]], tuple[float, ...] | None]] = {
    "text": facts_score,
    "summaries": summary_score,
}
MAKERS: dict[str, Callable[[], Made]] = {
    "text": text,
    "gemma-text": text,
    "labels": labels,
    "gemma-labels": labels,
    "groups": groups,
    "emotion": emotion,
    "summaries": summaries,
}


if __name__ == "__main__":
    main()
