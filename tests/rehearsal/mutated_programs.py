"""Mistakes that are put into generated programs, to see that a rehearsal notices each.

code = one rank's programs, as `cross_compile` generates them
mutated = change one place of the text
replay(mutated) on two ranks  =>  a finding, an error, or numbers that are off
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cp_inductor import cross_compile
from cp_inductor.inspect.compile_for import Target
from cp_inductor.inspect.pretend import pretend_gpu
from tests.rehearsal.device import Device
from tests.rehearsal.exchanges import Exchanges
from tests.rehearsal.program import load_program
from tests.rehearsal.reference import distance
from tests.support.graphs import attend_causal
from tests.support.reference import attend_with_grads, make_qkv

WORLD, HEADS, LENGTH, HEAD_DIM = 2, 4, 64, 16
TARGET = "cuda:sm_90"

Programs = Mapping[str, str]  # "forward", "backward" => code


def programs_of(rank: int) -> Programs:
    """Generate one rank's programs; its collectives name the group of a world of its own."""
    shape = torch.empty(1, HEADS, LENGTH, HEAD_DIM, device="meta", requires_grad=True)
    shards = (shape.bfloat16().requires_grad_(),) * 3
    options = {"strategy": "ring"}
    code = cross_compile(attend_causal, shards, world_size=WORLD, rank=rank, options=options).code
    return dict(code)


def replay(programs: tuple[Programs, ...]) -> tuple[list[str], float]:
    """Run this rank's programs; return the findings, and the largest difference, of all ranks.

    The difference is relative, to attention on one process in float64.
    """
    rank = dist.get_rank()
    device = Device(rank)
    exchanges = Exchanges(device)
    gpu = Target.parse(TARGET).gpu
    sizes = {"batch": 1, "num_heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.bfloat16}
    whole = make_qkv(WORLD * LENGTH, **sizes)
    local = [tensor.chunk(WORLD, 2)[rank].contiguous() for tensor in whole]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with pretend_gpu(gpu):
            ours, calls = programs[rank], (device, exchanges, {})
            forward, backward = (
                load_program(ours[kind], Path(folder, f"{kind}.py"), *calls, read_only)
                for kind, read_only in (("forward", (0, 1, 2)), ("backward", ()))
            )
        out, *saved = forward(local[:3])
        grads = backward([*saved, local[3]])
    exchanges.finish()
    results = [out, *grads]
    one_process = attend_with_grads(*whole, is_causal=True)
    expected = [tensor.chunk(WORLD, 2)[rank] for tensor in one_process]
    worst = max(distance(a, b) for a, b in zip(results, expected, strict=True))
    mine = [str(one) for one in device.report.findings.values()], worst
    told: list[tuple[list[str], float]] = [mine] * WORLD
    dist.all_gather_object(told, mine)
    return [one for findings, _ in told for one in findings], max(one for _, one in told)


@dataclass(frozen=True)
class Mistake:
    """A change of one place in a rank's program: the `number`-th match of a pattern."""

    name: str
    kind: str
    pattern: str
    change: Callable[[re.Match[str]], str]
    number: int = 0
    rank: int = 1

    def apply(self, programs: tuple[Programs, ...]) -> tuple[Programs, ...] | None:
        """Return the changed programs; None if there is no such place."""
        code = programs[self.rank][self.kind]
        places = list(re.finditer(self.pattern, code, re.MULTILINE))
        if self.number >= len(places):
            return None
        match = places[self.number]
        new = code[: match.start()] + self.change(match) + code[match.end() :]
        mine = {**programs[self.rank], self.kind: new}
        return tuple(mine if rank == self.rank else one for rank, one in enumerate(programs))


def _dropped(match: re.Match[str]) -> str:
    return match[1] + "pass"


def _shift(what: str, by: int) -> Callable[[re.Match[str]], str]:
    return lambda match: f"tl.{what}({match[1]} + ({by}) + ("


def _one_less(match: re.Match[str]) -> str:
    return f"empty_strided_cuda(({int(match[1]) - 1}, )"


def _overwriting(match: re.Match[str]) -> str:
    return f"{match[1]}torch.ops.aten.copy_.default(primals_1, primals_1)\n{match[0]}"


def _without_other(match: re.Match[str]) -> str:
    """Two masked loads of which one is chosen: add them, which is right if lanes hold zeros."""
    return f"){match[1]}){match[2]}{match[3]} + {match[4]}"


def _resized(match: re.Match[str]) -> str:
    sizes = [int(size) // 2 for size in match.groups()[1:]]
    return f"all_to_all_single.default({match[1]}, {sizes[:2]}, {sizes[2:]}"


LOAD, STORE = r"tl\.load\((\w+) \+ \(", r"tl\.store\((\w+) \+ \("
LAUNCH = r"^( +)triton_\w+\.run\(.*$"
WAIT = r"^( +)torch\.ops\._c10d_functional\.wait_tensor\.default\(\w+\)$"
START = r"all_to_all_single\.default\((\w+), \[(\d+), (\d+)\], \[(\d+), (\d+)\]"
SENT = r"empty_strided_cuda\(\(([1-9]\d*), \)"
LSE = r"empty_strided_cuda\((?=\(1, 4, 64\))"
JOINED = r", other=0\.0\)([^\0]*?), other=0\.0\)([^\0]*?)tl\.where\(\w+, (\w+), (\w+)\)"
CAUSAL = r"0\.0, True, "
SHIFTED = {"a little": 1, "out of the buffer": 1 << 20, "to before it": -7}

MISTAKES = (
    *(
        Mistake(f"{what} shifted {how}, {kind}", kind, pattern, _shift(what, by))
        for what, pattern in (("load", LOAD), ("store", STORE))
        for how, by in SHIFTED.items()
        for kind in ("forward", "backward")
    ),
    *(
        Mistake(f"launch {number} dropped, {kind}", kind, LAUNCH, _dropped, number)
        for kind, number in (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1))
    ),
    *(
        Mistake(f"wait {number} dropped, {kind}", kind, WAIT, _dropped, number)
        for kind, number in (("forward", 0), ("backward", 0), ("backward", 1))
    ),
    Mistake("a split size", "forward", START, _resized, rank=0),
    Mistake("a split size of the receiver", "forward", START, _resized),
    Mistake("a mask", "forward", CAUSAL, lambda match: "0.0, False, "),
    Mistake("a mask, backward", "backward", CAUSAL, lambda match: "0.0, False, "),
    Mistake("a scale", "forward", r"scale=0\.25", lambda match: "scale=0.5"),
    Mistake("an offset of a view", "forward", r", 1\), 0\)", lambda match: ", 1), 16)"),
    Mistake("a send buffer that is too small", "forward", SENT, _one_less, rank=0),
    Mistake("memory of the host", "forward", LSE, lambda match: "empty_strided_cpu("),
    Mistake("an input overwritten", "forward", r"^( +)return \(", _overwriting),
    Mistake("lanes without a value", "forward", JOINED, _without_other, rank=0),
    Mistake("a stride", "forward", r"(\d+), 1\), 0\)", lambda match: f"{match[1]}, 2), 0)"),
)
