"""The machine that plans are made for where nobody says it."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch.distributed as dist

from cp_inductor.dtensor.machines import machine_of
from cp_inductor.plan.machine import Machine
from tests.support.ranks import fake_rank

NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what tells the machine of 16 ranks, in a pretended group or in one that seems real."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def find(device: str, capability: tuple[int, int] | None, backend: str = "fake") -> str:
        seems = mock.patch.object(dist, "get_backend", return_value=backend)
        with fake_rank(3, 16), seems:
            group_name = dist.group.WORLD.group_name
            return machine_of("auto", group_name, device, capability).format()

    return find


def test_the_device_is_known(find: Callable[..., str]) -> None:
    assert find("cuda", (9, 0)) == "8xh100:nvlink4 x ib400"
    assert find("cuda", (8, 0)) == "8xa100:nvlink3 x ib400"
    assert find("cuda", (7, 5)) == Machine().format()
    assert find("xpu", None) == Machine().format()


def test_launchers_tell_nodes(find: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    one_node = find("cpu", None, "gloo")
    assert one_node == "cpu[hidden=0.0,at_once=4.0]:tcp"
    for name, told in zip(reversed(NAMES), ("2(x8)", "8", "4"), strict=True):  # the first counts
        monkeypatch.setenv(name, told)
        nodes = find("cuda", (9, 0), "nccl")
        assert nodes == f"{told[0]}xh100:nvlink4 x ib400"
    assert find("cpu", None, "gloo") == "4xcpu[hidden=0.0]:tcp x eth10"
    # Who plans for a pretended group is no rank of it.
    assert find("cpu", None) == one_node
    assert find("cuda", (9, 0)) == "8xh100:nvlink4 x ib400"
