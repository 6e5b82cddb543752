"""docs/tutorial.md, after the first step: its blocks are run, with the numbers of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from tests.support.combinations import make_batch, make_model, mean_loss
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
# A step of Adam is lr / 3 for every weight, however small its gradient; sums in another order move
# the smallest of them.
ADAM = 0.01 / 3 / 10
WAYS = ("Plain shards", "A region")


def blocks(*titles: str) -> str:
    """Return the page's blocks with these titles, in its order."""
    page = PAGE.read_text().partition("## After the first step")[2]
    found = re.findall(r'^```python title="(.+?)"\n(.*?)^```', page, re.M | re.S)
    assert {title for title, _ in found} == {*WAYS, "all"}
    return "\n".join(code for title, code in found if title in titles)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = make_model()

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.decoder(ids, positions), labels)


def training(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {
        "cp_inductor": cp_inductor,
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": [make_batch(), make_batch(seed=3)],
    }


def run_page(way: str) -> tuple[float, float, dict[str, Tensor]]:
    """Run the page as it stands; return the losses of its step and evaluation, and the weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = WithLoss()
    names = training(model) | {"mesh": mesh}
    if way == "Plain shards":
        options = {"mesh": mesh}
        backend = "cp_aot_eager"
        names["model"] = torch.compile(model, backend=backend, fullgraph=True, options=options)
    exec(blocks(way, "all"), names)
    return names["loss"], names["evaluated"], model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_page(way: str) -> None:
    """Accumulate, clip, step, evaluate."""
    one = training(WithLoss()) | {"cp_inductor": Mock(), "mesh": None}
    exec("def step(*whole):\n    loss = model(*whole)\n    if torch.is_grad_enabled():\n"
         "        loss.backward()\n    return loss.item()", one)  # fmt: skip
    exec(blocks("all"), one)
    for loss, evaluated, weights in run_ranks(2, run_page, way):
        assert (loss, evaluated) == pytest.approx((one["loss"], one["evaluated"]), rel=1e-5)
        torch.testing.assert_close(weights, one["model"].state_dict(), rtol=0, atol=ADAM)
