"""A report as a page: what it says, what it draws, and that it needs no network."""

from __future__ import annotations

import base64
import re
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan import Mask
from cp_inductor.plan.picture import Area, colors_of, panels_of
from tests.support import batch_simulate
from tests.support.plans import make_plan

pytest.importorskip("matplotlib")

from cp_inductor import Report, explain
from cp_inductor.__main__ import main
from cp_inductor.inspect.page import bytes_between, held_bytes
from cp_inductor.plan.ir import DESTINATION
from tests.examples_of_models import mixed
from tests.support.packed import in_documents
from tests.support.ranks import fake_mesh


def pictures(page: str) -> list[np.ndarray]:
    """Return the pictures in a page, (height, width, 4)."""
    from matplotlib.image import imread

    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [imread(BytesIO(base64.b64decode(data))) for data in found]


def written(report: Report, folder: Path) -> str:
    report.html(folder / "report.html")
    page = (folder / "report.html").read_text()
    assert not re.search(r"<script|<(link|iframe)|src=\"http", page)
    assert len(page) < 500_000
    return page


def test_what_the_page_says_and_draws(tmp_path: Path) -> None:
    with fake_mesh(1, 4) as mesh:
        heads = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16)
        report = explain(mixed, heads, heads, heads, mesh=mesh, target="h100")
    page = written(report, tmp_path)
    about = [("model", "mixed"), ("target", "h100"), ("world", "4 ranks; 4 on axis 'cp'")]
    about += [("machine", "gpu:ib400"), ("written", r"20[^<]+ UTC, torch \d")]
    for name, value in about:
        assert re.search(f"<td>{name}</td><td>{value}", page), name
    assert page.index("<td>written</td>") < page.index("sdpa_0")
    assert '<h2 class="refused">sdpa_1 (examples_of_models.py:17)</h2>' in page
    assert "expected   attn_mask=None over plain shards" in page
    assert len(pictures(page)) == 3
    assert page.count('class="chosen"') == 1


def test_documents_have_a_picture(tmp_path: Path) -> None:
    with fake_mesh(1, 4) as mesh:
        heads = distribute_tensor(torch.zeros(1, 4, 256, 32), mesh, [Shard(2)])
        documents = distribute_tensor(torch.zeros(1, 256, dtype=torch.long), mesh, [Shard(1)])
        with implicit_replication():
            report = explain(in_documents, heads, heads, heads, documents)
    page = written(report, tmp_path)
    assert "planned once per batch" in page
    tiles, *_ = pictures(page)
    assert len(np.unique(tiles.reshape(-1, 4), axis=0)) > 4


@pytest.mark.parametrize("strategy", ["auto", "heads2+blocks", "rows"])
def test_what_is_drawn_is_what_the_plan_costs(strategy: str) -> None:
    plan = make_plan(4, 256, 8, 4, strategy=strategy)
    for one in (plan, plan.backward()):
        held = np.zeros((len(one.stages), 4))
        for now, rank in np.ndindex(held.shape):
            for index, stage in enumerate(one.program(rank)):
                # What has come, what is coming, and what goes.
                if index <= now + 1:
                    is_for_rank = stage.fetch.columns[:, DESTINATION] == rank
                    held[now, rank] += one.bytes_of(stage.fetch)[is_for_rank].sum()
                if now - 1 <= index <= now:
                    held[now, rank] += one.bytes_of(stage.home).sum()
        np.testing.assert_array_equal(held_bytes(one), held)
        received = [one.bytes_received(rank) for rank in range(4)]
        assert bytes_between(one).sum(0) == pytest.approx(received)


@pytest.mark.slow
def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    named = "tests.examples_of_models:distributed"
    call = ["explain", named, "--world-size", "2", "--target", "cpu", "--html", str(path)]
    assert main([*call, "--compiled"]) == 0
    assert "rewritten" in capsys.readouterr().out
    page = path.read_text()
    assert len(pictures(page)) == 3
    marked = [page.count(f'<b class="{kind}">') for kind in ("start", "wait")]
    assert marked[0] == marked[1] > 0  # what starts is waited for, in each graph and its code


# --- Pictures of plans: the area of a color is a rank's part of the pairs, in a panel of heads.


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
    how = {"stages": 1, "heads": (2 * num_groups, num_groups)}
    plan = batch_simulate.plan(batch_simulate.DOCUMENTS, {0: numbers}, [512] * 4, **how)
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
