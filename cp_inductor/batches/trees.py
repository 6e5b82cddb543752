"""Pack prompts with several answers, and trees of turns, into one row: each token once.

    ([p1 p2 p3], [[a1 a2], [b1]])       a prompt and its answers a and b, b after the prompt, not a
      =>
    row            0  1  2  3  4  5  6
    input_ids     p1 p2 p3 a1 a2 p3 b1        p3 heads each branch: from it, a1 and b1 are predicted
    position_ids   0  1  2  3  4  2  3        as in (p1 p2 p3 a1 a2) and (p1 p2 p3 b1)
    ends           7  7  5  5  5  7  7        a token is seen by the tokens from it to here
    labels         .  .  . a1 a2  . b1

**One table is the tree.** The row is a depth-first walk, so a token lies on the path to all tokens
of its branch and what grows from it, which are those up to where the walk leaves the branch: key k
is visible to query q if k <= q < ends[k]. This costs the same at every depth.

**The last token of a prompt is repeated at the head of each branch, and not stored before.** It has
several successors, and a row of logits has one label. Its copies have its position, see what it
saw, and are seen by their branch only, so each computes exactly what it computes in an unpacked
row. Labels are then labels of any packed row: logits at i - 1 predict token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_inductor.errors import InvalidArgument

IGNORED_LABEL = -100
SPANS = "spans"
MOST = 1 << 63  # ids are int64


@dataclass
class _Node:
    """A node of a tree, while the row grows.

    Attributes:
        tokens, counts, children: as given; counts say which of the tokens have labels.
        tree, number: of the node, numbered depth first in its tree.
        head: the last token of the path to the node, with which its part of the row begins; empty
            if there is none.
        position: of the first token of its part.
        begin, stored: where its own tokens begin in the row, and where its part ends; the rest of
            its own tokens, at most one, heads its children's.
        end: where the walk leaves it.
        leaves: how many answers end in it or below.
    """

    tokens: list[int]
    counts: list[bool]
    children: list[Any]
    tree: int
    number: int
    head: list[int]
    position: int
    begin: int = 0
    stored: int = 0
    end: int = 0
    leaves: int = 0


def pack_prefix_trees(trees: Sequence[Any], *, vocab_size: int | None = None) -> dict[str, Tensor]:
    """Pack trees of tokens into one row for a model that `accept_prefix_trees` has prepared.

        batch = cp_inductor.pack_prefix_trees([([1, 2, 3], [[4, 5], [6]])])

    Args:
        trees: each a node: ``(tokens, children)``, or ``tokens`` alone, an answer, which has no
            children; tokens are a list of ids or a tensor (n,). Children are nodes, so that a tree
            may have any depth: a prompt with answers has two levels, the turns of an agent have
            more. A third entry, ``(tokens, children, counts)``, says for each token whether it has
            a label. Without it, all tokens have one but those of the root, which is the prompt.
        vocab_size: of the model: larger ids are refused here, on every rank. In the model they stop
            the rank that has them, and the others wait for it. None takes all.

    Returns:
        Of S tokens in all,

        - ``input_ids``, ``position_ids`` (1, S), int64.
        - ``attention_mask`` (1, 1, 2, S), int32: where the walk leaves each token's branch, and the
          positions. A stock attention refuses this dtype.
        - ``labels`` (1, S), int64: a token's own id, or -100, as models of causal language take
          them. Logits at i - 1 predict token i. The first token of a tree has none.
        - ``weights`` (1, S), float32: how many unpacked rows hold the token, which is the answers
          that grow from its node; 0 for a copy. The sum of weights times losses of the tokens is
          the sum of losses of the unpacked batch.
        - ``spans`` (N, 4), int64: of each node the tree, its number in a depth-first walk of the
          tree, the root being 0, and the begin and end of its own tokens in the row. With labels,
          `token_logprobs(...)[0, begin:end]` are the log-probabilities of an answer.

        The last two are not for the model.

    Raises:
        InvalidArgument: a node is none of these, it has other ids, or there are no tokens.
    """
    ids: list[int] = []
    positions: list[int] = []
    nodes: list[_Node] = []
    every = _entries(trees)
    if every is None:
        raise _refusal("a list of trees", _kind(trees), "give [(prompt, answers), ...]")
    for number, tree in enumerate(every):
        _walk(tree, vocab_size or MOST, number, ids, positions, nodes)
    if not ids:
        raise _refusal("at least one token", "none", "leave empty trees out")
    row, places = torch.tensor(ids), torch.tensor(positions)
    ends, weights = torch.empty_like(row), torch.zeros(len(ids))
    is_counted = torch.zeros(len(ids), dtype=torch.bool)
    for node in nodes:
        ends[node.begin - len(node.head) : node.stored] = node.end
        own = slice(node.begin, node.begin + len(node.tokens))
        weights[own] = node.leaves
        is_counted[own] = torch.tensor(node.counts, dtype=torch.bool)
    spans = [(one.tree, one.number, one.begin, one.begin + len(one.tokens)) for one in nodes]
    return {
        "input_ids": row[None],
        "position_ids": places[None],
        # Not int64, whose differences may wrap: windows would be read as tables of pairs.
        "attention_mask": torch.stack([ends, places])[None, None].int(),
        "labels": torch.where(is_counted & (places > 0), row, IGNORED_LABEL)[None],
        "weights": weights[None],
        SPANS: torch.tensor(spans),
    }


def is_tables(value: Any) -> bool:
    """Whether an `attention_mask` is the tables of trees: int32, (B, 1, 2, S)."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.dtype == torch.int32


def pad_tables(tables: Tensor, num_tokens: int) -> Tensor:
    """Add trees of one token each to a row."""
    length = tables.shape[-1]
    ends = torch.arange(length + 1, length + 1 + num_tokens).to(tables)
    padding = torch.stack([ends, torch.zeros_like(ends)])[None, None]
    return torch.cat([tables, padding.expand(len(tables), -1, -1, -1)], -1)


def _walk(
    tree: Any,
    most: int,
    number: int,
    ids: list[int],
    positions: list[int],
    nodes: list[_Node],
) -> None:
    """Add the tokens of a tree to a row, depth first; without recursion, as trees may be deep."""
    root = _node(tree, most, number, 0, [], 0)
    root.counts = root.counts or [False] * len(root.tokens)
    path, first = [root], len(nodes)
    _open(root, ids, positions, nodes)
    while path:
        node = path[-1]
        if node.children:
            part = [*node.head, *node.tokens]
            child = _node(
                node.children.pop(),
                most,
                number,
                len(nodes) - first,
                part[-1:],
                node.position + max(0, len(part) - 1),
            )
            child.counts = child.counts or [True] * len(child.tokens)
            path.append(child)
            _open(child, ids, positions, nodes)
            continue
        path.pop()
        node.end = len(ids)
        if path:
            path[-1].leaves += node.leaves


def _open(node: _Node, ids: list[int], positions: list[int], nodes: list[_Node]) -> None:
    """Add the part of a node to a row: its head and its own tokens, less what its children get."""
    part = [*node.head, *node.tokens]
    node.begin = len(ids) + len(node.head)
    node.leaves = 0 if node.children else 1
    if node.children:
        part = part[:-1]
    ids += part
    positions += range(node.position, node.position + len(part))
    node.stored = len(ids)
    nodes.append(node)


def _node(given: Any, most: int, tree: int, number: int, head: list[int], position: int) -> _Node:
    site = f"node {number} of tree {tree}"
    entries = given if _has_children(given) else (given, ())
    tokens, children, *counts = [_entries(one) for one in entries]
    if tokens is None or not all(type(token) is int for token in tokens):
        remedy = "give tokens alone, or (tokens, children), where children are a list of nodes"
        raise _refusal(
            "a node, whose tokens are a list of whole numbers", _kind(given), remedy, site
        )
    beyond = [token for token in tokens if not 0 <= token < most]
    if beyond:
        expected = "ids from 0" + ("" if most == MOST else f" to {most - 1}")
        remedy = "tokenize for this model; -100 and the like are no ids"
        raise _refusal(expected, f"{beyond[0]}", remedy, site)
    if children is None:
        remedy = "give [] where there are none"
        raise _refusal("children that are a list of nodes", _kind(entries[1]), remedy, site)
    which = counts[0] if counts else []
    if which is None:
        raise _refusal("a list of counts", _kind(entries[-1]), "say 0 or 1 for each token", site)
    if counts and len(which) != len(tokens):
        got = f"{len(which)} counts of {len(tokens)} tokens"
        raise _refusal("a count for each token", got, "say 0 or 1 for each", site)
    which = [bool(one) for one in which]
    return _Node(tokens, which, children[::-1], tree, number, head, position)


def _has_children(given: Any) -> bool:
    is_pair = isinstance(given, tuple) and len(given) in (2, 3)
    return is_pair and not isinstance(given[0], int)


def _entries(given: Any) -> list[Any] | None:
    """Return what a list, a tuple or an array holds; None if it is none of these."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(given) if isinstance(given, (list, tuple)) else None


def _kind(given: Any) -> str:
    return f"{type(given).__name__} {given!r:.40}"


def _refusal(
    expected: str, got: str, remedy: str, site: str = "pack_prefix_trees"
) -> InvalidArgument:
    return InvalidArgument(site=site, expected=expected, got=got, remedy=remedy)
