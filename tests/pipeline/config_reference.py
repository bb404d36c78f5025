"""Write every key of every file, with its type, default and unit, into configs/README.md, from the config models.

.venv/bin/python tests/pipeline/config_reference.py    # rewrites the tables in configs/README.md
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from pydantic import BaseModel

from pipeline.config.base import Section
from pipeline.config.reference import FILES, default_of, in_list, kind_of, section_of

README = Path(__file__).parents[2] / "configs" / "README.md"
BETWEEN = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.S)


def rows(model: type[Section], seen: dict[tuple[type, str], str], path: str = "") -> tuple[list[str], set[str]]:
    """The lines of a section's keys and of the sections below it, and the sections that list further keys of it.

    seen: the section in which a key of a class has been listed; such keys are left out, and those of this one added.
    """
    here, below, others = [], [], set()
    for name, field in model.model_fields.items():
        dotted = f"{path}{name}{'[]' * in_list(field)}"
        default = default_of(field).replace("|", r"\|")
        text = (field.description or "").replace("|", r"\|").replace("\n", " ")
        section = section_of(field.annotation)
        if section is not None:
            lines, elsewhere = rows(section, seen, f"{dotted}.")
            if not text and section.__doc__ != BaseModel.__doc__:
                text = (section.__doc__ or "").strip().partition("\n")[0]
            if elsewhere:
                keys = "further keys" if any(line.startswith(f"| `{dotted}.") for line in lines) else "keys"
                text = f"{text.rstrip('.')}; {keys} as in {' and '.join(sorted(elsewhere))} of job files".removeprefix(
                    "; "
                )
            state = "`required`" if default == "required" else ""
            below += [f"| **`{dotted}`** | section | {state} | {text} |", *lines]
            continue
        owner = next(one for one in model.__mro__ if name in inspect.get_annotations(one))
        if (owner, name) in seen:
            others.add(seen[owner, name])
            continue
        seen[owner, name] = f"`{path.rstrip('.')}`"
        kind = kind_of(field.annotation).replace("|", r"\|")
        here.append(f"| `{path}{name}` | {kind} | {'' if default == '-' else f'`{default}`'} | {text} |")
    return [*here, *below], others


def reference() -> str:
    """The generated part of configs/README.md."""
    lines: list[str] = []
    seen: dict[tuple[type, str], str] = {}
    for title, model in FILES.items():
        lines += ["", f"### {title}", "", "| key | type | default | meaning and unit |", "|---|---|---|---|"]
        lines += rows(model, seen)[0]
    return "\n".join(lines) + "\n\n"


def current() -> str:
    """The README with the tables as the models give them."""
    return BETWEEN.sub(lambda _: reference(), README.read_text())


if __name__ == "__main__":
    README.write_text(current())
