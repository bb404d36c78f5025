"""Structured output: validity over a folder of JSON Schemas, and the cost of a grammar over free greedy answers.

    .venv/bin/python tests/benchmarks/structured.py validity CHECKPOINT SCHEMAS [--skip 0] [--count 1000] [--speeds 1,5]
    .venv/bin/python tests/benchmarks/structured.py cost CHECKPOINT [--batch 64] [--tokens 64] [--runs 3]

SCHEMAS is a folder with a schema in each .json file, such as `data/` of github.com/guidance-ai/jsonschemabench.
Validity: each schema that is supported has one answer at each speed, and every whole answer is validated by the
package jsonschema; refused schemas are counted by the reason that they were given. `--skip` leaves out the first
supported schemas, so that a long measurement may be cut into several. Cost: both contestants run the
same number of steps of the same batch; greedy, then sampled. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema

from actors.answers import Prompt
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.generator import Generator

# a record that never ends by itself, so that all rows run as many steps as free ones
ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["pub", "restaurant", "coffee shop"]},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
            "open": {"type": "boolean"},
        },
        "required": ["name", "kind", "stars", "open"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=("validity", "cost"))
    parser.add_argument("checkpoint")
    parser.add_argument("schemas", nargs="?", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="supported schemas that are left out first")
    parser.add_argument("--count", type=int, default=1000, help="supported schemas")
    parser.add_argument("--speeds", default="1,5")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens an answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="of validity's answers")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    if given.measure == "cost":
        found = cost(given)
    elif given.schemas is None or not given.schemas.is_dir():
        sys.exit("SCHEMAS is not there: nothing was measured")
    else:
        found = {f"{float(speed):g}x": validity(given, float(speed)) for speed in given.speeds.split(",")}
    print(json.dumps(found))


def made(given: argparse.Namespace, speed: float, temperature: float, scheduler: str = "lock_step") -> Generator:
    return Generator(
        given.checkpoint,
        schedule={"speedup": speed, "horizon": given.tokens},
        unadapted=True,
        sampling={"max_new_tokens": given.tokens, "temperature": temperature},
        dtype=given.dtype,
        max_batch=given.batch,
        scheduler=scheduler,
        threads=given.threads,
        cumulative_logprob=False,
    )


def validity(given: argparse.Namespace, speed: float) -> dict[str, Any]:
    """Answers to the first supported schemas, in an order drawn at random; counts, printed too."""
    refused: Counter[str] = Counter()
    forms: list[OutputFormat] = []
    for text in schemas(given.schemas):
        form = OutputFormat("json_schema", text)
        try:
            form.check()
        except UserError as error:
            refused[re.sub(r"['\"\d].*", "", str(error))[:60] or "?"] += 1
            continue
        forms.append(form)
        if len(forms) == given.skip + given.count:
            break
    print(f"{len(forms)} schemas supported, {refused.total()} refused", flush=True)
    for reason, count in refused.most_common(12):
        print(f"    {count:5} {reason}")
    generator = made(given, speed, given.temperature, "refill")
    ids = generator.tokenizer("One JSON value about a place to eat:")["input_ids"]
    counts: Counter[str] = Counter()
    size = 4 * given.batch
    for first in range(given.skip, len(forms), size):
        group = forms[first : first + size]
        rows = [Prompt(ids, "suite", first + number, output_format=form) for number, form in enumerate(group)]
        for answer, form in zip(generator.answer(rows), group, strict=True):
            counts[outcome(answer.error, answer.generated_text, form)] += 1
        print(f"{speed:g}x: schemas {given.skip} to {first + len(group)}: {dict(counts)}", flush=True)
    return {"supported": len(forms), "refused": refused.total(), **counts}


def schemas(folder: Path) -> Iterator[str]:
    """Texts of the files, in an order drawn at random."""
    files = sorted(folder.rglob("*.json"))
    random.Random(0).shuffle(files)
    for file in files:
        yield file.read_text()


def outcome(error: str | None, text: str | None, form: OutputFormat) -> str:
    """One word for an answer; an invalid one is printed."""
    if error is not None:
        return "cut off" if "cut off" in error else "failed"
    assert text is not None
    schema = json.loads(form.text, parse_float=_number)
    try:
        validator = jsonschema.validators.validator_for(schema)
        with localcontext(prec=1000):  # digits of a quotient
            validator(schema).validate(json.loads(text, parse_float=_number))
    except (InvalidOperation, TypeError):  # a multiple of a number whose exponent has many digits
        print(f"NOT CHECKED: {text!r}\n    {form.text[:2000]}", flush=True)
        return "not checked"
    except (jsonschema.ValidationError, ValueError) as problem:
        print(f"INVALID: {text!r}\n    {str(problem).splitlines()[0]}\n    {form.text[:2000]}", flush=True)
        return "invalid"
    return "valid"


def _number(digits: str) -> Decimal | float:
    """Exact where it can be: as doubles, 661111.19 is no multiple of 0.01. Infinite for an exponent of many digits."""
    try:
        return Decimal(digits)
    except InvalidOperation:
        return float(digits)


def cost(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a decode step with and without a grammar, and the share that the grammar adds, by the clock and in
    processor time, which other programs on the machine change less."""
    results = {}
    form = OutputFormat("json_schema", json.dumps(ENDLESS))
    for temperature in (0.0, 1.0):
        generator = made(given, 1.0, temperature)
        ids = generator.tokenizer("A list of places to eat:")["input_ids"]
        free = [Prompt(ids, "cost", row, sampling={"ignore_eos": True}) for row in range(given.batch)]
        bound = [replace(row, sampling={}, output_format=form) for row in free]
        times: dict[str, list[float]] = {"free": [], "bound": []}
        processor: dict[str, list[float]] = {"free": [], "bound": []}
        for run in range(given.runs + 1):
            for name, rows in (("free", free), ("bound", bound)):
                generator.take_stats()
                began = time.process_time()
                answers = generator.answer(rows)
                seconds, stats = time.process_time() - began, generator.take_stats()
                assert all(answer.generated_tokens == given.tokens for answer in answers)
                if run:  # the first one warms up
                    times[name].append(1000 * stats.decode_seconds / (stats.decode_steps / given.batch))
                    processor[name].append(seconds)
                print(f"t={temperature:g} {name}: {seconds:.2f} processor seconds", flush=True)
        medians = {name: statistics.median(values) for name, values in times.items()}
        added = medians["bound"] / medians["free"] - 1
        work = statistics.median(processor["bound"]) / statistics.median(processor["free"]) - 1
        print(f"t={temperature:g}: {medians['free']:.2f} ms a step free, {medians['bound']:.2f} bound: {added:+.1%}")
        print(f"t={temperature:g}: {work:+.1%} processor time, prompts included")
        results[f"t={temperature:g}"] = {**medians, "added": added, "added_processor_time": work}
    return results


if __name__ == "__main__":
    main()
