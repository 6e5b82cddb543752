"""Random prefix trees, and the batches of unpacked rows that they stand for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64


def draw_tree(draw: random.Random, depth: int, longest: int = 12) -> Any:
    """Return a tree of at most so many levels."""
    lengths = (1, 2, 3, longest // 2, longest)
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice(lengths))]
    if depth == 1:
        return tokens
    children = [draw_tree(draw, depth - 1, longest) for _ in range(draw.choice((0, 1, 2, 3)))]
    counts = [draw.random() < 0.7 for _ in tokens]
    return (tokens, children, counts) if draw.random() < 0.5 else (tokens, children)


def draw_trees(seed: int, length: int, depth: int = 4) -> list[Any]:
    """Return trees that make a row of at most so many tokens."""
    draw = random.Random(seed)
    trees = [([draw.randrange(3, VOCABULARY) for _ in range(length // 3)], [[5, 6], [7]])]
    while True:
        tree = draw_tree(draw, draw.randint(1, depth))
        if num_stored([*trees, tree]) > length:
            return trees
        trees.append(tree)


def num_stored(trees: list[Any]) -> int:
    """Return the length of the row, at most: each node is its tokens and its head."""
    nodes = [node for tree in trees for node in _nodes(tree)]
    return sum(len(tokens) + 1 for tokens in nodes)


def _nodes(tree: Any) -> Iterator[list[int]]:
    tokens, children = tree[:2] if isinstance(tree, tuple) else (tree, ())
    yield tokens
    for child in children:
        yield from _nodes(child)


def unpacked(trees: list[Any]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and labels of each answer with its own copy of all before it."""
    return [row for tree in trees for row in _rows(tree, [], [], True)]


def _rows(
    tree: Any, ids: list[int], labels: list[int], is_root: bool
) -> Iterator[tuple[list[int], list[int]]]:
    tokens, children, *counts = tree if isinstance(tree, tuple) else (tree, ())
    counted = counts[0] if counts else [not is_root] * len(tokens)
    ids = ids + list(tokens)
    labels = labels + [one if is_on else -100 for one, is_on in zip(tokens, counted, strict=True)]
    if not children:
        yield ids, [-100, *labels[1:]]
    for child in children:
        yield from _rows(child, ids, labels, False)


def places_of_rows(batch: dict[str, Tensor]) -> list[list[int]]:
    """Return the places of the tokens of each unpacked row, read from the table of a packed one.

    A row ends with a token that no other token sees.
    """
    ends = batch["attention_mask"][0, 0, 0].tolist()
    last = [at for at, end in enumerate(ends) if end == at + 1]
    return [[at for at in range(one + 1) if ends[at] > one] for one in last]


def unpacked_batch(trees: list[Any]) -> dict[str, Tensor]:
    """Return the unpacked rows, padded at their ends, where a causal model does not look."""
    rows = unpacked(trees)
    length = max(len(ids) for ids, _ in rows)
    return {
        "ids": torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (length - len(ids)) for ids, labels in rows]),
    }
