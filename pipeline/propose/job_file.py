"""The text of a commented job file, checked before it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.config.load import dump_yaml, parse_yaml, validated
from pipeline.messages import listed, printable
from pipeline.plan.columns import check_columns
from pipeline.prepare.chat import Chat, check_chat
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.propose.columns import SUMMARY, Proposal, propose
from pipeline.propose.sample import Sample, read_sample

DEMO = "configs/demo/checkpoint"
SYSTEM = "You do what the user asks, and write nothing else."
PLACEHOLDER = "owner/name@revision"


def write_job_file(path: str, output: Path, model: str | None = None) -> tuple[Sample, Proposal]:
    """Write the job file of an input to a new file.

    Args:
        path: file, folder or glob, local or s3://.
        output: the file; it must not exist.
        model: checkpoint; default the demo's where it is found, else a placeholder.

    Raises:
        UserError: the file exists, or the input has no rows or no prompts.
    """
    if output.exists():
        raise UserError(f"{output}: exists, and is not replaced; give another --output")
    sample = read_sample(path, StorageConfig())
    proposal = propose(sample.columns)
    text = job_text(path, sample, proposal, model or (DEMO if Path(DEMO).is_dir() else PLACEHOLDER))
    check_columns(validated(JobConfig, parse_yaml(text), path))
    try:
        with open(output, "x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{output}: exists, and is not replaced; give another --output") from None
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
    return sample, proposal


def job_text(path: str, sample: Sample, proposal: Proposal, model: str) -> str:
    """A job file with a comment for each choice."""
    keys = {"path": path} | ({"format": sample.format} if sample.format else {}) | proposal.keys
    is_chat = "messages" in keys or keys.get("format") == "openai_batch"
    if not is_chat and _has_chat_template(model):
        keys["chat"] = True
        if _takes_system(model):  # else the template may add a system message of its own, which small models repeat
            keys["system"] = SYSTEM
        if "template" in keys:
            keys["template"] = keys["template"].removesuffix(SUMMARY)
    name = path.rstrip("/").rpartition("/")[2].partition(".")[0].replace("*", "") or "answers"
    edit = ["  # replace it: a folder, s3://…, or a model on the hub"] if model == PLACEHOLDER else []
    lines = [
        f"# Written by `skipdecode init {printable(path)}`. Every key: configs/README.md of the project.",
        "#",
        "# skipdecode try THIS_FILE     answers five rows, and writes nothing",
        "# skipdecode plan THIS_FILE    predicts time and cost at each speed",
        "# skipdecode run THIS_FILE     answers all rows; the same command resumes",
        "#",
        "# Paths are relative to the folder in which a command runs.",
        "",
        *(f"# {printable(line)}" for line in (f"Columns: {listed(sample.columns)}", *proposal.notes)),
        *_section("input", keys),
    ]
    if not is_chat and "chat" not in keys:
        lines.append("  # chat: true                      # for a model with a chat template")
    lines += [
        *_section("output", {"path": f"answers/{name}"}),
        "  # keep: []                        # input columns to copy to the answers",
        "  # format: jsonl                   # answers.jsonl too",
        *_section("model", {"path": model}),
        *edit,
        "  # dtype: float32                  # default bfloat16",
        "# schedule: {speedup: 2}            # fewer layers a token; `skipdecode adapt` trains a model for it first",
        "sampling:",
        "  max_new_tokens: 128               # tokens of an answer, at most",
        "  temperature: 0.0                  # 0 is greedy",
        "# choices: [positive, negative]     # labels, one of which is each answer",
        "actors:",
        "  count: 1                          # processes that hold the model",
        "  # gpus: 1                         # of each",
        "# price_per_hour: 2.5               # of a GPU, or of an actor on CPUs, for `plan`",
        "# budget: {hours: 10}               # device-hours after which the job stops",
    ]
    return "\n".join(lines) + "\n"


def _section(name: str, keys: dict[str, Any]) -> list[str]:
    return dump_yaml({name: keys}).splitlines()


def _has_chat_template(model: str) -> bool:
    folder = Path(model)
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False


def _takes_system(model: str) -> bool:
    """Whether the chat template renders a conversation with a system message."""
    try:
        check_chat(tokenizer_of(model), Chat(system=SYSTEM), model)
    except UserError:
        return False
    return True
