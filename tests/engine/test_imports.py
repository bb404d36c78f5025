"""No modules of actors/ import each other in a cycle, nor for type hints. Of pipeline/ the import contracts say so."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_modules_of_actors_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("actors")
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()
