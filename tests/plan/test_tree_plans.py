"""Masks of prefix trees: the forms in docs/masks.md are read, and plans keep to their pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from benchmarks.prefix_trees import answers_of, needed_blocks, tree_of
from cp_inductor import pack_prefix_trees
from cp_inductor.mask.rule import Rule
from cp_inductor.passes.recognize_mask import recognize_mask
from cp_inductor.plan.batch import plan_batch

WINDOW = 200


def by_ends(place: Tensor, ends: Tensor) -> Tensor:
    return place[:, None] < ends[:, None, None]


def by_times(place: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    of_query, of_key = enter[:, None, :, None], enter[:, None, None]
    return (of_key <= of_query) & (of_query < leave[:, None, None])


def by_branches(place: Tensor, prompt: Tensor, branch: Tensor) -> Tensor:
    of_query, of_key = branch[:, None, :, None], branch[:, None, None]
    is_seen = (of_key == 0) | (of_query == of_key)
    return (prompt[:, None, :, None] == prompt[:, None, None]) & is_seen


def by_windows(place: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
    positions = positions.long()
    distance = positions[:, None, :, None] - positions[:, None, None]
    return by_ends(place, ends) & (distance < WINDOW)


def rule_of(
    form: Callable[..., Tensor], tables: list[Tensor]
) -> tuple[Rule, dict[int, np.ndarray]]:
    """Return what the compiler reads of a mask, causal and of a form, and the tables by number."""
    masks: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        node = next(n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        masks.append(node.kwargs["attn_mask"])
        return gm.forward

    def attend(query: Tensor, *tables: Tensor) -> Tensor:
        place = torch.arange(query.shape[2])
        mask = (place[:, None] >= place) & form(place, *tables)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    torch._dynamo.reset()
    torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)(
        torch.randn(1, 1, tables[0].shape[1], 8), *tables
    )
    found = recognize_mask(masks[0])
    # Inputs stand in the order of their first use, and are called L_tables_0_, L_tables_1_.
    given = [int(str(node.target).split("_")[2]) for node in found.tables]
    return found.rule, {number: tables[one].numpy() for number, one in enumerate(given)}


def tables_of(form: Callable[..., Tensor], trees: list[Any]) -> list[Tensor]:
    batch = pack_prefix_trees(trees)
    ends, positions = batch["attention_mask"][0, 0]
    is_head = torch.cat([torch.tensor([True]), (ends[1:] != ends[:-1]) | (positions[1:] == 0)])
    node = is_head.cumsum(0) - 1
    first = is_head.nonzero()[:, 0]
    if form is by_ends:
        return [ends[None]]
    if form is by_windows:
        return [ends[None], positions[None]]
    if form is by_times:
        # Nodes are numbered depth first: a branch is left for the first node behind it.
        behind = torch.searchsorted(first, ends)
        return [node[None], behind[None]]
    prompt = (positions == 0).cumsum(0)
    is_prompt = torch.isin(first, (positions == 0).nonzero()[:, 0])
    return [prompt[None], torch.where(is_prompt[node], 0, node)[None]]


@pytest.mark.parametrize("form", [by_ends, by_times, by_branches, by_windows])
def test_forms_of_a_tree(form: Callable[..., Tensor]) -> None:
    """They are the same mask, and blocks without pairs are left out."""
    trees = [tree_of(700 * n, answers_of(4, 250, n)) for n in range(1, 5)]
    length, world_size = 12 * 1024, 4
    trees.append(tree_of(length - sum(map(stored, trees)), []))
    tables = tables_of(form, trees)
    assert tables[0].shape[1] == length
    place = torch.arange(length)
    ends = tables_of(by_ends, trees)
    is_causal = place[:, None] >= place
    rows = slice(3000, 3400)
    seen = (is_causal & by_ends(place, *ends))[0, 0, rows]
    if form is by_windows:
        seen &= seen.flip(1).cumsum(1).flip(1) <= WINDOW  # the last ones of its branch
    assert torch.equal((is_causal & form(place, *tables))[0, 0, rows], seen)
    rule, of_rule = rule_of(form, tables)
    assert len(of_rule) == len(tables), rule  # the tables are those given, not one of pairs
    found = plan_batch(
        rule,
        of_rule,
        batch=1,
        query_lengths=[length // world_size] * world_size,
        key_lengths=[length // world_size] * world_size,
        num_heads=4,
        num_kv_heads=2,
        stages=2,
    )
    needed = needed_blocks(np.asarray(ends[0][0]))
    if form is by_windows:
        assert found.num_blocks <= needed / 2
        return
    assert needed <= found.num_blocks <= 1.1 * needed
    assert found.balance <= 1.05


def stored(tree: Any) -> int:
    return pack_prefix_trees([tree])["input_ids"].shape[1]
