"""No modules of actors/, and no packages of pipeline/, import each other in a cycle; imports for type hints count."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_modules_of_actors_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("actors")
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


def test_no_packages_of_pipeline_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("pipeline")
    imports = defaultdict[str, set[str]](set)
    for module in graph.modules:
        names = [one.split(".")[1:2] for one in (module, *graph.find_modules_directly_imported_by(module))]
        for name in names[0]:
            imports[name] |= {other for (other,) in filter(None, names) if other != name}
    assert len(imports) > 20
    TopologicalSorter(imports).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({**imports, "config": {"cli"}}).prepare()
