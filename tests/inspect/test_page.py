"""A report as a page: what it says, what it draws, and that it needs no network."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

pytest.importorskip("matplotlib")

from cp_inductor import Report, explain
from cp_inductor.__main__ import main
from cp_inductor.inspect.page import bytes_between, held_bytes
from cp_inductor.plan.ir import DESTINATION
from tests.examples_of_models import mixed
from tests.support.packed import in_documents
from tests.support.plans import make_plan
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
                    arrived = stage.fetch.columns[:, DESTINATION] == rank
                    held[now, rank] += one.bytes_of(stage.fetch)[arrived].sum()
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
