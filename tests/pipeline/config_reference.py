"""Write every key of every file, with its type, default and unit, into configs/README.md, from the config models.

.venv/bin/python tests/pipeline/config_reference.py    # rewrites the tables in configs/README.md
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from pipeline.config.reference import FILES, default_of, in_list, kind_of, section_of

README = Path(__file__).parents[2] / "configs" / "README.md"
BETWEEN = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.S)


def tables(model: type[BaseModel], seen: set[str], path: str = "") -> list[str]:
    """Return the lines of a section's table, and after it those of the sections below it.

    seen: rows of the files before, which are left out; the rows of this file are added.
    """
    lines, below = [], []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            dotted = f"{path}{name}"
            mark = "[]" * in_list(field)
            purpose = field.description or (section.__doc__ or "").strip().partition("\n")[0]
            purpose = "" if section.__doc__ == BaseModel.__doc__ else purpose
            state = "required" if field.is_required() else "optional"
            sentence = f"{state.capitalize()}. {purpose[:1].upper()}{purpose[1:]}".strip()
            below += ["", f"#### `{dotted}{mark}`", "", sentence, ""]
            below += tables(section, seen, f"{dotted}{mark}.")
            continue
        text = (field.description or "").replace("|", r"\|").replace("\n", " ")
        kind = kind_of(field.annotation).replace("|", r"\|")
        default = default_of(field).replace("|", r"\|")
        lines.append(f"| `{path}{name}` | {kind} | {'' if default == '-' else f'`{default}`'} | {text} |")
    keys = {line.replace(f"`{path}", "`", 1) if path.endswith("[].") else line for line in lines}
    if path.endswith("[].") and keys <= {line.replace("`schedule.", "`", 1) for line in seen}:
        return ["Keys as in the section `schedule` of job files."]
    new = [line for line in lines if line not in seen]
    seen |= set(lines)
    head = ["| key | type | default | meaning and unit |", "|---|---|---|---|"] if new else []
    if len(new) < len(lines):
        others = "Further keys" if new else "All keys"
        head = [f"{others} as in the section of this name above.", *([""] if new else []), *head]
    return [*head, *new, *below]


def reference() -> str:
    """The generated part of configs/README.md."""
    lines: list[str] = []
    seen: set[str] = set()
    for title, model in FILES.items():
        lines += ["", f"### {title}", "", *tables(model, seen)]
    return "\n".join(lines) + "\n\n"


def current() -> str:
    """The README with the tables as the models give them."""
    return BETWEEN.sub(lambda _: reference(), README.read_text())


if __name__ == "__main__":
    README.write_text(current())
