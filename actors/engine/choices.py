"""Answers bound to a list of labels: the trie of their tokens says which token may come next.

A row ends as soon as one label alone is left: the rest of its tokens is certain and is not computed. Where a
label is the beginning of another, the model's end token stands for stopping there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from actors.engine.errors import UserError


@dataclass
class Node:
    """A place in the trie. label: the one whose tokens end here. only: the one label at or below, if it is one."""

    children: dict[int, Node] = field(default_factory=dict)
    label: int | None = None
    only: int | None = None


class ChoiceTrie:
    """labels: token ids of each label, at least one. end_id: token that ends an answer, None if the model has none.

    Raises ValueError, naming labels by their number, for what cannot be told apart.
    """

    def __init__(self, labels: Sequence[Sequence[int]], end_id: int | None) -> None:
        if not labels:
            raise UserError("no choices")
        self.end_id = end_id
        self.root = Node()
        for number, tokens in enumerate(labels):
            if not tokens:
                raise UserError(f"choice {number} has no tokens")
            if end_id in tokens:
                raise UserError(f"choice {number} holds the token that ends an answer")
            node = self.root
            for token in tokens:
                node = node.children.setdefault(token, Node())
            if node.label is not None:
                raise UserError(f"choices {node.label} and {number} are the same tokens")
            node.label = number
        self.most_tokens = max(1, self._settle())

    def _settle(self) -> int:
        """Find where one label alone is left; returns the most tokens that are drawn."""
        order = [self.root]
        for node in order:  # parents before children; without recursion, for a label may be long
            order += node.children.values()
        deepest: dict[int, int] = {}
        for node in reversed(order):
            if node.label is not None and node.children and self.end_id is None:
                raise UserError(f"choice {node.label} is the beginning of another, and the model has no end token")
            found = {child.only for child in node.children.values()}
            if node.label is not None:
                found.add(node.label)
            node.only = found.pop() if len(found) == 1 else None
            below = max((1 + deepest[id(child)] for child in node.children.values()), default=0)
            deepest[id(node)] = 0 if node.only is not None else max(below, 1)
        return deepest[id(self.root)]

    def allowed(self, node: Node) -> Collection[int]:
        """Tokens that may come next."""
        if node.label is None:
            return node.children.keys()
        assert self.end_id is not None
        return [*node.children, self.end_id]

    def follow(self, node: Node, token: int) -> tuple[Node, int | None]:
        """The place behind an allowed token, and the label if that settles it."""
        if token == self.end_id:
            assert node.label is not None
            return node, node.label
        below = node.children[token]
        return below, below.only
