"""What a rehearsal found out, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KIB = 2**10

# What running programs this way does not show.
UNSEEN = (
    "races between the threads of a kernel, and its use of shared memory, TMA and barriers",
    "the rounding of tensor cores, of fast divisions and of transcendental functions on the device",
    "the flash, memory-efficient and matmul kernels themselves: plain implementations stand in for"
    " them, which check what those kernels ask of their arguments",
    "races between streams, and memory that the allocator reuses across streams",
    "other configurations of a kernel than the first, and real block sizes: blocks are as large as"
    " the masks of the kernel allow",
    "what only large shapes show, such as 32-bit indices that overflow",
    "speed: times are those of the interpreter",
)


@dataclass
class Exchanged:
    """What the collectives of one kind moved, for one rank.

    Attributes:
        count: of the collectives.
        sent_bytes, received_bytes: to and from other ranks.
    """

    count: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


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
        graphs: such as ``graph 0 forward``, in the order in which they were compiled.
        kernels: how often each Triton kernel ran.
        replaced: how often a plain implementation stood in for the kernel of an op.
        exchanges: collectives, by op.
        findings: by what makes them the same.
    """

    rank: int
    graphs: list[str] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    exchanges: dict[str, Exchanged] = field(default_factory=dict)
    findings: dict[Any, Finding] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return sum(one.sent_bytes for one in self.exchanges.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received from other ranks."""
        return sum(one.received_bytes for one in self.exchanges.values())


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of one process in float64, as |a - b| / |b|.

    Attributes:
        rehearsed: of the rehearsal.
        one_process: of the same model on one process, in its own dtypes.
        dtype: of the tensor, such as "bfloat16".
        is_zero: whether it is zero, NaN or infinite everywhere on one process, which says little.
    """

    rehearsed: float
    one_process: float
    dtype: str
    is_zero: bool = False

    @property
    def bound(self) -> float:
        """What `rehearsed` may be: half as much again as one process, or one rounding."""
        return max(1.5 * self.one_process, ROUNDING.get(self.dtype, 0.0))

    @property
    def is_fine(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.rehearsed <= self.bound


# Why there are no differences, if that is as it should be.
NOT_ASKED = "not asked for"

# Relative: of half types the rounding of the result; of wider ones some hundred roundings.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 1e-5, "float64": 1e-13}


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
        """Whether there are no findings, and no number is further off than its bound.

        Numbers that were to be compared, and could not be, are not fine.
        """
        are_known = bool(self.differences) or self.uncompared == NOT_ASKED
        is_near = all(one.is_fine for one in self.differences.values())
        return not self.findings and are_known and is_near

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"rehearsed for {self.target} on {len(self.ranks)} ranks:"
            " executed under Triton's interpreter, not on a device"
        )
        yield from ("", *self._numbers())
        yield from ("", *self._by_rank())
        yield from ("", *self._replaced())
        yield from ("", *self._findings())
        yield from ("", "not seen this way:", *(f"  - {one}" for one in UNSEEN))

    def _numbers(self) -> Iterator[str]:
        if not self.differences:
            yield f"numbers: not compared with one process, because {self.uncompared}"
            return
        yield "numbers, |a - b| / |b| from one process in float64:"
        width = max(map(len, self.differences))
        yield f"  {'':{width}}  rehearsed  one process  dtype"
        for name, one in self.differences.items():
            wrong = "   (zero or not finite everywhere)" if one.is_zero else ""
            wrong = wrong if one.is_fine else f"   <-- more than {one.bound:.1e}"
            yield (
                f"  {name:{width}}  {one.rehearsed:9.1e}  {one.one_process:11.1e}"
                f"  {one.dtype}{wrong}"
            )

    def _by_rank(self) -> Iterator[str]:
        yield "rank  kernels  launches  plain calls  sent KiB  received KiB"
        for rank in self.ranks:
            yield (
                f"{rank.rank:4}  {len(rank.kernels):7}  {sum(rank.kernels.values()):8}"
                f"  {sum(rank.replaced.values()):11}"
                f"  {rank.sent_bytes / KIB:8.1f}  {rank.received_bytes / KIB:12.1f}"
            )

    def _replaced(self) -> Iterator[str]:
        yield "computed by plain implementations, calls on all ranks:"
        counts = sum((rank.replaced for rank in self.ranks), Counter[str]())
        yield from (f"  {count:5}  {name}" for name, count in counts.most_common())

    def _findings(self) -> Iterator[str]:
        findings = self.findings
        yield f"findings: {len(findings) or 'none'}"
        yield from (f"  {finding}" for finding in findings)
