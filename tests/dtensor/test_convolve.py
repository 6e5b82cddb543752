"""Convolutions along a sharded dim, beside themselves on one process."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from tests.support.combinations import AOT, EAGER, check_distributed
from tests.support.ranks import on_ranks, run_ranks

PADDED = {"kernel_size": 3, "padding": 1}
# Convolution, what it convolves, on how many ranks, and how they hold it.
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...], Any, list[Placement]]] = {
    "odd length": (nn.Conv1d, PADDED, (2, 4, 9), (2,), [Shard(2)]),
    "stride": (nn.Conv1d, {**PADDED, "stride": 2}, (2, 4, 10), (2,), [Shard(2)]),
    "each channel": (
        nn.Conv1d,
        {"kernel_size": 4, "padding": 3, "groups": 4, "bias": False},
        (2, 4, 9),
        (3,),
        [Shard(2)],
    ),
    "fewer than ranks": (nn.Conv1d, {"kernel_size": 6}, (2, 4, 7), (3,), [Shard(2)]),
    "images": (nn.Conv2d, {"kernel_size": 3}, (2, 4, 5, 7), (2,), [Shard(3)]),
    "beside a batch": (nn.Conv1d, {"kernel_size": 3}, (3, 4, 9), (2, 2), [Shard(0), Shard(2)]),
    "beside channels": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2, 2), [Shard(2), Shard(1)]),
    "channels": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2,), [Shard(1)]),
    "left to torch": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2,), [Replicate()]),
}


def check(name: str, form: str) -> None:
    kind, sizes, shape, ranks, placements = CASES[name]
    made: Any = kind
    torch.manual_seed(0)
    model, x = made(4, 4, **sizes).double(), torch.randn(shape, dtype=torch.float64)
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("a", "b")[: len(ranks)])
    out = check_distributed(model, x, mesh, placements, form)
    assert getattr(out, "placements", (Replicate(),)) == tuple(placements)


@pytest.mark.parametrize(
    ("name", "form"), [*((name, EAGER) for name in CASES), ("odd length", AOT)]
)
def test_convolution(name: str, form: str) -> None:
    run_ranks(prod(CASES[name][3]), check, name, form)


@on_ranks(2)
def test_that_it_gathers_is_said() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = cp_inductor.parallelize(nn.Conv1d(4, 4, 3), mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(distribute_tensor(torch.ones(2, 4, 9), mesh, [Shard(2)]))
    found = [str(one.message) for one in said if "every rank gathers" in str(one.message)]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)  # the first says it for all
