"""Measure the machine that ranks run on, for plans to be made for it.

    calibrate(mesh)  =>  Machine.parse("2xcpu[flops_per_s=3e10,...]:tcp[...] x 2:eth10[...]")

links     exchanges inside nodes, and between them, of two sizes, by all ranks at the same time
tiles     attention of three sizes, forward and backward, by one rank of each node and by all
matmuls   a linear layer, forward and backward, and memory a copy, by one rank of each node
hidden    what is left of an exchange's time where tiles run beside it

Nodes are told apart by their host names. Every number is the median over ranks of the least of some
repetitions. The machine is written to Inductor's cache folder, where ``machine="calibrated"`` finds
it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from cp_inductor.dtensor.axis import axis_of_mesh
from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.ir import NUM_MATMULS
from cp_inductor.plan.machine import DEVICES, LINKS, Device, Level, Machine
from cp_inductor.plan.machine_file import write_calibrated
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.inductor import cache_folder

REPETITIONS = 5
# Bytes that a rank sends in all, of the smaller and the larger exchange.
SIZES = (1 << 12, 1 << 23)
HEADS, HEAD_DIM = 4, 64
# Tokens of tiles, of which the least take little more than a launch; and their dtype.
TOKENS = {"cpu": (16, 128, 512), "cuda": (128, 2048, 8192)}
# Rows and columns of what is multiplied.
LINEAR = {"cpu": (1024, 512), "cuda": (8192, 4096)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def calibrate(mesh: DeviceMesh) -> Machine:
    """Measure the ranks of a mesh and their links; call it on all of them. Takes seconds.

    Args:
        mesh: 1-D, the axis that shards the sequence.

    Returns:
        The machine, alike on all ranks. ``options={"machine": "calibrated"}`` plans for it from now
        on, also in later runs on this host with this torch.

    Raises:
        InvalidArgument: ranks of one host do not follow each other, or hosts have unequal numbers.
        UnsupportedPlacement: the mesh has several axes.
    """
    axis = axis_of_mesh(mesh, site="calibrate")
    measure = _Measurement(group_of(axis.group_name), mesh.device_type)
    machine = measure.machine()
    if measure.is_first_of_node:
        path = write_calibrated(machine, cache_folder())
        if axis.rank == 0:
            print(f"cp_inductor: measured {machine.format()}, kept in {path}", flush=True)
    dist.barrier(measure.group)
    return machine


class _Measurement:
    """What the ranks of a group measure together."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.group, self.device = group, torch.device(device_type)
        self.kind = "cuda" if device_type == "cuda" else "cpu"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        hosts: list[Any] = self.gather(socket.gethostname())
        runs = [at for at in range(self.size) if not at or hosts[at] != hosts[at - 1]]
        self.node_size = runs[1] if len(runs) > 1 else self.size
        if runs != [*range(0, self.size, self.node_size)] or len(set(hosts)) != len(runs):
            raise InvalidArgument(
                site="calibrate",
                expected="the ranks of each host one after the other, and equally many on each",
                got=f"ranks on {', '.join(map(str, hosts))}",
                remedy="list the ranks of the mesh host by host",
            )
        self.node = self.rank // self.node_size
        self.is_first_of_node = self.rank % self.node_size == 0

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, self.group)
        return found

    def median(self, seconds: float) -> float:
        return float(median(self.gather(seconds)))

    def machine(self) -> Machine:
        levels = []
        num_nodes = self.size // self.node_size
        if self.node_size > 1 or num_nodes == 1:
            levels.append(self.level(is_inside=True, ranks=self.node_size))
        if num_nodes > 1:
            levels.append(self.level(is_inside=False, ranks=num_nodes))
        return Machine(tuple(levels), self.device_speed())

    def level(self, *, is_inside: bool, ranks: int) -> Level:
        """Measure exchanges among the ranks of nodes, or between nodes."""
        usual = LINKS["tcp" if self.kind == "cpu" else ("nvlink4" if is_inside else "ib400")]
        if self.size == 1:
            return replace(usual, ranks=ranks)
        small, large = (self.median(self.exchange_s(size, is_inside)) for size in SIZES)
        rate = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
        return replace(usual, ranks=ranks, latency_s=small, bytes_per_s=rate)

    def exchange_s(self, num_bytes: int, is_inside: bool) -> float:
        exchange = self.exchange(num_bytes, is_inside)
        return self.least(lambda: exchange()())

    def exchange(self, num_bytes: int, is_inside: bool) -> Callable[[], Callable[[], object]]:
        """Return what starts an exchange, packed and unpacked, and returns what waits for it."""
        peers = [
            other
            for other in range(self.size)
            if other != self.rank and (other // self.node_size == self.node) == is_inside
        ]
        splits = [num_bytes // 4 // len(peers) if r in peers else 0 for r in range(self.size)]
        given = torch.ones(sum(splits), device=self.device)

        def start() -> Callable[[], object]:
            arrived = torch.empty_like(given)
            work = dist.all_to_all_single(
                arrived, given.clone(), splits, splits, group=self.group, async_op=True
            )

            def wait() -> None:
                work.wait()
                arrived.clone()

            return wait

        return start

    def least(self, run: Callable[[], object], *, by_all: bool = True) -> float:
        """Return the least seconds of some runs, which all ranks begin together.

        With ``by_all=False`` only the first rank of each node runs.
        """
        found = []
        for _ in range(REPETITIONS + 1):
            dist.barrier(self.group)
            self.synchronize()
            start = perf_counter()
            if by_all or self.is_first_of_node:
                run()
            self.synchronize()
            found.append(perf_counter() - start)
            dist.barrier(self.group)
        return min(found[1:])

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def device_speed(self) -> Device:
        tiles = [self.tile(tokens) for tokens in TOKENS[self.kind]]
        alone = [self.of_first(self.least(run, by_all=False)) for run, _ in tiles]
        together = self.median(self.least(tiles[-1][0]))
        flops_per_s, launch_s = _fit([flops for _, flops in tiles], alone)
        at_once = self.node_size * alone[-1] / max(together, 1e-9)
        usual = DEVICES["cpu" if self.kind == "cpu" else _chip()]
        return replace(
            usual,
            flops_per_s=flops_per_s,
            launch_s=launch_s / 2,  # forward and backward
            bytes_per_s=self.memory_bytes_per_s(),
            matmul_flops_per_s=self.matmul_flops_per_s(),
            # All but a tenth is as good as all.
            at_once=0.0 if at_once > 0.9 * self.node_size else max(1.0, at_once),
            hidden=self.hidden(tiles[-1][0], together),
        )

    def of_first(self, seconds: float) -> float:
        """Return the median over the first ranks of nodes."""
        return float(median(self.gather(seconds)[:: self.node_size]))

    def tile(self, tokens: int) -> tuple[Callable[[], object], float]:
        shape = (1, HEADS, tokens, HEAD_DIM)
        inputs = [torch.randn(shape, device=self.device, dtype=DTYPES[self.kind]) for _ in range(3)]
        for one in inputs:
            one.requires_grad_()

        def run() -> None:
            query, key, value = inputs
            out = scaled_dot_product_attention(query, key, value)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        return run, 2 * sum(NUM_MATMULS.values()) * HEADS * HEAD_DIM * float(tokens) ** 2

    def memory_bytes_per_s(self) -> float:
        source = torch.ones(1 << 22, device=self.device)
        seconds = self.of_first(self.least(lambda: torch.add(source, 1.0), by_all=False))
        return 2 * source.nbytes / max(seconds, 1e-9)

    def matmul_flops_per_s(self) -> float:
        """Return the rate of a linear layer: its output, and both of its gradients."""
        rows, dim = LINEAR[self.kind]
        x, weight = (
            torch.randn(size, dim, device=self.device, dtype=DTYPES[self.kind])
            for size in (rows, dim)
        )

        def run() -> None:
            y = x @ weight.t()
            _ = y @ weight, y.t() @ x

        seconds = self.of_first(self.least(run, by_all=False))
        return 3 * 2 * rows * dim**2 / max(seconds, 1e-9)

    def hidden(self, run: Callable[[], object], tile_s: float) -> float:
        """Return the share of an exchange's time that tiles of that length hide."""
        if self.size == 1:
            return 1.0
        is_inside = self.node_size > 1
        exchange = self.exchange(SIZES[1], is_inside)
        alone_s = self.median(self.exchange_s(SIZES[1], is_inside))
        times = max(1, round(alone_s / max(tile_s, 1e-9)))

        def both() -> None:
            wait = exchange()
            for _ in range(times):
                run()
            wait()

        both_s = self.median(self.least(both))
        saved = times * tile_s + alone_s - both_s
        return min(1.0, max(0.0, saved / min(alone_s, times * tile_s)))


def _fit(flops: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return flops per second, and seconds at no flops, by least squares; neither is negative.

    Errors are relative: otherwise the longest tile alone would say what a launch takes.
    """
    weights = [1 / each**2 for each in seconds]
    mean_flops, mean_s = (
        sum(w * each for w, each in zip(weights, values, strict=True)) / sum(weights)
        for values in (flops, seconds)
    )
    points = [*zip(weights, flops, seconds, strict=True)]
    covariance = sum(w * (f - mean_flops) * (s - mean_s) for w, f, s in points)
    slope = covariance / sum(w * (f - mean_flops) ** 2 for w, f, _ in points)
    slope = max(slope, 1e-18)
    return 1 / slope, max(0.0, mean_s - slope * mean_flops)


def _chip() -> str:
    name = torch.cuda.get_device_name().lower()
    return next((chip for chip in DEVICES if chip in name), "gpu")
