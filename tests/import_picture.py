"""Draw the imports between the packages of `pipeline/` into its README.

    .venv/bin/python tests/import_picture.py    # rewrites the picture in pipeline/README.md

An arrow goes from the importing package to the imported one. Arrows that follow from others (a -> b -> c implies
a -> c) are left out of the picture and counted in its caption.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import grimp

README = Path(__file__).parents[1] / "pipeline" / "README.md"
BETWEEN = re.compile(r"(?<=<!-- imports -->\n).*?(?=<!-- /imports -->)", re.S)
COMMON = {"config", "messages", "storage"}  # imported by almost all packages: in the caption, not in the picture


def package_imports() -> dict[str, set[str]]:
    """Package of `pipeline` -> packages of `pipeline` that it imports. `__init__` and `__main__` are left out."""
    graph = grimp.build_graph("pipeline", "actors")
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        parts = module.split(".")
        if parts[0] != "pipeline" or len(parts) < 2 or parts[1] == "__main__":
            continue
        imported = imports.setdefault(parts[1], set())
        for other in graph.find_modules_directly_imported_by(module):
            names = other.split(".")
            if names[0] == "pipeline" and len(names) > 1 and names[1] != parts[1]:
                imported.add(names[1])
    return imports


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Packages that `start` imports, directly or through others."""
    reached: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        package = waiting.pop()
        if package not in reached:
            reached.add(package)
            waiting += imports[package]
    return reached


def cycles(imports: dict[str, set[str]]) -> int:
    """Number of packages that import themselves through others."""
    return sum(package in reachable(imports, package) for package in imports)


def picture(imports: dict[str, set[str]]) -> str:
    """The Mermaid diagram with its caption, as it stands in the README."""
    arrows = sum(len(imported) for imported in imports.values())
    lines = ["```mermaid", "flowchart TD"]
    for package in sorted(imports.keys() - COMMON):
        direct = imports[package] - COMMON
        implied = set().union(*(reachable(imports, other) for other in direct)) if direct else set()
        lines += [f"    {package} --> {other}" for other in sorted(direct - implied)]
    lines += ["```", ""]
    lines.append(
        f"{len(imports)} packages, {arrows} arrows, {cycles(imports)} packages in a cycle. Not drawn: arrows that"
    )
    lines.append(f"others imply, and `{'`, `'.join(sorted(COMMON))}`, which almost every package imports.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path[0] = str(README.parents[1])  # else tests/pipeline is found in place of the package
    text = README.read_text()
    README.write_text(BETWEEN.sub(lambda _: picture(package_imports()), text))
