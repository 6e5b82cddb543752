"""What messages are made of: heads of many ranks as one rule, and what a rank sends itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cp_inductor.graph.record_layout import Field, lay_out
from cp_inductor.plan import Span, backward_plan, forward_plan
from cp_inductor.plan.planner import Recipe, resolve
from cp_inductor.run.own_transfers import fetch_of, home_of
from cp_inductor.run.records import Groups


def spans(*pairs: tuple[int, int]) -> list[Span]:
    return [Span(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("heads", "groups", "whole"),
    [
        (spans((2, 4)), Groups(2, 2, 2, 1), Span(2, 4)),
        (spans((0, 2), (2, 4), (4, 6)), Groups(0, 2, 2, 3), Span(0, 6)),
        (spans((1, 2), (5, 6), (9, 10)), Groups(1, 1, 4, 3), Span(0, 12)),
        (spans((0, 1), (0, 1), (1, 2), (1, 2)), Groups(0, 1, 1, 2, 2), Span(0, 2)),
        (spans((3, 5), (3, 5)), Groups(3, 2, 2, 1, 2), Span(3, 5)),
    ],
)
def test_heads_that_follow_a_rule(heads: list[Span], groups: Groups, whole: Span) -> None:
    assert Groups.of(heads) == groups
    assert groups.whole == whole


@pytest.mark.parametrize(
    "heads",
    [
        spans((0, 1), (1, 3)),
        spans((0, 1), (2, 3), (3, 4)),
        spans((0, 1), (0, 1), (1, 2)),
        spans((2, 3), (0, 1)),
        spans((0, 2), (1, 3)),
        spans((3, 5), (7, 9)),  # the groups are not within steps that are counted from 0
    ],
)
def test_heads_that_follow_none(heads: list[Span]) -> None:
    assert Groups.of(heads) is None


@pytest.mark.parametrize(
    ("dtype", "starts", "stop", "width"),
    [
        (torch.bfloat16, (0, 30, 36), 38, 40),  # statistics begin where they can be read
        (torch.float32, (0, 30, 33), 34, 36),
    ],
)
def test_where_the_numbers_of_a_token_stand(
    dtype: torch.dtype, starts: tuple[int, ...], stop: int, width: int
) -> None:
    fields = [Field((3, 10), dtype), Field((3,), torch.float32), Field((1,), torch.float32)]
    layout = lay_out(fields, dtype, 16 // torch.float32.itemsize)
    assert (layout.starts, layout.stop, layout.width) == (starts, stop, width)
    odd = lay_out([Field((1, 5), dtype), *fields[1:]], dtype)
    assert odd.starts[1] == (6 if dtype is torch.bfloat16 else 5)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("strategy", ["heads", "heads2+blocks", "blocks", "ring", "rows"])
def test_what_a_rank_sends_itself(strategy: str, stages: int) -> None:
    """Its own chunks alone, each result once; all of its results where ranks share the heads."""
    recipe = resolve(
        Recipe(4, 256, 256, 4, 2, 16, 2, "causal", strategy=strategy, stages=stages), site="test"
    )
    for plan in (forward_plan(recipe), backward_plan(recipe)):
        for rank in range(4):
            own, num_stages = plan.grid.own(rank), len(plan.stages)
            fetched = [t for i in range(num_stages) for t in fetch_of(plan, rank, i)]
            results = [t for i in range(num_stages) for t in home_of(plan, rank, i)]
            to_itself = [t for t in (*fetched, *results) if t.source == t.destination]
            assert all(t.source == rank and t.span.intersect(own) == t.span for t in to_itself)
            sent = Counter(
                (t.payload, t.heads, chunk)
                for t in results
                if t.source == t.destination
                for chunk in range(t.span.start, t.span.stop)
            )
            assert set(sent.values()) <= {1}
            if strategy == "heads":
                assert {chunk for _, _, chunk in sent} == set(range(own.start, own.stop))
            if not strategy.startswith("heads"):
                assert not sent
