"""The machine that plans are made for where nobody says it."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor.dtensor import machines
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.machines import machine_of
from cp_inductor.plan.machine import Machine
from cp_inductor.trust import notes
from cp_inductor.trust.bounded_store import BoundedStore
from cp_inductor.trust.log import Log
from tests.support.ranks import fake_rank, on_ranks


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


# --- Ranks learn from each other which of them share a host, and all get the same answer.


def answers(names: Sequence[str | None], delays_s: Sequence[float] = ()) -> list[tuple[int, ...]]:
    """Let ranks on hosts of these names exchange them; None stands for a rank that never comes."""
    store, ranks = dist.HashStore(), list(range(len(names)))

    def come(rank: int) -> tuple[int, ...]:
        time.sleep(delays_s[rank] if delays_s else 0)
        log = Log(BoundedStore(store, 60), rank, ranks, 60, host=str(names[rank]))
        return notes.exchange_hosts(log)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(come, [rank for rank in ranks if names[rank] is not None]))


def test_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "HOSTS_S", 0.3)
    with pytest.warns(cp_inductor.SequenceWarning, match="not all of ranks 0, 1 and 2 have said"):
        assert answers(["a", None, "b"]) == [(), ()]
    # The first to give up decides for those who come later, and would see all names.
    with pytest.warns(cp_inductor.SequenceWarning, match='options={"machine"'):
        assert answers(["a", "a", "b"], [0, 0, 0.8]) == [(), (), ()]


@on_ranks(4)
def test_two_hosts_of_gloo_ranks() -> None:
    cp_inductor.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    # What a rank asks first, its own group or all ranks, is no matter.
    groups = [dist.group.WORLD, mesh["cp"].get_group(), mesh["dp"].get_group(), dist.group.WORLD]
    expected = ("2xcpu", "cpu", "cpu", "2xcpu")
    with mock.patch.object(socket, "gethostname", return_value=f"host {dist.get_rank() // 2}"):
        for number, (group, known) in enumerate(zip(groups, expected, strict=True)):
            if number == 3:
                cp_inductor.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                machine = machine_of("auto", group.group_name, "cpu")
            name = "tcp" if len(machine.levels) > 1 or group is groups[1] else "eth10"
            assert machine.levels[0].name == name, (number, machine)
            assert machine.format().partition("[")[0].partition(":")[0] == known
