"""The machine that plans are made for where nobody says it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from cp_inductor.dtensor import machines
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.machines import machine_of
from cp_inductor.plan.machine import Machine
from tests.support.ranks import fake_rank


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what tells the machine of 16 ranks, in a pretended group or in one that seems real."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def find(
        device: str,
        capability: tuple[int, int] | None,
        backend: str = "fake",
        hosts: Sequence[int] = (),
    ) -> str:
        told = mock.patch.object(machines, "hosts_of", return_value=tuple(hosts))
        seems = mock.patch.object(dist, "get_backend", return_value=backend)
        with fake_rank(3, 16), seems, told:
            axis = SequenceAxis("axis 0", dist.group.WORLD.group_name, 3, 16)
            return machine_of("auto", axis.group_name, device, capability).format()

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
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find("cpu", None, "gloo") == "4xcpu[hidden=0.0]:tcp x eth10"
    assert find("cuda", (9, 0), "nccl") == "4xh100:nvlink4 x ib400"
    # Who plans for a pretended group is no rank of it.
    assert find("cpu", None) == one_node
    assert find("cuda", (9, 0)) == "8xh100:nvlink4 x ib400"


@pytest.mark.parametrize(
    ("hosts", "cpu", "cuda", "is_warned"),
    [
        ([0] * 16, "cpu[hidden=0.0,at_once=4.0]:tcp", "h100:nvlink4", False),
        ([*[0] * 8, *[1] * 8], "8xcpu[hidden=0.0,at_once=4.0]:tcp x eth10", None, False),
        (np.repeat(range(4), 4), "4xcpu[hidden=0.0]:tcp x eth10", None, False),
        # A world of 16 whose sequences are on 4 ranks: two of each group on a host of 8.
        ([0, 0, 1, 1], "2xcpu[hidden=0.0,at_once=4.0]:tcp x eth10", None, False),
        # One rank of each host: nothing is inside.
        (range(16), "cpu[flops_per_s=340000000000.0]:eth10", "h100:ib400", False),
        # Dealt out to two hosts, and unequal numbers.
        ([0, 1] * 8, "cpu[hidden=0.0,at_once=4.0]:eth10", "h100:ib400", True),
        ([*[0] * 5, *[1] * 11], "cpu[hidden=0.0,at_once=4.0]:eth10", "h100:ib400", True),
    ],
)
def test_hosts_tell_nodes(
    find: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    hosts: Sequence[int],
    cpu: str,
    cuda: str | None,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for device, capability, text in (("cpu", None, cpu), ("cuda", (9, 0), cuda)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = find(device, capability, "gloo", hosts)
        assert found == (text or f"{cpu.partition('x')[0]}xh100:nvlink4 x ib400")
        assert [("not host by host" in str(one.message)) for one in said] == [True] * is_warned
