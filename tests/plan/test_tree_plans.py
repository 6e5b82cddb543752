"""Masks of two tables, as in examples/prefix_trees.py: they are read and planned by pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cp_inductor.passes.recognize_mask import read_mask
from cp_inductor.plan.batch import BLOCK, plan_batch
from tests.support.examples import import_example

pytest.importorskip("transformers")

RANKS, ANSWERS = 4, (130, 250, 371, 190)


def test_a_tree_is_planned_by_its_two_tables() -> None:
    """Ranks compute the blocks that hold pairs, and few others, in equal parts."""
    trees = [([0] * 700 * n, [([0] * length, []) for length in ANSWERS]) for n in range(1, 5)]
    batch = import_example("prefix_trees").collate(trees)
    tables = [batch[name] for name in ("enter", "leave")]
    lengths = [len(part) for part in torch.arange(tables[0].shape[1]).tensor_split(RANKS)]
    masks: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        node = next(n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        masks.append(node.kwargs["attn_mask"])
        return gm.forward

    def attend(query: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
        place = torch.arange(query.shape[2])
        of_query, of_key = enter[:, None, :, None], enter[:, None, None]
        mask = (of_key <= of_query) & (of_query < leave[:, None, None]) & (place <= place[:, None])
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    query = torch.randn(1, 1, sum(lengths), 8)
    torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)(query, *tables)
    found = read_mask(masks[0])[0]
    names = [str(node.target) for node in found.tables]  # L_enter_, L_leave_; not one of pairs
    read = {n: batch[name.split("_")[1]].numpy() for n, name in enumerate(names)}
    assert len(read) == 2, found.rule
    plan = plan_batch(
        found.rule,
        read,
        batch=1,
        query_lengths=lengths,
        key_lengths=lengths,
        num_heads=4,
        num_kv_heads=2,
        stages=2,
    )
    # A key is seen until the walk leaves its node: by whole blocks of queries, one below another.
    enter, leave = (table[0].numpy() for table in tables)
    last = np.searchsorted(enter, leave) - 1
    edges = np.arange(0, len(enter), BLOCK)
    needed = int((np.maximum.reduceat(last, edges) // BLOCK - np.arange(len(edges)) + 1).sum())
    assert needed <= plan.num_blocks <= 1.1 * needed
    assert plan.balance <= 1.1
