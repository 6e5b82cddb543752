"""The ranks of gloo measure each other, and plan by what they found."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cp_inductor
from cp_inductor.__main__ import main
from cp_inductor.dtensor import recipe
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.errors import InvalidArgument
from cp_inductor.inspect.calibrate import _fit
from cp_inductor.plan.machine import CALIBRATED, Machine, read_calibrated, write_calibrated
from tests.support.graphs import attend_causal
from tests.support.processes import run_python
from tests.support.ranks import fake_rank, on_ranks, run_ranks, world_mesh
from tests.support.reference import (
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    with_grads,
)

measuring = importlib.import_module("cp_inductor.inspect.calibrate")


@pytest.mark.slow
@on_ranks(3)
def test_hosts_in_turn_are_refused() -> None:
    mesh = world_mesh()
    host = "ab"[mesh.get_rank() % 2]
    with (
        mock.patch.object(socket, "gethostname", return_value=host),
        pytest.raises(InvalidArgument, match=r"got ranks on a, b, a; list the ranks"),
    ):
        cp_inductor.calibrate(mesh)


def test_a_launch_is_not_drowned_by_long_tiles() -> None:
    # 1e10 per second and 1e-4 s each; the longest runs at 0.9 of that rate.
    flops = [1e5, 1e8, 1e10]
    rate, launch_s = _fit(flops, [1.1e-4, 1.01e-2, 1.1112])
    assert launch_s == pytest.approx(1e-4, rel=0.05)
    assert 0.9e10 < rate < 1e10


def test_the_command_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "torchrun --nproc-per-node 8 -m cp_inductor calibrate" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_says_one_line(tmp_path: Path) -> None:
    arguments = shlex.split(
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m cp_inductor calibrate"
    )
    said = json.loads(run_python(*arguments, "--json", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))
    assert Machine.parse(said["machine"]).device.flops_per_s == said["device"]["flops_per_s"]
    assert [level["ranks"] for level in said["levels"]] == [2]
    (line,) = run_python(*arguments, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).splitlines()
    assert line.startswith("cp_inductor: measured 2xcpu[")
    assert line.endswith(f"kept in {tmp_path / 'cp_inductor_machine.json'}")


def _calibrate(folder: str, hosts: str) -> tuple[str, str, str]:
    """Measure little, as a rank of a host; return the machine, what is planned for, and lines.

    What is compiled for it computes what one process does.
    """
    lines: list[str] = []
    options = {"machine": CALIBRATED}
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True, options=options)
    little = {
        "REPETITIONS": 1,
        "SIZES": (256, 1 << 16),
        "TOKENS": {"cpu": (16, 32, 64)},
        "cache_folder": lambda: folder,
        "socket": mock.Mock(gethostname=lambda: hosts[dist.get_rank()]),
        "print": lambda line, **_: lines.append(line),
    }
    with (
        mock.patch.multiple(measuring, create=True, **little),
        mock.patch.object(recipe, "cache_folder", return_value=folder),
    ):
        try:
            machine = cp_inductor.calibrate(world_mesh()).format()
        except InvalidArgument as error:
            return str(error), "", ""
        whole = make_qkv(64)
        found = with_grads(compiled, on_mesh(whole, world_mesh(), Shard(2)))
        assert_shards_close(found, attend_with_grads(*whole, is_causal=True), torch.float32)
        planned = recipe.machine_text(CALIBRATED, site="a test")
    return machine, planned, "\n".join(lines)


@pytest.mark.parametrize(("hosts", "ranks"), [("aa", [2]), ("ab", [2]), ("aabb", [2, 2])])
def test_ranks_measure_one_machine(hosts: str, ranks: list[int], tmp_path: Path) -> None:
    found = run_ranks(len(hosts), _calibrate, str(tmp_path), hosts)
    text = found[0][0]
    assert {one[:2] for one in found} == {(text, text)}
    assert [bool(lines) for *_, lines in found] == [True] + [False] * (len(hosts) - 1)
    machine = Machine.parse(text)
    assert [level.ranks for level in machine.levels] == ranks
    # Nothing of it is an assumption.
    usual = Machine.parse("cpu:tcp")
    for level in machine.levels:
        assert level.latency_s != usual.levels[0].latency_s
        assert level.bytes_per_s != usual.levels[0].bytes_per_s
    assert machine.levels[-1].name == "tcp"
    for name in ("flops_per_s", "bytes_per_s", "matmul_flops_per_s"):
        assert getattr(machine.device, name) not in (0, getattr(usual.device, name))
    assert 0 <= machine.device.hidden <= 1


def test_a_machine_of_another_host_is_refused(tmp_path: Path) -> None:
    machine = Machine.parse("2xcpu[hidden=0.25]:tcp")
    path = write_calibrated(machine, tmp_path, 2)
    assert json.loads(path.read_text())["ranks"] == 2
    assert read_calibrated(tmp_path) == machine
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
    with pytest.raises(InvalidArgument, match="got host elsewhere"):
        read_calibrated(tmp_path)
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="got no such file"):
        read_calibrated(tmp_path)
    with pytest.raises(InvalidArgument, match="torchrun -m cp_inductor calibrate"):
        read_calibrated(tmp_path / "empty")


# --- The machine that plans are made for where nobody says it.

NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what tells the machine of 16 ranks, in a pretended group or in one that seems real."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def find(device: str, capability: tuple[int, int] | None, backend: str = "fake") -> str:
        seems = mock.patch.object(dist, "get_backend", return_value=backend)
        with fake_rank(3, 16), seems:
            axis = SequenceAxis("axis 0", dist.group.WORLD.group_name, 3, 16)
            options = PlanOptions(
                "auto", 0, 0, machine="auto", device=device, capability=capability
            )
            return options.machine_of(axis, torch.empty(0)).format()

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
