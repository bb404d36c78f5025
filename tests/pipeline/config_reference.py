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


def tables(model: type[Section], seen: dict[tuple[type, str], str], path: str = "") -> list[str]:
    """Return the lines of a section's table, and after it those of the sections below it.

    seen: the section in which a key of a class has been listed; such keys are left out, and those of this one added.
    """
    new, others, below = [], set(), []
    for name, field in model.model_fields.items():
        if name in model.removed:
            continue
        section = section_of(field.annotation)
        if section is not None:
            dotted = f"{path}{name}"
            mark = "[]" * in_list(field)
            purpose = field.description or (section.__doc__ or "").strip().partition("\n")[0]
            purpose = "" if section.__doc__ == BaseModel.__doc__ else purpose
            state = "required" if field.is_required() else "optional"
            below += ["", f"**`{dotted}{mark}`**: {state}. {purpose}".rstrip(), ""]
            below += tables(section, seen, f"{dotted}{mark}.")
            continue
        owner = next(one for one in model.__mro__ if name in inspect.get_annotations(one))
        if (owner, name) in seen:
            others.add(seen[owner, name])
            continue
        seen[owner, name] = path.rstrip(".")
        text = (field.description or "").replace("|", r"\|").replace("\n", " ")
        kind = kind_of(field.annotation).replace("|", r"\|")
        default = default_of(field).replace("|", r"\|")
        new.append(f"| `{path}{name}` | {kind} | {'' if default == '-' else f'`{default}`'} | {text} |")
    named = " and ".join(f"`{one}`" for one in sorted(others))
    head = [f"{'Further' if new else 'All'} keys as in the section {named} of job files.", ""] if others else []
    table = ["| key | type | default | meaning and unit |", "|---|---|---|---|", *new] if new else []
    return [*(head if new else head[:1]), *table, *below]


def reference() -> str:
    """The generated part of configs/README.md."""
    lines: list[str] = []
    seen: dict[tuple[type, str], str] = {}
    for title, model in FILES.items():
        lines += ["", f"### {title}", "", *tables(model, seen)]
    return "\n".join(lines) + "\n\n"


def current() -> str:
    """The README with the tables as the models give them."""
    return BETWEEN.sub(lambda _: reference(), README.read_text())


if __name__ == "__main__":
    README.write_text(current())
