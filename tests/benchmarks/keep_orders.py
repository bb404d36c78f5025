"""Keep orders of a published chat model, not adapted: agreement with full depth at constant depths, on E2E prompts.

    .venv/bin/python tests/benchmarks/keep_orders.py CHECKPOINT [--ranked 20] [--held-out 24] [--threads 1]

The order is measured on prompts of E2E's dev set, and all orders are scored on prompts of its test set, each with two
worked examples before it. Prompts run at full depth. Needs ../shared/data/e2e, and minutes.
"""

from __future__ import annotations

import argparse
import random
import time

import pyarrow.parquet as pq
import torch
from workloads import DATA

from actors.answers import Prompt
from actors.engine.library.packed_attention import packed
from actors.engine.model.loading import load_tokenizer
from actors.engine.schedule.schedule import paper_order
from actors.generator import Generator
from pipeline.learn.keep_order import ResponsePasses, Row, batches, rank_layers

SHARES = (0.9, 0.75)  # of the layers, at every position
ASK = "Write one or two sentences about this restaurant that state all of these facts and no others.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--ranked", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if not (DATA / "e2e").is_dir():
        parser.error(f"{DATA / 'e2e'}: not there")
    generator = Generator(
        options.checkpoint,
        schedule={"speedup": 1.0},
        sampling={"max_new_tokens": 64},
        dtype="float32",
        threads=options.threads,
    )
    decoder = generator.engine.decoder
    ranked = answered(generator, options.checkpoint, "dev", options.ranked)
    held_out = answered(generator, options.checkpoint, "test", options.held_out)
    layers, began = decoder.num_layers, time.perf_counter()
    measured = rank_layers(decoder, ranked, report=print).keep_order
    print(f"measured on {len(ranked)} answers in {time.perf_counter() - began:.0f} s: {list(measured)}")
    orders = {f"paper, warmup {warmup}": paper_order(layers, warmup) for warmup in (1, 2, 3)} | {"measured": measured}
    with torch.inference_mode(), packed(decoder.model):
        passes = [ResponsePasses(decoder, rows) for rows in batches(held_out, decoder.vocab_size)]
        print(
            f"{len(held_out)} held-out answers, {sum(batch.tokens for batch in passes)} tokens: top-1 agreement, nats"
        )
        for name, order in orders.items():
            for share in SHARES:
                depth = round(share * layers)
                agreed, nats = score(passes, order[:depth])
                print(f"{name}, {depth} of {layers} layers: {agreed:.3f}, {nats:.3f}")


def answered(generator: Generator, checkpoint: str, split: str, count: int) -> list[Row]:
    """Prompts of a split as token ids, and what the model at full depth answers them, its end token included."""
    tokenizer = load_tokenizer(checkpoint)
    examples = pq.read_table(DATA / "e2e" / "train.parquet").to_pylist()
    shots = [
        message
        for row in (examples[100], examples[20000])
        for message in (
            {"role": "user", "content": ASK + row["prompt"]},
            {"role": "assistant", "content": row["reference"]},
        )
    ]
    rows = random.Random(1).sample(pq.read_table(DATA / "e2e" / f"{split}.parquet").to_pylist(), count)
    chats = [[*shots, {"role": "user", "content": ASK + row["prompt"]}] for row in rows]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    answers = generator.answer([Prompt(prompt, split, number) for number, prompt in enumerate(prompts)])
    return [(prompt, answer.token_ids or ()) for prompt, answer in zip(prompts, answers, strict=True)]


def score(passes: list[ResponsePasses], kept: tuple[int, ...]) -> tuple[float, float]:
    """Top-1 agreement with full depth and KL divergence from it, means over response tokens."""
    sums = torch.tensor([batch.agreement(kept) for batch in passes], dtype=torch.float64).sum(dim=0)
    agreed, nats = (sums / sum(batch.tokens for batch in passes)).tolist()
    return agreed, nats


if __name__ == "__main__":
    main()
