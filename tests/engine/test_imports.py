"""No modules of actors/ import each other in a cycle; imports for type hints count."""

from __future__ import annotations

import grimp
from import_picture import cycles


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("actors")
    assert cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == 0
