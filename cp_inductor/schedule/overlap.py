"""Hide exchanges behind compute that is already there: the order of one rank's program.

    k  v  start  q  wait  tile  dw       starts where their data is ready, waits where it is used,
       |---------------|                 and compute between them that depends on neither

This module knows no graph: a program is a list of instructions, some of which start an exchange or
wait for one. An exchange that would keep the device waiting pulls compute into its flight, nearest
first: from behind its wait, what does not depend on it, and from before its start, what it does not
depend on. A move is made only if it saves time and stays within memory, so that nothing moves
further than an exchange needs. Starts keep their order, whatever is moved: all ranks, whose
programs differ, agree on it.

Time is that of two clocks, of the device and of the link: an exchange takes the link from its
start, or from the end of the one before; a wait keeps the device until the exchange is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

# A move that saves less is not made; nothing that short is known so exactly.
LEAST_GAIN_S = 1e-6

# How many instructions are tried for an exchange, in either direction, how many of them in vain one
# after the other, and how often all exchanges are gone through.
MAX_TRIED = 48
PATIENCE = 12
ROUNDS = 2

# What takes up to this part of an exchange's time to get ready for it is packing.
PACKING = 0.1

# A move is judged by the clock so many waits further on.
HORIZON = 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One node of a program.

    Attributes:
        inputs: instructions that come before it, in any order.
        seconds: on the device; of a start, on the link.
        is_start: it starts an exchange.
        waits_for: the start whose exchange it waits for.
        is_input: it stands at the head of the program and stays there.
        is_view: it makes nothing and takes no time.
        num_bytes: of the buffer that it makes.
        reads: instructions whose buffers it reads, also through views of them; none for a view.
        is_kept: its buffer outlives the program.
    """

    inputs: tuple[int, ...] = ()
    seconds: float = 0.0
    is_start: bool = False
    waits_for: int | None = None
    is_input: bool = False
    is_view: bool = False
    num_bytes: int = 0
    reads: tuple[int, ...] = ()
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What an order of instructions costs.

    Attributes:
        seconds: until the last instruction is done.
        exposed_s: of these, in waits.
        peak_bytes: of all buffers alive at once.
        exchange_bytes: of buffers that exchanges brought, or bring, alive at once.
    """

    seconds: float
    exposed_s: float
    peak_bytes: int
    exchange_bytes: int


def measure(instructions: Sequence[Instruction], order: Sequence[int]) -> Measured:
    """Run an order on the two clocks, and count what is alive."""
    run = _Run(instructions, list(order))
    compute = sum(instruction.seconds for instruction in instructions if not instruction.is_start)
    seconds = run.clock_at(len(order))
    return Measured(seconds, max(0.0, seconds - compute), *run.peaks(0, run.order))


def expose(instructions: Sequence[Instruction]) -> list[int]:
    """Return the order in which nothing overlaps: every start right before its wait."""
    order: list[int] = []
    held: list[int] = []
    for index in _as_late_as_used(instructions, range(len(instructions))):
        instruction = instructions[index]
        if instruction.is_start:
            held.append(index)
            continue
        while held and instruction.waits_for is not None and held[0] <= instruction.waits_for:
            order.append(held.pop(0))
        order.append(index)
    return order + held


def schedule(instructions: Sequence[Instruction], budget_bytes: int) -> list[int]:
    """Return an order in which less is exposed.

    Args:
        instructions: a program, in an order that can be run.
        budget_bytes: by how much more may be alive at once than if nothing overlapped; as much
            may exchanges hold, if they do not hold more in the order given.

    Returns:
        A permutation of the instructions; starts are in their order.
    """
    exposed = expose(instructions)
    most = measure(instructions, exposed).peak_bytes + budget_bytes
    order = _as_late_as_used(instructions, range(len(instructions)))
    given = measure(instructions, order)
    if given.peak_bytes > most:
        order, given = exposed, measure(instructions, exposed)
    run = _Run(instructions, order)
    run.limits = (most, max(budget_bytes, given.exchange_bytes))
    for _ in range(ROUNDS):
        if not _cover_all(run):
            break
    for index, instruction in enumerate(instructions):
        if instruction.is_start:
            run.raise_start(index)
    late = _as_late_as_used(instructions, run.order)
    # What arrived and nothing reads is held until its wait, which then better stays where it is.
    return late if measure(instructions, late).peak_bytes <= most else run.order


def _as_late_as_used(instructions: Sequence[Instruction], order: Iterable[int]) -> list[int]:
    """Move waits, and views, to their first use: they take no time, nor memory of what is read."""
    order = list(order)
    first_use = [len(order)] * len(instructions)
    # Where an instruction goes, and whether right before what is there (0) or there (1).
    key = [(0, 0)] * len(instructions)
    # From the last: what an instruction is used by has its place already.
    for place in range(len(order) - 1, -1, -1):
        index = order[place]
        instruction = instructions[index]
        is_free = instruction.is_view or instruction.waits_for is not None
        is_used = first_use[index] < len(order)
        key[index] = (first_use[index], 0) if is_free and is_used else (place, 1)
        for source in instruction.inputs:
            first_use[source] = min(first_use[source], key[index][0])
    # Of those for the same use, the earlier in the program is first: it may be used by the later.
    return sorted(order, key=lambda index: key[index])


def _cover_all(run: _Run) -> bool:
    """Go through the exchanges in the order of their waits; return whether anything moved."""
    waits = [index for index in run.order if run.instructions[index].waits_for is not None]
    has_moved = False
    for wait in waits:
        has_moved |= _cover(run, wait)
    return has_moved


def _cover(run: _Run, wait: int) -> bool:
    """Pull compute into an exchange's flight until nothing waits for it, or nothing helps."""
    has_moved = False
    for candidates in (run.behind(wait), run.before(wait)):
        num_in_vain = 0
        for index in list(islice(candidates, MAX_TRIED)):
            if run.stall(wait) <= LEAST_GAIN_S or num_in_vain == PATIENCE:
                break
            is_better = run.move_into_flight(index, wait)
            num_in_vain = 0 if is_better else num_in_vain + 1
            has_moved |= is_better
    return has_moved


class _Run:
    """An order of instructions, its clocks and memory, and the moves that improve it."""

    def __init__(self, instructions: Sequence[Instruction], order: list[int]) -> None:
        self.instructions, self.order = instructions, order
        self.position = [0] * len(instructions)
        for place, index in enumerate(order):
            self.position[index] = place
        self.ancestors, self.descendants = _closures(instructions)
        self.readers: list[list[int]] = [[index] for index in range(len(instructions))]
        for index, instruction in enumerate(instructions):
            for source in instruction.reads:
                self.readers[source].append(index)
        self.limits: tuple[int, int] = (0, 0)
        # Before each place: the two clocks, and the bytes alive; known up to some place.
        self.clocks: list[tuple[float, float]] = [(0.0, 0.0)]
        self.alive: list[tuple[int, int]] = [(0, 0)]
        self.arrival: dict[int, float] = {}

    # --- Time --------------------------------------------------------------------------------

    def clock_at(self, place: int) -> float:
        """Return the device's clock before a place."""
        while len(self.clocks) <= place:
            at = len(self.clocks) - 1
            self.clocks.append(self._tick(self.order[at], *self.clocks[at], self.arrival))
        return self.clocks[place][0]

    def _tick(
        self, index: int, clock: float, link: float, arrival: dict[int, float]
    ) -> tuple[float, float]:
        instruction = self.instructions[index]
        if instruction.is_start:
            link = max(link, clock) + instruction.seconds
            arrival[index] = link
        elif instruction.waits_for is not None:
            clock = max(clock, arrival[instruction.waits_for])
        else:
            clock += instruction.seconds
        return clock, link

    def stall(self, wait: int) -> float:
        """Return how long the device stands still in a wait."""
        place = self.position[wait]
        clock = self.clock_at(place)
        start = self.instructions[wait].waits_for
        assert start is not None
        return self.arrival[start] - clock

    def _clock_after(self, at: int, segment: Sequence[int]) -> float:
        """Return the device's clock after a segment, were it to stand at a place."""
        self.clock_at(at)
        clock, link = self.clocks[at]
        arrival = dict(self.arrival)
        for index in segment:
            clock, link = self._tick(index, clock, link, arrival)
        return clock

    # --- Memory ------------------------------------------------------------------------------

    def peaks(self, at: int, segment: Sequence[int]) -> tuple[int, int]:
        """Return the most bytes alive in a segment, were it to stand at a place.

        Of all buffers, and of those of exchanges.
        """
        self._alive_at(at)
        peaks = list(self.alive[at])
        for _, now, _ in self._count(at, segment, self.alive[at]):
            peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        return peaks[0], peaks[1]

    def _alive_at(self, place: int) -> tuple[int, int]:
        known = len(self.alive) - 1
        if known < place:
            # To the end at once: a segment is counted with all that is read in it.
            rest = self.order[known:]
            self.alive += [after for _, _, after in self._count(known, rest, self.alive[known])]
        return self.alive[place]

    def _count(
        self, at: int, segment: Sequence[int], alive: tuple[int, int]
    ) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Yield each instruction of a segment, and what is alive in it and after it."""
        end = at + len(segment)
        last: dict[int, int] = {}
        for index in segment:
            for source in (index, *self.instructions[index].reads):
                last[source] = index
        freed: dict[int, list[int]] = {}
        for source, index in last.items():
            is_read_later = any(self.position[reader] >= end for reader in self.readers[source])
            if not self.instructions[source].is_kept and not is_read_later:
                freed.setdefault(index, []).append(source)
        total, exchanged = alive
        for index in segment:
            instruction = self.instructions[index]
            total += instruction.num_bytes
            exchanged += instruction.num_bytes if instruction.is_start else 0
            now = (total, exchanged)
            for source in freed.get(index, ()):
                total -= self.instructions[source].num_bytes
                exchanged -= (
                    self.instructions[source].num_bytes if self.instructions[source].is_start else 0
                )
            yield index, now, (total, exchanged)

    # --- Moves -------------------------------------------------------------------------------

    def behind(self, wait: int) -> Iterator[int]:
        """Yield compute behind a wait that does not depend on it, nearest first."""
        for place in range(self.position[wait] + 1, len(self.order)):
            index = self.order[place]
            if self._takes_time(index) and not self.descendants[wait] >> index & 1:
                yield index

    def before(self, wait: int) -> Iterator[int]:
        """Yield compute, and waits, before an exchange that does not depend on them."""
        start = self.instructions[wait].waits_for
        assert start is not None
        for place in range(self.position[start] - 1, -1, -1):
            index = self.order[place]
            is_candidate = self.instructions[index].waits_for is not None or self._takes_time(index)
            if is_candidate and not self.ancestors[start] >> index & 1:
                yield index

    def _starts(self, index: int) -> bool:
        return self.instructions[index].is_start

    def _takes_time(self, index: int) -> bool:
        instruction = self.instructions[index]
        return instruction.seconds > LEAST_GAIN_S and not instruction.is_start

    def move_into_flight(self, index: int, wait: int) -> bool:
        """Move an instruction between an exchange's start and its wait, if that saves time."""
        start = self.instructions[wait].waits_for
        assert start is not None
        place = self.position[index]
        if self.position[start] < place < self.position[wait]:
            return False  # came along with another
        if place > self.position[wait]:
            at, segment = self._pulled_up(index, wait)
        else:
            at, segment = self._pushed_down(index, start)
        is_better = self._gain(at, segment) > LEAST_GAIN_S and self._place(at, segment)
        if is_better:
            # What is started behind the wait may be ready now; other ranks wait for it.
            following = next(
                (i for i in self.order[self.position[wait] :] if self._starts(i)), None
            )
            if following is not None:
                self.raise_start(following)
        return is_better

    def _pulled_up(self, index: int, wait: int) -> tuple[int, list[int]]:
        """A instruction and what it depends on, before the wait."""
        at, end = self.position[wait], self.position[index] + 1
        needed = self.ancestors[index] | 1 << index
        window = self.order[at:end]
        moved = [instruction for instruction in window if needed >> instruction & 1]
        return at, moved + [instruction for instruction in window if not needed >> instruction & 1]

    def _pushed_down(self, index: int, start: int) -> tuple[int, list[int]]:
        """A instruction and what depends on it, behind the start."""
        at, end = self.position[index], self.position[start] + 1
        dependent = self.descendants[index] | 1 << index
        window = self.order[at:end]
        moved = [instruction for instruction in window if dependent >> instruction & 1]
        return at, [
            instruction for instruction in window if not dependent >> instruction & 1
        ] + moved

    def raise_start(self, start: int) -> None:
        """Start an exchange before waits that it does not depend on: others wait for this rank.

        And before all else, where it brings this rank nothing. What is packed for it comes along.
        """
        end = self.position[start]
        at, moved, overtaken = end, [start], list[int]()
        most_s = PACKING * self.instructions[start].seconds
        while at > 0:
            index = self.order[at - 1]
            instruction = self.instructions[index]
            if instruction.is_input:
                break
            if self.ancestors[start] >> index & 1:
                if (
                    instruction.is_start
                    or instruction.waits_for is not None
                    or instruction.seconds > most_s
                ):
                    break
                moved.append(index)
            elif instruction.is_start or (
                instruction.seconds > 0 and self.instructions[start].num_bytes
            ):
                break
            else:
                overtaken.append(index)
            at -= 1
        if overtaken:
            self._place(at, [*reversed(moved), *reversed(overtaken)])

    def _gain(self, at: int, segment: Sequence[int]) -> float:
        """Return the seconds that a segment saves, were it to stand at a place."""
        end = at + len(segment)
        horizon = self._horizon(end)
        return self.clock_at(horizon) - self._clock_after(at, [*segment, *self.order[end:horizon]])

    def _place(self, at: int, segment: list[int]) -> bool:
        """Put a segment where it takes no more memory than allowed; return whether it did."""
        end = at + len(segment)
        old = self.peaks(at, self.order[at:end])
        new = self.peaks(at, segment)
        for before, after, limit in zip(old, new, self.limits, strict=True):
            if after > max(before, limit):
                return False
        self.order[at:end] = segment
        for place, index in enumerate(segment, at):
            self.position[index] = place
        del self.clocks[at + 1 :], self.alive[at + 1 :]
        return True

    def _horizon(self, end: int) -> int:
        num_waits = 0
        for place in range(end, len(self.order)):
            num_waits += self.instructions[self.order[place]].waits_for is not None
            if num_waits > HORIZON:
                return place
        return len(self.order)


def _closures(instructions: Sequence[Instruction]) -> tuple[list[int], list[int]]:
    """Return the ancestors and descendants of every instruction, as bits; starts are a chain."""
    ancestors = [0] * len(instructions)
    inputs: list[tuple[int, ...]] = []
    previous: int | None = None
    for index, instruction in enumerate(instructions):
        sources = instruction.inputs
        if instruction.is_start:
            sources = sources if previous is None else (*sources, previous)
            previous = index
        inputs.append(sources)
        for source in sources:
            assert source < index, "instructions must be given in an order that can be run"
            ancestors[index] |= ancestors[source] | 1 << source
    descendants = [0] * len(instructions)
    for index in range(len(instructions) - 1, -1, -1):
        for source in inputs[index]:
            descendants[source] |= descendants[index] | 1 << index
    return ancestors, descendants
