"""Training that is saved on 4 ranks and goes on on 2, and on 1, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.support.combinations import (
    FORMS,
    Decoder,
    combination,
    compiled,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    train_step,
)
from tests.support.ranks import run_ranks

NUM_STEPS, NUM_SAVED = 6, 3

# dp and cp of each part of the training.
SIZES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}


def make_training(num_ranks: int) -> tuple[Decoder, torch.optim.Optimizer, DeviceMesh]:
    mesh = make_mesh(*SIZES[num_ranks])
    model = make_model()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp", "cp"]._flatten("fsdp"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh


def check_training(form: str, num_ranks: int, steps: range, folder: str) -> list[float]:
    """Run steps; load before them if they are not the first, and save behind them."""
    model, optimizer, mesh = make_training(num_ranks)
    if steps.start:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    run = compiled(model, form)
    losses = []
    for step in steps:
        losses.append(train_step(run, mesh, make_batch(seed=step)).item())
        optimizer.step()
        optimizer.zero_grad()
    if not steps.start:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=folder)
    return losses


def losses_on_one_process() -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        ids, positions, labels = make_batch(seed=step)
        loss = mean_loss(model(ids, positions), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@combination("distributed checkpoint: saved on 4 ranks, resumed on 2 and on 1", *FORMS)
def test_resumed(form: str, tmp_path: Path) -> None:
    expected = losses_on_one_process()
    (saved, *others) = run_ranks(4, check_training, form, 4, range(NUM_SAVED), str(tmp_path))
    assert all(losses == saved for losses in others)
    torch.testing.assert_close(saved, expected[:NUM_SAVED], rtol=1e-4, atol=0)
    for num_ranks in (2, 1):
        steps = range(NUM_SAVED, NUM_STEPS)
        resumed = run_ranks(num_ranks, check_training, form, num_ranks, steps, str(tmp_path))[0]
        torch.testing.assert_close(resumed, expected[NUM_SAVED:], rtol=1e-4, atol=0)
