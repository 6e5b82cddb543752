"""Measure the machine that ranks run on, for plans to be made for it.

    calibrate(mesh)  =>  Machine.parse("2xcpu[flops_per_s=3e10,...]:tcp[...] x 2:eth10[...]")

links     exchanges inside nodes, and between them, of two sizes, by all ranks at the same time
tiles     attention of three sizes, forward and backward, by one rank of each node and by all; and
          causal, of which kernels compute more than half
matmuls   a linear layer, forward and backward, and memory a copy, by one rank of each node
hidden    what is left of an exchange's time where tiles run beside it
steps     attentions of few tokens on CPUs, by plans of few or many tiles and exchanges: what each
          of these takes however little it computes or moves

Nodes are told apart by their host names. Every number is the median over ranks of the least of some
repetitions. The machine is written to Inductor's cache folder, where ``machine="calibrated"`` finds
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from cp_inductor.dtensor.axis import axis_of_mesh
from cp_inductor.dtensor.recipe import chip_of_this_process
from cp_inductor.errors import InvalidArgument
from cp_inductor.ops.attention import attention
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from cp_inductor.plan.ir import NUM_MATMULS
from cp_inductor.plan.machine import DEVICES, LINKS, Device, Level, Machine, write_calibrated
from cp_inductor.plan.simulate import loads_of
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.inductor import cache_folder

REPETITIONS = 5
# Bytes that a rank sends in all, of the smaller and the larger exchange.
SIZES = (1 << 12, 1 << 23)
HEADS, HEAD_DIM = 4, 64
# Plans of attentions of few tokens, with their stages, and the tokens of a rank.
STEPS = (("allgather", 1), ("rows", 1), ("rows", 4), ("heads", 1), ("heads", 2), ("heads_own", 1))
STEP_TOKENS = 32
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
        path = write_calibrated(machine, cache_folder(), measure.size)
        if axis.rank == 0:
            measured = f"{machine.format()} on {measure.size} ranks"
            print(f"cp_inductor: measured {measured}, kept in {path}", flush=True)
    dist.barrier(measure.group)
    return machine


def _rounded(part: Any) -> Any:
    """Return a level or a device, its measured numbers to three digits: they vary by more."""
    numbers = {name: value for name, value in asdict(part).items() if isinstance(value, float)}
    return replace(part, **{name: float(f"{value:.3g}") for name, value in numbers.items()})


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
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, self.group)
        return gathered

    def machine(self) -> Machine:
        levels = []
        num_nodes = self.size // self.node_size
        if self.node_size > 1 or num_nodes == 1:
            levels.append(self.level(is_inside=True, ranks=self.node_size))
        if num_nodes > 1:
            levels.append(self.level(is_inside=False, ranks=num_nodes))
        machine = Machine(tuple(levels), self.device_speed())
        if self.kind == "cpu" and self.size > 1:
            machine = self.with_steps(machine)
        return Machine(tuple(map(_rounded, machine.levels)), _rounded(machine.device))

    def level(self, *, is_inside: bool, ranks: int) -> Level:
        """Measure exchanges among the ranks of nodes, or between nodes."""
        usual = LINKS["tcp" if self.kind == "cpu" else ("nvlink4" if is_inside else "ib400")]
        if self.size == 1:
            return replace(usual, ranks=ranks)
        small, large = (self.exchange_s(size, is_inside) for size in SIZES)
        rate = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
        return replace(usual, ranks=ranks, latency_s=small, bytes_per_s=rate)

    def exchange_s(self, num_bytes: int, is_inside: bool) -> float:
        exchange = self.exchange(num_bytes, is_inside)
        return self.seconds(lambda: exchange()())

    def exchange(self, num_bytes: int, is_inside: bool) -> Callable[[], Callable[[], object]]:
        """Return what starts an exchange, packed and unpacked, and returns what waits for it."""
        others = (other for other in range(self.size) if other != self.rank)
        peers = [r for r in others if (r // self.node_size == self.node) == is_inside]
        width = HEADS * HEAD_DIM
        tokens = max(1, num_bytes // (4 * width * len(peers)))
        splits = [width * tokens * (r in peers) for r in range(self.size)]
        rows = torch.ones(HEADS, sum(splits) // width, HEAD_DIM, device=self.device)

        def start() -> Callable[[], object]:
            # Tokens lie side by side in memory, and their heads in messages.
            sent = rows.transpose(0, 1).contiguous().flatten()
            arrived = torch.empty_like(sent)
            work = dist.all_to_all_single(
                arrived, sent, splits, splits, group=self.group, async_op=True
            )

            def wait() -> None:
                work.wait()
                arrived.view(-1, HEADS, HEAD_DIM).transpose(0, 1).contiguous()

            return wait

        return start

    def seconds(self, run: Callable[[], object], *, by_all: bool = True) -> float:
        """Return the least seconds of some runs, which all ranks begin together: their median.

        With ``by_all=False`` only the first rank of each node runs.
        """
        times = []
        for _ in range(REPETITIONS + 1):
            dist.barrier(self.group)
            self.synchronize()
            start = perf_counter()
            if by_all or self.is_first_of_node:
                run()
            self.synchronize()
            times.append(perf_counter() - start)
            dist.barrier(self.group)
        each = self.gather(min(times[1:]))
        return float(median(each if by_all else each[:: self.node_size]))

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def device_speed(self) -> Device:
        tiles = [self.tile(tokens) for tokens in TOKENS[self.kind]]
        alone = [self.seconds(run, by_all=False) for run, _ in tiles]
        together = self.seconds(tiles[-1][0])
        flops_per_s, launch_s = _fit([flops for _, flops in tiles], alone)
        num_keys = 2 * TOKENS[self.kind][-1]
        causal, flops = self.tile(num_keys, is_causal=True)
        causal_s = self.seconds(causal, by_all=False)
        share = min(1.0, max(0.5, (causal_s - launch_s) * flops_per_s / flops))
        at_once = self.node_size * alone[-1] / max(together, 1e-9)
        if self.kind == "cpu":
            at_once = min(at_once, float(os.cpu_count() or at_once))
        source = torch.ones(1 << 22, device=self.device)
        copy_s = self.seconds(lambda: torch.add(source, 1.0), by_all=False)
        usual = DEVICES["cpu" if self.kind == "cpu" else chip_of_this_process()]
        return replace(
            usual,
            flops_per_s=flops_per_s,
            launch_s=launch_s / 2,  # forward and backward
            causal_keys=(2 * share - 1) * num_keys,
            bytes_per_s=2 * source.nbytes / max(copy_s, 1e-9),
            matmul_flops_per_s=self.matmul_flops_per_s(),
            # All but a tenth is as good as all.
            at_once=0.0 if at_once > 0.9 * self.node_size else max(1.0, at_once),
            hidden=self.hidden(tiles[-1][0], together),
        )

    def with_steps(self, machine: Machine) -> Machine:
        """Return the machine with what a tile and an exchange take in attentions of few tokens.

        By least squares of the times of several plans; no less than the kernel and the link alone.
        """
        length, num_heads = STEP_TOKENS * self.size, 2 * self.size
        sizes = self.size, length, length, num_heads, num_heads, HEAD_DIM, 4, "causal"
        rows, seconds = [], []
        for strategy, stages in STEPS:
            recipe = resolve(
                replace(Recipe(*sizes), strategy=strategy, stages=stages),
                site="calibrate",
                machine=machine,
            )
            both = [loads_of(make(recipe)) for make in (forward_plan, backward_plan)]
            num_exchanges = sum(np.count_nonzero(item.moved[0].any((2, 3))) for item in both)
            calls = sum(item.calls.sum(0) for item in both)
            # How many follow each other on a core.
            num_calls = max(calls.max(), calls.sum() / (machine.device.at_once or self.size))
            rows.append([1.0, float(num_calls), float(num_exchanges)])
            seconds.append(self.seconds(self.step(recipe)))
        (_, launch_s, latency_s), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds))
        launch_s = max(machine.device.launch_s, float(launch_s))
        more = max(0.0, float(latency_s) - machine.levels[0].latency_s)
        levels = (replace(item, latency_s=item.latency_s + more) for item in machine.levels)
        return Machine(tuple(levels), replace(machine.device, launch_s=launch_s))

    def step(self, recipe: Recipe) -> Callable[[], object]:
        """Return what runs an attention forward and backward."""
        shape = (1, recipe.num_heads, STEP_TOKENS, HEAD_DIM)
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        spec = (recipe.format(), self.rank, None, "flash_cpu", self.group.group_name, 0.0, False)
        return _both_ways(lambda *qkv: attention(*qkv, [], *spec)[0], inputs)

    def tile(self, tokens: int, *, is_causal: bool = False) -> tuple[Callable[[], object], float]:
        """Return what runs a tile, and its flops without a mask."""
        shape = (1, HEADS, tokens, HEAD_DIM)
        like: dict[str, Any] = {"device": self.device, "dtype": DTYPES[self.kind]}
        inputs = [torch.randn(shape, requires_grad=True, **like) for _ in range(3)]
        run = _both_ways(partial(scaled_dot_product_attention, is_causal=is_causal), inputs)
        return run, 2 * sum(NUM_MATMULS.values()) * HEADS * HEAD_DIM * float(tokens) ** 2

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

        seconds = self.seconds(run, by_all=False)
        return 3 * 2 * rows * dim**2 / max(seconds, 1e-9)

    def hidden(self, run: Callable[[], object], tile_s: float) -> float:
        """Return the share of an exchange's time that tiles of that length hide."""
        if self.size == 1:
            return 1.0
        is_inside = self.node_size > 1
        exchange = self.exchange(SIZES[1], is_inside)
        alone_s = self.exchange_s(SIZES[1], is_inside)
        times = max(1, round(alone_s / max(tile_s, 1e-9)))

        def both() -> None:
            wait = exchange()
            for _ in range(times):
                run()
            wait()

        saved = times * tile_s + alone_s - self.seconds(both)
        return min(1.0, max(0.0, saved / min(alone_s, times * tile_s)))


def _both_ways(attend: Callable[..., torch.Tensor], inputs: Sequence[Any]) -> Callable[[], object]:
    """Return what runs an attention forward and backward."""

    def run() -> None:
        out = attend(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def _fit(flops: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return flops per second, and seconds at no flops, by least squares; neither is negative.

    Errors are relative: otherwise the longest tile alone would say what a launch takes.
    """
    times, weights = np.array(seconds), 1 / np.array(seconds)
    slope = max(1e-18, float(np.polyfit(flops, times, 1, w=weights)[0]))
    rest = np.average(times - slope * np.array(flops), weights=weights**2)
    return 1 / slope, max(0.0, float(rest))
