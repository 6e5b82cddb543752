"""The machine that plans are made for, as data: how ranks are joined, and how fast each is.

    Machine.parse("8xh100:nvlink4 x 8:ib400")      nodes of 8 H100, and 8 nodes over InfiniBand
    Machine.parse("h100:ib400")                    any number of H100, each with its own 400 Gbit/s
    Machine.parse("cpu[flops_per_s=5e10]:tcp")     a known device or link with other numbers

Ranks are numbered through the first node, then the second. Rates of links are for each rank and
direction: NVLink's as NCCL reaches them, others as data sheets have them. All ranks must plan for
the same machine; `Machine.format` writes it as text, which recipes, cache keys and comparisons of
ranks hold.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from cp_inductor.errors import InvalidArgument, InvalidText
from cp_inductor.mask.grammar import shortened
from cp_inductor.plan.checks import MAX_WORLD_SIZE, check_count, check_speed, refuse


def _check_speeds(part: Level | Device, site: str) -> None:
    for name in (f.name for f in fields(part) if f.type == "float"):
        is_zero_allowed = name not in ("bytes_per_s", "flops_per_s")
        check_speed(name, getattr(part, name), site=site, is_zero_allowed=is_zero_allowed)


@dataclass(frozen=True, slots=True)
class Level:
    """So many ranks, or nodes, that a link joins.

    The defaults are assumptions: 400 Gbit/s for each rank, and a few launches for a collective.

    Attributes:
        ranks: how many ranks a node has, at the first of two levels; how many nodes there are, at
            the second. 0: any number.
        bytes_per_s: of each rank, in each direction, while all ranks exchange.
        latency_s: of an exchange.
        name: of the link.
    """

    ranks: int = 0
    bytes_per_s: float = 50e9
    latency_s: float = 20e-6
    name: str = "ib400"

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks, 0, MAX_WORLD_SIZE, site="a level")
        _check_speeds(self, "a level")


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a kernel was measured to run, in floating-point operations per second.

    Attributes:
        forward, backward: as tiles count them: 4 and 10 per pair, head and coordinate.
        source: who measured it.
    """

    forward: float
    backward: float
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """The speed of a rank.

    The defaults are assumptions: about half of the 989e12 operations in bfloat16 for which an H100
    is specified, and a launch of a CUDA kernel.

    Attributes:
        flops_per_s: of the tiles that plans are made of.
        launch_s: seconds to launch a tile.
        causal_keys: by how many keys a causal tile is computed beyond its triangle: kernels compute
            whole blocks.
        bytes_per_s: of memory, read and written.
        hidden: the share of an exchange that tiles can hide: 1 if other hardware moves the data, 0
            if the cores that compute must move it.
        at_once: how many ranks of a node compute at full speed at the same time; 0: all.
        matmul_flops_per_s: of large matrix multiplications; 0: as fast as tiles.
        peak_flops: dense bfloat16 operations per second that the data sheet says; 0: unknown.
        name: of the device.
        rates: of kernels whose rates were published: bfloat16, head dim 128, 16,384 tokens, no
            mask, the best that long tiles can expect. Plans are chosen without them.
    """

    flops_per_s: float = 500e12
    launch_s: float = 5e-6
    causal_keys: float = 0.0
    bytes_per_s: float = 2.5e12
    hidden: float = 1.0
    at_once: float = 0.0
    matmul_flops_per_s: float = 0.0
    peak_flops: float = 0.0
    name: str = "gpu"
    rates: tuple[tuple[str, Rate], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_speeds(self, "a device")
        if self.hidden > 1:
            refuse("hidden", "a share, from 0 to 1", self.hidden, "a device")

    def rate_of(self, kernel: str) -> Rate | None:
        """Return the published rate of a kernel; None if nobody published it."""
        return dict(self.rates).get(kernel)


@dataclass(frozen=True, slots=True)
class Machine:
    """What plans are priced by: levels of links, from inside to outside, and a device.

    The default is one level, so that all ranks are alike.

    Attributes:
        levels: one, if one link joins all ranks; two, if it joins the ranks of a node, and another
            one the nodes.
        device: of every rank.
    """

    levels: tuple[Level, ...] = (Level(),)
    device: Device = Device()

    def __post_init__(self) -> None:
        if len(self.levels) not in (1, 2) or any(not level.ranks for level in self.levels[:-1]):
            expected = "one level, or two of which the first says how many ranks a node has"
            refuse("levels", expected, tuple(level.ranks for level in self.levels), "a machine")

    def node_of(self, rank: int) -> int:
        """Return the node of a rank: 0 if there is one level."""
        return rank // self.levels[0].ranks if len(self.levels) > 1 else 0

    def num_nodes(self, world_size: int) -> int:
        """Return over how many nodes so many ranks spread."""
        return self.node_of(world_size - 1) + 1

    def among(self, ranks: Sequence[int]) -> Machine:
        """Return the machine as some of its ranks see it, which count from 0 in this order.

        Ranks that do not fill runs of equally many per node are taken to have the outer link only:
        that is slower than what they have, and never wrong.
        """
        if len(self.levels) == 1:
            return self
        inside, outside = self.levels
        nodes = [self.node_of(rank) for rank in ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[at : at + size] for at in range(0, len(nodes), size)]
        are_runs = all(len(set(run)) == 1 for run in runs) and len(runs) == len(set(nodes))
        if len(runs) == 1:
            return replace(self, levels=(replace(inside, ranks=0),))
        if size == 1 or not are_runs:
            return replace(self, levels=(replace(outside, ranks=0),))
        return replace(self, levels=(replace(inside, ranks=size), replace(outside, ranks=0)))

    def with_speeds(self, bytes_per_s: float, flops_per_s: float) -> Machine:
        """Return the machine with another outermost link, and another device; 0 changes nothing."""
        *inside, outer = self.levels
        outer = replace(outer, bytes_per_s=bytes_per_s or outer.bytes_per_s)
        flops_per_s = flops_per_s or self.device.flops_per_s
        return Machine((*inside, outer), replace(self.device, flops_per_s=flops_per_s))

    def format(self) -> str:
        """Return the machine as text that `parse` reads."""
        first, *others = self.levels
        count = f"{first.ranks}x" if first.ranks else ""
        texts = [f"{count}{_format(self.device, DEVICES)}:{_format(first, LINKS)}"]
        for level in others:
            texts.append(f"{level.ranks}:" * bool(level.ranks) + _format(level, LINKS))
        return " x ".join(texts)

    @staticmethod
    def parse(text: str, *, site: str = "a machine") -> Machine:
        """Read a machine, such as ``"8xh100:nvlink4 x 8:ib400"``.

        Raises:
            InvalidText: it is no machine; the error names the part that is wrong.
            InvalidArgument: a number is impossible.
        """
        inside = r"(?:([0-9]{1,5})x)?([^:]+):([^:]+?)"
        match = re.fullmatch(rf"{inside}(?:\s+x\s+(?:([0-9]{{1,5}}):)?([^:]+))?", text.strip())
        if match is None or (match[5] and not match[1]):
            raise InvalidText(
                site=site,
                expected="a device and a link, then perhaps a number of nodes and the link between"
                " them, such as '8xh100:nvlink4 x 8:ib400'",
                got=shortened(text),
                remedy=f"use devices {', '.join(DEVICES)}, and links {', '.join(LINKS)}",
            )
        ranks, device, link, nodes, outer = match.groups()
        links = [(ranks, link), (nodes, outer)][: 2 if outer else 1]
        levels = [replace(_parse(name, LINKS, site), ranks=int(n or 0)) for n, name in links]
        return Machine(tuple(levels), _parse(device, DEVICES, site))


_Part = TypeVar("_Part", Level, Device)


def _numbers(part: Level | Device) -> list[str]:
    """Return what text may change of a known device or link; its data sheet stays as it is."""
    return [f.name for f in fields(part) if f.type == "float" and f.name != "peak_flops"]


def _format(part: _Part, known: Mapping[str, _Part]) -> str:
    usual = known.get(part.name) or next(iter(known.values()))
    changed = [
        f"{name}={getattr(part, name)!r}"
        for name in _numbers(part)
        if getattr(part, name) != getattr(usual, name)
    ]
    return usual.name + (f"[{','.join(changed)}]" if changed else "")


def _parse(text: str, known: Mapping[str, _Part], site: str) -> _Part:
    match = re.fullmatch(r"([a-z0-9]+)(?:\[([^\[\]]*)\])?", text.strip().lower())
    if match is None or match[1] not in known:
        raise InvalidText(
            site=site,
            expected=f"one of {', '.join(known)}",
            got=shortened(text),
            remedy="use one of these, with other numbers as in"
            f" '{next(iter(known))}[bytes_per_s=1e9]'",
        )
    usual = known[match[1]]
    names = _numbers(usual)
    numbers: dict[str, Any] = {}
    for change in filter(None, (match[2] or "").split(",")):
        name, _, number = change.partition("=")
        try:  # a name or a number that is none is a ValueError
            numbers[names[names.index(name.strip())]] = float(number)
        except ValueError:
            raise InvalidText(
                site=site,
                expected=f"a number for one of {', '.join(names)}",
                got=shortened(change),
                remedy=f"write {usual.name}[{names[0]}=1e9]",
            ) from None
    return replace(usual, **numbers)


# Of the forward's rate, where no backward was published: all three kernels have it on the H100.
BACKWARD_RATIO = 0.87

_FA2 = "FlashAttention-2 paper (arXiv 2307.08691), 73% and 63% of 312 TFLOP/s"
_FA3 = "FlashAttention-3 paper (arXiv 2407.08608), figures 5 and 6, H100 80GB SXM5"
_FA4 = "FlashAttention-4 paper (March 2026): 1613 TFLOP/s, up to 1.3 x cuDNN 9.13, 2.7 x Triton"


def _rate(forward: float, backward: float | None, source: str) -> Rate:
    backward = forward * BACKWARD_RATIO if backward is None else backward
    return Rate(forward * 1e12, backward * 1e12, source)


_H100 = {
    "flash": _rate(370, 322, _FA3),
    "cuDNN": _rate(595, 516, _FA3),
    "FA3": _rate(648, 561, _FA3),
    "flex": _rate(395, None, f"{_FA3}, Triton's forward"),
}
_H200 = {
    kernel: replace(rate, source="as the H100, whose chip it has") for kernel, rate in _H100.items()
}
_B200 = {
    "cuDNN": _rate(1613 / 1.3, None, _FA4),
    "FA4": _rate(1613, None, _FA4),
    "flex": _rate(1613 / 2.7, None, _FA4),
}


# The share of the specified operations that large matrix multiplications reach.
MATMUL_SHARE = 0.7


DEVICES: Mapping[str, Device] = {
    "gpu": Device(),
    **{
        # Tiles run as the backward of its usual kernel, where most flops are.
        name: Device(
            peak_flops=flops,
            matmul_flops_per_s=MATMUL_SHARE * flops,
            flops_per_s=rates[kernel].backward,
            bytes_per_s=bytes_per_s,
            name=name,
            rates=tuple(rates.items()),
        )
        for name, kernel, flops, bytes_per_s, rates in (
            # Operations and bytes of memory per second: NVIDIA's data sheets of the SXM boards.
            ("a100", "flash", 312e12, 2.0e12, {"flash": _rate(228, 197, _FA2)}),
            ("h100", "cuDNN", 989e12, 3.35e12, _H100),
            ("h200", "cuDNN", 989e12, 4.8e12, _H200),
            ("b200", "cuDNN", 2250e12, 8.0e12, _B200),
        )
    },
    # One core; torch's kernel takes 512 keys at a time, of which the mask hides some. The rest was
    # measured, benchmarks/results/calibrated-plans-2026-11-25.md.
    "cpu": Device(
        flops_per_s=8.5e10, launch_s=5e-5, causal_keys=512, bytes_per_s=3.5e10, name="cpu"
    ),
}


LINKS: Mapping[str, Level] = {Level().name: Level()} | {
    name: Level(0, gbytes_per_s * 1e9, latency_us * 1e-6, name)
    for name, gbytes_per_s, latency_us in (
        # What NCCL moved to other GPUs of 8, per GPU: 195 GB/s by sendrecv_perf on A100 (li-plus/
        # playground, cuda/nccl.md), 296 on H200, 306 on H100 and 499 on B200 by all_to_all_single
        # of 291 MB, 7/8 of which cross (fast-ulysses, docs/benchmark.md, "raw", August 2026). Copy
        # engines reach 375 and 621 there; data sheets say 300, 450 and 900. Latencies are
        # assumptions, here and below.
        ("nvlink3", 195, 10),
        ("nvlink4", 296, 10),
        ("nvlink5", 499, 10),
        ("pcie4", 32, 15),
        ("pcie5", 64, 15),
        ("ib100", 12.5, 20),
        ("ib200", 25, 20),
        ("ib800", 100, 20),
        ("eth10", 1.25, 50),
        ("eth25", 3.125, 50),
        ("eth100", 12.5, 30),
        ("eth400", 50, 30),
        ("tcp", 1.3, 200),  # gloo between processes of a host: measured, as CPUs are
    )
}

# The chip of a compute capability, where its name is not known.
CHIPS: Mapping[tuple[int, int], str] = {(8, 0): "a100", (9, 0): "h100", (10, 0): "b200"}

# What joins the ranks of a node, where nobody says it.
INSIDE = {"a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "cpu": "tcp"}


def known_machine(device: str, world_size: int, node_size: int = 8, num_cores: int = 0) -> Machine:
    """Return the machine of the tables, for ranks of which nothing was measured.

    The cores of a node count if the device is a CPU, where they also move the data.
    """
    of_rank, link = DEVICES[device], LINKS[INSIDE.get(device, "ib400")]
    if device == "cpu":
        cores = max(1, num_cores // node_size)
        of_rank = replace(
            of_rank,
            flops_per_s=cores * of_rank.flops_per_s,
            hidden=float(num_cores > node_size),
            at_once=0.0 if num_cores >= node_size else float(max(1, num_cores)),
        )
    if world_size <= node_size or device not in INSIDE:
        return Machine((link,), of_rank)
    between = LINKS["eth10" if device == "cpu" else "ib400"]
    return Machine((replace(link, ranks=node_size), between), of_rank)


# The machine that `calibrate` measured, in a file of the cache folder:
# {"machine": "4xcpu[...]:tcp[...]", "ranks": 4, ...}
CALIBRATED = "calibrated"
_NAME = "cp_inductor_machine.json"


def write_calibrated(machine: Machine, folder: str | Path, num_ranks: int) -> Path:
    """Write a machine to the cache folder, with the ranks, host and versions it was measured on."""
    path = Path(folder) / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"machine": machine.format(), "ranks": num_ranks, **_where()}))
    beside.replace(path)  # readers never see a part of it
    return path


def read_calibrated(folder: str | Path) -> Machine:
    """Return the machine that was measured on this host.

    Raises:
        InvalidArgument: none was, or on another host or other versions.
    """
    path = Path(folder) / _NAME
    try:
        kept = json.loads(path.read_text())
        there = {name: kept[name] for name in _where()}
        machine = Machine.parse(kept["machine"], site=str(path))
    except (OSError, ValueError, KeyError, TypeError):
        there, machine = {}, Machine()
    if there != _where():
        changed = [f"{name} {value}" for name, value in there.items() if _where()[name] != value]
        raise InvalidArgument(
            site=f"machine={CALIBRATED!r}",
            expected=f"{path}, of this host and these versions",
            got=", ".join(changed) or "no such file",
            remedy="call cp_inductor.calibrate(mesh), or run"
            " torchrun -m cp_inductor calibrate, on these ranks",
        )
    return machine


def _where() -> dict[str, str]:
    host, processor = socket.gethostname(), platform.machine()
    return {"host": host, "processor": processor, "torch": version("torch")}
