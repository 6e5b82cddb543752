"""Pictures of plans: the area of a color is a rank's part of the pairs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from cp_inductor.mask.rule import Rule
from cp_inductor.plan import plan_attention
from cp_inductor.plan.batch import plan_batch
from cp_inductor.plan.picture import SIDE, draw, draw_batch

SVG = "{http://www.w3.org/2000/svg}"


def areas(picture: str) -> dict[str, float]:
    """Return the area of each color, as a part of the square."""
    found: dict[str, float] = {}
    for shape in ElementTree.fromstring(picture):
        color = shape.get("fill", "")
        if shape.tag == f"{SVG}rect" and shape.get("height") != "12":
            area = float(shape.get("width", 0)) * float(shape.get("height", 0))
        elif shape.tag == f"{SVG}polygon":
            (left, top), (_, bottom), _ = (
                map(float, corner.split(",")) for corner in shape.get("points", "").split()
            )
            area = (bottom - top) ** 2 / 2
            assert left < SIDE * 2
        else:
            continue
        if shape.get("class") is None:
            found[color] = found.get(color, 0.0) + area / SIDE**2
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("strategy", ["ring", "rows", "blocks"])
def test_areas_are_shares(strategy: str, mask: str, layout: str) -> None:
    plan = plan_attention(
        seq_len=4096, world_size=4, num_heads=8, head_dim=64, mask=mask, strategy=strategy,
        layout=layout,
    )  # fmt: skip
    found = areas(draw(plan))
    shares = [plan.num_pairs_of(rank) / 4096**2 for rank in range(4)]
    assert sorted(found.values()) == pytest.approx(sorted(shares), abs=2e-3)


def test_a_head_is_drawn_where_it_is_computed() -> None:
    plan = plan_attention(
        seq_len=4096, world_size=4, num_heads=8, head_dim=64, strategy="heads", mask="full"
    )
    (first,), (last,) = areas(draw(plan)), areas(draw(plan, head=7))
    assert first != last
    assert areas(draw(plan))[first] == pytest.approx(1.0, abs=2e-3)


def test_what_a_rule_leaves_out_is_not_drawn() -> None:
    plan = plan_attention(
        seq_len=4096, world_size=4, num_heads=8, head_dim=64, mask="(k-q<=0)&(q-k-127<=0)"
    )
    assert sum(areas(draw(plan)).values()) < 0.2


def test_a_plan_of_a_batch_is_drawn() -> None:
    rule = Rule.parse("(k - q <= 0) & Eq(t0(b, q), t0(b, k))")
    numbers = np.repeat(np.arange(4), [700, 300, 24, 1024])[None]
    lengths = [512] * 4
    plan = plan_batch(
        rule,
        {0: numbers},
        batch=1,
        query_lengths=lengths,
        key_lengths=lengths,
        num_heads=4,
        num_kv_heads=2,
        stages=1,
    )
    picture = ElementTree.fromstring(draw_batch(plan))
    texts = ["".join(node.itertext()) for node in picture.iter() if node.tag.endswith("text")]
    assert sum(text.startswith("rank ") for text in texts) == 4
    colors = {node.get("fill") for node in picture.iter() if node.get("fill-opacity")}
    assert len(colors) == len(set(plan.rank.tolist()))
    # Every rank holds 512 tokens: three borders, of queries and of keys.
    assert sum(node.get("class") == "owner" for node in picture.iter()) == 6
