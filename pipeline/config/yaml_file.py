"""YAML text -> plain values: safe-loaded, no key twice, no small text that stands for a huge tree."""

from __future__ import annotations

import re
from typing import Any

import yaml

from actors.engine.errors import UserError
from pipeline.messages import without_secrets

NODES = 100_000  # of the whole tree, aliases written out


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 and 1.5e5 for text, as nobody means them."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _written_out(node, {})  # before merge keys are worked in
        return node


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what `_Loader` would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def parse(text: str) -> Any:
    """The values of a YAML document. ValueError of one line if it is none, or could take too much memory."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UserError("nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(without_secrets(" ".join(str(error).split()))) from None
    except (AttributeError, LookupError, TypeError) as error:  # PyYAML's own, of such as `!!bool x`
        raise UserError(f"a tag does not fit its value ({type(error).__name__})") from None


def dump(values: dict[str, Any]) -> str:
    """YAML that `parse` reads back as the same values."""
    for readable in (True, False):  # a few characters do not survive unless all are escaped
        text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=readable, width=120)
        if yaml.load(text, Loader=_Loader) == values:
            break
    return text


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Nodes of a tree, each alias counted with all that it stands for."""
    size = known.get(id(node))
    if size is not None:
        if size == 0:
            raise UserError(f"line {node.start_mark.line + 1}: holds itself, by an alias")
        return size
    known[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        _refuse_twins(node)
    size = 1
    for one in node.value if isinstance(node, yaml.CollectionNode) else ():
        size += sum(_written_out(half, known) for half in one) if isinstance(one, tuple) else _written_out(one, known)
    if size > NODES:
        raise UserError(f"more than {NODES:,} values once its aliases are written out")
    known[id(node)] = size
    return size


def _refuse_twins(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise UserError(f"line {key.start_mark.line + 1}: {key.value} is there twice; leave one out")
            seen.add(key.value)
