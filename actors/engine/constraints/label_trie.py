"""Restricts answers to a list of labels, with a trie (prefix tree) of the labels' tokens.

A row ends as soon as only one label is possible, because the label's remaining tokens are certain. If a label is a
prefix of another label, any of the model's end tokens chooses the shorter label: a chat model may end its turn with
another token than the tokenizer's EOS.

A label's share of the probability of all labels is not computed, because every token of every label, and its end, would
need a forward pass. For Banking77's 77 labels (305 tokens) that took more than twice the time of the labelling job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from actors.engine.constraints.constraint import Bits
from actors.engine.errors import UserError


@dataclass
class Node:
    children: dict[int, Node] = field(default_factory=dict)  # next token -> its node
    label: int | None = None  # index of the label whose last token leads to this node
    only: int | None = None  # index of the only label that can be reached from this node; None if several can


class ChoiceTrie:
    """A trie of the labels that may be a row's answer; see `Constraint` for the methods.

    Args:
        labels: Token ids of each label. There must be at least one label.
        end_ids: Tokens that end an answer; None among them is ignored.
        texts: The labels' texts, which `text` returns.

    Raises:
        UserError: There are no labels, or two labels cannot be distinguished. The message gives their indices.
    """

    name = "choices"

    def __init__(
        self, labels: Sequence[Sequence[int]], end_ids: Collection[int | None], texts: Sequence[str] = ()
    ) -> None:
        if not labels:
            raise UserError("no choices")
        self.end_ids, self.texts = [token for token in end_ids if token is not None], texts
        self.root = Node()
        for number, tokens in enumerate(labels):
            if not tokens:
                raise UserError(f"choice {number} has no tokens")
            if not set(tokens).isdisjoint(self.end_ids):
                raise UserError(f"choice {number} contains a token that ends an answer")
            node = self.root
            for token in tokens:
                node = node.children.setdefault(token, Node())
            if node.label is not None:
                raise UserError(f"choices {node.label} and {number} have the same tokens")
            node.label = number
        self.most_tokens = max(1, self._settle())

    def _settle(self) -> int:
        """Set `only` of every node, and return the maximum number of tokens in an answer."""
        order = [self.root]
        for node in order:  # parents before children; a loop, because a long label could make recursion too deep
            order += node.children.values()
        deepest: dict[int, int] = {}
        for node in reversed(order):
            if node.label is not None and node.children and not self.end_ids:
                raise UserError(f"choice {node.label} is the start of another choice, and the model has no end token")
            labels = {child.only for child in node.children.values()}
            if node.label is not None:
                labels.add(node.label)
            node.only = labels.pop() if len(labels) == 1 else None
            below = max((1 + deepest[id(child)] for child in node.children.values()), default=0)
            deepest[id(node)] = 0 if node.only is not None else max(below, 1)
        return deepest[id(self.root)]

    def begin(self) -> LabelProgress:
        return LabelProgress(self)

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        """Return the label's text, or no text if the row ended before it chose a label."""
        return "" if label is None else self.texts[label]

    def lark(self, eos: int) -> str:
        """Return a grammar for llguidance of the labels' tokens, which ends as soon as only one label is possible.

        llguidance allows the token `eos` where an answer may end. All other end tokens must be part of the grammar.
        """
        rules, nodes = [], [self.root]
        for number, node in enumerate(nodes):  # the list grows in the loop
            ways = [f"<[{token}]>" for token in self.end_ids if node.label is not None and token != eos]
            for token, child in node.children.items():
                if child.only is not None:
                    ways.append(f"<[{token}]>")
                else:
                    ways.append(f"<[{token}]> n{len(nodes)}")
                    nodes.append(child)
            rules.append(f"n{number}: ({' | '.join(ways)}){'' if node.label is None else '?'}")
        return "\n".join(['%llguidance {"no_forcing": true}', "start: n0", *rules])


class LabelProgress:
    """The node of the trie that a row's tokens have reached; see `AllowedTokens` for the methods."""

    scored = True
    error = None

    def __init__(self, trie: ChoiceTrie) -> None:
        self.trie, self.node = trie, trie.root
        self.label: int | None = None

    @property
    def ends(self) -> Sequence[int]:
        return () if self.node.label is None else self.trie.end_ids

    def allows(self, token: int) -> bool:
        return token in self.node.children or token in self.ends

    def write(self, bits: Bits) -> None:
        bits[:] = 0
        masks = bits.view("uint32")
        for token in (*self.node.children, *self.ends):
            masks[token // 32] |= 1 << token % 32

    def advance(self, token: int) -> bool:
        if token in self.trie.end_ids:
            self.label = self.node.label
        else:
            self.node = self.node.children[token]
            self.label = self.node.only
        return self.label is not None

    def is_complete(self) -> bool:
        return self.label is not None
