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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.combinations import make_batch, make_model, mean_loss
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
# A step of Adam is lr / 3 for every weight, however small its gradient; sums in another order move
# the smallest of them.
ADAM = 0.01 / 3 / 10
WAYS = ("DTensors", "Plain shards", "A region")


def blocks(*titles: str) -> str:
    """Return the page's blocks with these titles, in its order."""
    page = PAGE.read_text().partition("## After the first step")[2]
    found = re.findall(r'^```python title="(.+?)"\n(.*?)^```', page, re.M | re.S)
    assert {title for title, _ in found} == {*WAYS, "all", "one process"}
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
        "Shard": Shard,
        "distribute_tensor": distribute_tensor,
        "implicit_replication": implicit_replication,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": [make_batch(), make_batch(seed=3)],
    }


def run_page(way: str, path: str) -> tuple[float, float, float]:
    """Run the page as it stands; return the losses of its step and evaluation, and of reload."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = WithLoss()
    if way == "DTensors":
        model = cp_inductor.parallelize(model, mesh)
    names = training(model)
    if way == "Plain shards":
        options = {"mesh": mesh}
        backend = "cp_aot_eager"
        names["model"] = torch.compile(model, backend=backend, fullgraph=True, options=options)
    names |= {"mesh": mesh, "path": path}
    exec(blocks(way, "all"), names)
    # The page loads what it saved: weights and moments that differ must come back.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for state in names["optimizer"].state.values():
            state["exp_avg"].zero_()
    loaded = torch.load(path) if dist.get_rank() == 0 else None
    cp_inductor.load_full_state_dict(model, loaded, names["optimizer"])
    moments = [state["exp_avg"] for state in names["optimizer"].state.values()]
    assert all(moment.abs().sum() > 0 for moment in moments)
    with torch.no_grad():
        again = names["step"](*names["batches"][0])
    return names["loss"], names["evaluated"], again


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_page(way: str, tmp_path: Path) -> None:
    """Accumulate, clip, step, evaluate, save, load on the ranks, and on one process."""
    one = training(WithLoss()) | {"cp_inductor": Mock(), "mesh": None}
    exec("def step(*whole):\n    loss = model(*whole)\n    if torch.is_grad_enabled():\n"
         "        loss.backward()\n    return loss.item()", one)  # fmt: skip
    exec(blocks("all").partition("state = ")[0], one)
    path = tmp_path / "state.pt"
    for losses in run_ranks(2, run_page, way, str(path)):
        expected = one["loss"], one["evaluated"], one["evaluated"]
        assert losses == pytest.approx(expected, rel=1e-5)
    fresh = WithLoss()
    with torch.no_grad():
        fresh.decoder.head.weight.zero_()
    exec(blocks("one process"), {"torch": torch, "model": fresh, "path": path})
    saved, trained = fresh.state_dict(), one["model"].state_dict()
    torch.testing.assert_close(saved, trained, rtol=0, atol=ADAM)
    # On one process the optimizer's state is read as well.
    cp_inductor.load_full_state_dict(fresh, torch.load(path), torch.optim.AdamW(fresh.parameters()))


def refuse() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    # All ranks refuse what the first one lacks.
    with pytest.raises(
        cp_inductor.InvalidArgument, match=r"without 'model'; give .*\{\"model\": state\}"
    ):
        cp_inductor.load_full_state_dict(model, None)
    optimizer = torch.optim.SGD(model.parameters())
    state = cp_inductor.full_state_dict(model)
    with pytest.raises(cp_inductor.InvalidArgument, match="without 'optimizer'"):
        cp_inductor.load_full_state_dict(model, state, optimizer)
    # Torch's own state has numbers for names: it was dropped without a word.
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    adam.param_groups[0]["params"][0].grad = torch.ones(2)
    adam.step()
    numbered = {**state, "optimizer": adam.state_dict()} if dist.get_rank() == 0 else None
    with pytest.raises(cp_inductor.InvalidArgument, match=r"by numbers, as optimizer\.state_dict"):
        cp_inductor.load_full_state_dict(model, numbered, optimizer)
    refuse_other_optimizers(mesh)
    refuse_other_states(mesh)


def refuse_other_states(mesh: DeviceMesh) -> None:
    """What is no state, and states of other models, which the first rank alone sees."""
    model = cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state: Any = cp_inductor.full_state_dict(model, optimizer)
    own, is_first = state["model"], dist.get_rank() == 0
    for wrong, words in (
        ("state.pt", "one that cannot be read, of str"),
        ({**state, "optimizer": [1]}, "one that cannot be read, of .*'optimizer': 'list'"),
        ({**state, "optimizer": {"param_groups": 3}}, "one that cannot be read, of .*'dict'"),
        (
            {**state, "model": {**own, "more": torch.ones(3)}},
            r"more: expected nothing .* got \[3\]",
        ),
        ({**state, "model": {"weight": torch.ones(2, 3)}}, r"weight, and 1 others.* got \[2, 3\]"),
    ):
        with pytest.raises(cp_inductor.InvalidArgument, match=words):
            cp_inductor.load_full_state_dict(model, wrong if is_first else None, optimizer)


def refuse_other_optimizers(mesh: DeviceMesh) -> None:
    """State of another class, of other parameters, and optimizers built too early."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    early = torch.optim.AdamW(model.parameters())
    with pytest.warns(cp_inductor.SequenceWarning, match="Build it after distribute"):
        cp_inductor.parallelize(model, mesh)
    with pytest.raises(cp_inductor.InvalidArgument, match="holds 4 of 4 parameters that the model"):
        cp_inductor.full_state_dict(model, early)
    saved = cp_inductor.full_state_dict(model, torch.optim.AdamW(model[1].parameters()))
    for optimizer, got in [
        (torch.optim.SGD(model[1].parameters(), momentum=0.9), "exp_avg, exp_avg_sq, step"),
        (torch.optim.AdamW(model.parameters()), "nothing"),
    ]:
        with pytest.raises(cp_inductor.InvalidArgument, match=f"keeps of it, got {got}; build"):
            cp_inductor.load_full_state_dict(model, saved, optimizer)


@pytest.mark.slow
def test_states_that_do_not_fit_are_refused_on_all_ranks() -> None:
    run_ranks(2, refuse)
