"""Ranks learn from each other which of them share a host, and all get the same answer."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor.dtensor.machines import machine_of
from cp_inductor.trust import hosts
from cp_inductor.trust.log import Log
from tests.support.ranks import on_ranks


def answers(names: Sequence[str | None], delays_s: Sequence[float] = ()) -> list[tuple[int, ...]]:
    """Let ranks on hosts of these names exchange them; None stands for a rank that never comes."""
    store, ranks = dist.HashStore(), list(range(len(names)))

    def come(rank: int) -> tuple[int, ...]:
        time.sleep(delays_s[rank] if delays_s else 0)
        log = Log(store, rank, ranks, 60, host=str(names[rank]))
        return hosts.exchange_hosts(log)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(come, [rank for rank in ranks if names[rank] is not None]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "a", "b", "b"], (0, 0, 1, 1)),
        (["b", "a", "b", "a", "c"], (0, 1, 0, 1, 2)),
        (["a", "a", "a"], (0, 0, 0)),
    ],
)
def test_ranks_learn_their_hosts(names: list[str], expected: tuple[int, ...]) -> None:
    assert answers(names) == [expected] * len(names)


def test_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "HOSTS_S", 0.3)
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
