"""CTranslate2 with a checkpoint converted by its own converter; run by the Python that it is installed for."""

from __future__ import annotations

import os
from pathlib import Path

from peer_process import Answer, serve


def convert(checkpoint: str) -> str:
    """The checkpoint in CTranslate2's format, beside it, with a vocabulary of made-up words."""
    import ctranslate2
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    folder = Path(checkpoint).with_name(Path(checkpoint).name + "-ct2")
    if not folder.exists():
        size = AutoConfig.from_pretrained(checkpoint).vocab_size
        words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w3"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, bos_token="w0", eos_token="w2", pad_token="w1", unk_token="w3"
        )
        tokenizer.save_pretrained(checkpoint)
        ctranslate2.converters.TransformersConverter(checkpoint).convert(str(folder))
    return str(folder)


def start(checkpoint: str, threads: int, max_rows: int) -> tuple[Answer, str]:
    """Static batches. CTranslate2 takes one length for a call and stops no single row by it, so that each row is as
    long as its batch's longest, and what is over is not counted: rows are sorted by their number of new tokens, which
    no user knows, but a workload of a single batch pays for its longest row.
    """
    import ctranslate2

    kind = os.environ.get("PEER_COMPUTE_TYPE", "float32")
    engine = ctranslate2.Generator(convert(checkpoint), compute_type=kind, intra_threads=threads, inter_threads=1)

    def answer(prompts: list[list[int]], new: list[int]) -> int:
        order = sorted(range(len(new)), key=lambda row: (new[row], len(prompts[row])))
        for first in range(0, len(order), max_rows):
            rows = order[first : first + max_rows]
            most = max(new[row] for row in rows)
            engine.generate_batch(
                [[f"w{token}" for token in prompts[row]] for row in rows],
                max_length=most,
                min_length=most,
                sampling_topk=1,
                include_prompt_in_result=False,
                end_token=[],
            )
        return sum(new)

    return answer, ctranslate2.__version__


if __name__ == "__main__":
    serve(start)
