"""What a rehearsal found out, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KIB = 2**10
# Relative: of half types the rounding of the result; of wider ones some hundred roundings.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 1e-5, "float64": 1e-13}


@dataclass(frozen=True)
class Finding:
    """Something that a program must not do.

    Attributes:
        rank: that did it.
        kind: such as "out of bounds" or "read before wait".
        kernel: the kernel, op or exchange.
        buffer: as the generated code writes it.
        where: file and line of the generated code.
        line: that line.
        what: happened, the first time.
        count: how often.
    """

    rank: int
    kind: str
    kernel: str
    buffer: str
    where: str
    line: str
    what: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"rank {self.rank}: {self.kind}: {self.buffer} in {self.kernel or 'the program'}, at"
            f" {self.where}: {self.what}{times}\n      {self.line}"
        )


@dataclass
class RankReport:
    """What one rank's programs did.

    Attributes:
        rank: the global rank.
        kernels: how often each Triton kernel ran.
        replaced: how often a plain implementation stood in for the kernel of an op.
        sent_bytes, received_bytes: to and from other ranks.
        findings: by what makes them the same.
    """

    rank: int
    kernels: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    findings: dict[Any, Finding] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {sum(self.kernels.values())} launches of {len(self.kernels)}"
            f" kernels, {sum(self.replaced.values())} calls of plain implementations,"
            f" {self.sent_bytes / KIB:.1f} KiB sent, {self.received_bytes / KIB:.1f} KiB received"
        )


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of one process in float64, as |a - b| / |b|.

    Attributes:
        rehearsed: of the rehearsal.
        one_process: of the same model on one process, in its own dtypes.
        dtype: of the tensor, such as "bfloat16".
    """

    rehearsed: float
    one_process: float
    dtype: str

    @property
    def bound(self) -> float:
        """What `rehearsed` may be: half as much again as one process, or one rounding."""
        return max(1.5 * self.one_process, ROUNDING.get(self.dtype, 0.0))

    @property
    def is_fine(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.rehearsed <= self.bound


@dataclass(frozen=True)
class RehearsalReport:
    """What a rehearsal found out.

    Attributes:
        target: that the programs were generated for.
        ranks: what each rank's programs did.
        differences: from one process, by what is compared: ``output 0``, ``loss``, ``gradient of
            qkv.weight``.
        uncompared: why there are no differences; empty if there are.
    """

    target: str
    ranks: tuple[RankReport, ...]
    differences: Mapping[str, Difference]
    uncompared: str

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all ranks."""
        return tuple(one for rank in self.ranks for one in rank.findings.values())

    @property
    def is_fine(self) -> bool:
        """Whether there are no findings, and all numbers were compared and within their bounds."""
        is_near = all(one.is_fine for one in self.differences.values())
        return not self.findings and bool(self.differences) and is_near

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"rehearsed for {self.target} on {len(self.ranks)} ranks:"
            " executed under Triton's interpreter, not on a device"
        )
        yield from map(str, self.ranks)
        if self.uncompared:
            yield f"numbers: not compared with one process, because {self.uncompared}"
        for name, one in self.differences.items():
            yield (
                f"{name}: {one.rehearsed:.1e} from one process in float64, which in {one.dtype} is"
                f" {one.one_process:.1e} off"
                + ("" if one.is_fine else f"   <-- more than {one.bound:.1e}")
            )
        yield f"findings: {len(self.findings) or 'none'}"
        yield from (f"  {finding}" for finding in self.findings)
