"""Pictures of plans: the area of a color is a rank's part of the pairs, in a panel of heads."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan import Mask
from cp_inductor.plan.picture import Area, colors_of, panels_of
from tests.support import batch_plans
from tests.support.plans import make_plan


def area(one: Area) -> float:
    """Return how many pairs lie within a polygon."""
    x, y = np.array(one.corners).T
    return abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("strategy", ["ring", "rows", "blocks"])
def test_areas_are_shares(strategy: str, mask: str) -> None:
    plan = make_plan(4, 1024, 8, mask=mask, strategy=strategy)
    (panel,) = panels_of(plan)
    assert panel.title == "all heads"
    for rank in range(4):
        drawn = sum(area(one) for one in panel.areas if one.rank == rank)
        assert drawn == pytest.approx(plan.head_pairs[rank] / plan.shape.num_heads, rel=4e-3)


@pytest.mark.parametrize("strategy", ["heads", "heads_own", "heads2+blocks"])
def test_all_heads_are_drawn(strategy: str) -> None:
    plan = make_plan(4, 1024, 8, strategy=strategy, mask="full")
    panels = list(panels_of(plan))
    for panel in panels:  # of each head the whole square, by some rank
        assert sum(map(area, panel.areas)) == pytest.approx(4096**2)
    expected = {"heads": 4, "heads_own": 4, "heads2+blocks": 2}
    assert len(panels) == expected[strategy]
    assert panels[0].title.startswith("heads 0 to ") and panels[-1].title.endswith(" to 7")


def test_what_a_rule_leaves_out_is_not_drawn() -> None:
    plan = make_plan(4, 1024, 8, mask="(k-q<=0)&(q-k-127<=0)")
    areas = [one for panel in panels_of(plan) for one in panel.areas]
    assert sum(map(area, areas)) < 0.2 * len(list(panels_of(plan))) * 4096**2
    assert any(one.mask is Mask.PARTIAL for one in areas)


def test_the_picture_has_the_colors_of_all_ranks(tmp_path: Path) -> None:
    for strategy in ("blocks", "heads"):
        plan = make_plan(4, 1024, 8, strategy=strategy)
        for number, one in enumerate((plan, plan, plan.backward())):
            one.draw(tmp_path / f"{number}.svg")
        text, again, backward = ((tmp_path / f"{number}.svg").read_text() for number in range(3))
        assert text == again
        for drawn in (text, backward):
            assert all(color in drawn for color in colors_of(4)) and "hsl" not in drawn


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_plan_of_a_batch_is_drawn(num_groups: int, tmp_path: Path) -> None:
    numbers = np.repeat(np.arange(4), [700, 300, 24, 1024])[None]
    how = {"stages": 1, "num_groups": num_groups}
    plan = batch_plans.plan(batch_plans.DOCUMENTS, {0: numbers}, [512] * 4, **how)
    plan.draw(tmp_path / "batch.svg")
    text = (tmp_path / "batch.svg").read_text()
    for rank in sorted(set(plan.rank.tolist())):
        assert colors_of(4)[rank] in text
        assert f"rank {rank}: " in text
    assert text.count("of heads") == (0 if num_groups == 1 else 2)


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(2, 256, 2)
    with pytest.raises(InvalidArgument, match=r"ends in \.png or \.svg, got .*plan\.gif"):
        plan.draw(tmp_path / "plan.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'cp-inductor\[draw\]'"):
        plan.draw(tmp_path / "plan.png")
