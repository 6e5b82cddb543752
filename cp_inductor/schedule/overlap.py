"""Order one rank's program so that exchanges run during compute that does not depend on them.

    before    k  v  q  start  wait  tile  dw        the device stands still in the wait
    after     k  v  start  q  dw  wait  tile        q and dw are computed during the exchange

A program is a list of instructions; some start an exchange and some wait for one. The time between
a start and its wait is the exchange's flight. If the device would stand still in a wait, compute is
moved into the flight, nearest first: instructions after the wait that do not depend on it, then
instructions before the start that the start does not depend on. A move is made only if it saves
time and stays within the memory limits, so nothing moves further than needed. Starts keep their
order, because all ranks must start collectives in the same order and their programs differ.

The model of time has two clocks, of the device and of the link. An exchange occupies the link from
its start, or from the end of the exchange before it. A wait stops the device until the exchange has
ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

# The numbers below follow from no theory. `benchmarks/overlap.py` judges them.

# A move that saves less is not made: estimates of time are not that exact.
LEAST_GAIN_S = 1e-6

# Limits of the search. For one exchange and one direction, try at most MAX_TRIED instructions, none
# from more than MAX_PLACES away, and stop after PATIENCE of them in a row did not help. Go through
# all exchanges ROUNDS times.
MAX_TRIED = 48
MAX_PLACES = 1024
PATIENCE = 12
ROUNDS = 2

# What a start depends on counts as packing, and moves together with the start, if it takes at most
# this fraction of the exchange's time.
PACKING = 0.1

# A move is judged by the device's clock this many waits later.
HORIZON = 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a program. Instructions are named by their index in the program."""

    inputs: tuple[int, ...] = ()  # instructions that must come before this one
    seconds: float = 0.0  # time on the device; of a start, time on the link
    is_start: bool = False  # it starts an exchange
    # The start of the exchange, of a wait; otherwise None.
    waits_for: int | None = None
    is_input: bool = False  # it is an input of the program and stays at its head
    is_view: bool = False  # it makes no buffer and takes no time
    num_bytes: int = 0  # size of the buffer that it makes
    # Instructions whose buffers it reads, directly or through views; empty for a view.
    reads: tuple[int, ...] = ()
    is_kept: bool = False  # its buffer is still needed when the program ends


@dataclass(frozen=True, slots=True)
class Measured:
    """What an order of instructions costs."""

    seconds: float  # until the last instruction is done
    exposed_s: float  # the part of `seconds` in which the device stands still in waits
    peak_bytes: int  # the most bytes of all buffers alive at once
    exchange_bytes: int  # the most bytes of received buffers alive at once, from their starts on


def measure(instructions: Sequence[Instruction], order: Sequence[int]) -> Measured:
    """Simulate an order: its time on the two clocks, and the bytes alive."""
    run = _Run(instructions, list(order))
    compute = sum(instruction.seconds for instruction in instructions if not instruction.is_start)
    seconds = run.clock_at(len(order))
    return Measured(seconds, max(0.0, seconds - compute), *run.peaks(0, len(order)))


def expose(instructions: Sequence[Instruction]) -> list[int]:
    """Return an order without overlap: every start comes right before what reads it first.

    That is its wait, or what asks how many rows will arrive.
    """
    order: list[int] = []
    held: list[int] = []
    for index in _as_late_as_used(instructions, range(len(instructions))):
        instruction = instructions[index]
        if instruction.is_start:
            held.append(index)
            continue
        read = max((one for one in instruction.inputs if one in held), default=-1)
        while held and held[0] <= read:
            order.append(held.pop(0))
        order.append(index)
    return order + held


def schedule(instructions: Sequence[Instruction], budget_bytes: int) -> list[int]:
    """Return an order in which the device waits less for exchanges.

    Args:
        instructions: a program, in an order that can be run.
        budget_bytes: how many more bytes may be alive at once than without overlap. Received
            buffers may hold as many bytes at once, or as many as they hold in the given order.

    Returns:
        A permutation of the instructions. Starts keep their order.
    """
    exposed = expose(instructions)
    most = measure(instructions, exposed).peak_bytes + budget_bytes
    order = _as_late_as_used(instructions, range(len(instructions)))
    measured = measure(instructions, order)
    if measured.peak_bytes > most:
        order, measured = exposed, measure(instructions, exposed)
    run = _Run(instructions, order)
    run.limits = (most, max(budget_bytes, measured.exchange_bytes))
    for _ in range(ROUNDS):
        waits = [(instructions[index].waits_for, index) for index in run.order]
        have_moved = [_cover(run, start, wait) for start, wait in waits if start is not None]
        if not any(have_moved):
            break
    for index, instruction in enumerate(instructions):
        if instruction.is_start:
            run.raise_start(index)
    late = _as_late_as_used(instructions, run.order)
    # A received buffer that nothing reads is freed at its wait. Waiting late would hold it longer.
    return late if measure(instructions, late).peak_bytes <= most else run.order


def _as_late_as_used(instructions: Sequence[Instruction], order: Iterable[int]) -> list[int]:
    """Move waits and views right before their first use; by themselves they take no time."""
    order = list(order)
    first_use = [len(order)] * len(instructions)
    # Sort key of each instruction: a place in the old order, and 0 to go right before what is at
    # that place, or 1 for the instruction at that place itself.
    key = [(0, 0)] * len(instructions)
    # Go backwards, so that the users of an instruction have their places already.
    for place in range(len(order) - 1, -1, -1):
        index = order[place]
        instruction = instructions[index]
        is_free = instruction.is_view or instruction.waits_for is not None
        is_used = first_use[index] < len(order)
        key[index] = (first_use[index], 0) if is_free and is_used else (place, 1)
        for source in instruction.inputs:
            first_use[source] = min(first_use[source], key[index][0])
    # The sort is stable: of two that go before the same use, the later may depend on the earlier.
    return sorted(order, key=lambda index: key[index])


def _cover(run: _Run, start: int, wait: int) -> bool:
    """Move compute into an exchange's flight until the device no longer waits, or nothing helps.

    Return whether anything moved.
    """
    has_moved = False
    for candidates in (run.behind(wait), run.before(start)):
        num_in_vain = 0
        for index in list(islice(candidates, MAX_TRIED)):
            if run.stall(start, wait) <= LEAST_GAIN_S or num_in_vain == PATIENCE:
                break
            is_better = run.move_into_flight(index, start, wait)
            num_in_vain = 0 if is_better else num_in_vain + 1
            has_moved |= is_better
    return has_moved


class _Run:
    """An order of instructions, with its clocks and memory, and the moves that improve it.

    The clocks before each place of the order are cached up to the first place that a move has
    changed. So are the bytes alive, which a move changes within its segment only. Ancestors and
    descendants are sets of instructions, as bits of an int.
    """

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
        # The buffers that may be freed behind each instruction.
        self.holds = [
            [
                source
                for source in (index, *instruction.reads)
                if instructions[source].num_bytes and not instructions[source].is_kept
            ]
            for index, instruction in enumerate(instructions)
        ]
        # Most bytes alive at once: of all buffers, of received buffers.
        self.limits: tuple[int, int] = (0, 0)
        # Caches, before each place: (device, link) in seconds, and (all, received) in bytes.
        self.clocks: list[tuple[float, float]] = [(0.0, 0.0)]
        self.alive: list[tuple[int, int]] = [(0, 0)]
        self.arrival: dict[int, float] = {}

    # --- Time --------------------------------------------------------------------------------

    def clock_at(self, place: int) -> float:
        """Return the device's clock, in seconds, before a place."""
        known = len(self.clocks) - 1
        if known < place:
            clock, link = self.clocks[known]
            self.clocks += self._ticks(self.order[known:place], clock, link, self.arrival)
        return self.clocks[place][0]

    def _ticks(
        self, segment: Sequence[int], clock: float, link: float, arrival: dict[int, float]
    ) -> Iterator[tuple[float, float]]:
        """Yield the clocks after each instruction; note when exchanges arrive."""
        for index in segment:
            instruction = self.instructions[index]
            if instruction.is_start:
                link = max(link, clock) + instruction.seconds
                arrival[index] = link
            elif instruction.waits_for is not None:
                clock = max(clock, arrival[instruction.waits_for])
            else:
                clock += instruction.seconds
            yield clock, link

    def stall(self, start: int, wait: int) -> float:
        """Return how many seconds the device stands still in a wait; negative if it does not."""
        clock = self.clock_at(self.position[wait])
        return self.arrival[start] - clock

    # --- Memory ------------------------------------------------------------------------------

    def peaks(self, at: int, end: int) -> tuple[int, int]:
        """Return the most bytes alive between two places: of all buffers, and of received ones."""
        known = len(self.alive) - 1
        if known < end:
            self.alive += self._count(known, self.order[known:end], self.alive[known])
        return self._most(self.order[at:end], self.alive[at : end + 1])

    def _most(self, segment: Sequence[int], alive: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the most bytes alive in a segment, given what is alive around each of it."""
        made = [self.instructions[index] for index in segment]
        most = [total + i.num_bytes for i, (total, _) in zip(made, alive, strict=False)]
        pairs = zip(made, alive, strict=False)
        most_received = [received + i.num_bytes for i, (_, received) in pairs if i.is_start]
        return max([alive[0][0], *most]), max([alive[0][1], *most_received])

    def _count(
        self, at: int, segment: Sequence[int], alive: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the bytes alive after each instruction of a segment, if it were placed at `at`."""
        end = at + len(segment)
        last = {source: index for index in segment for source in self.holds[index]}
        freed: dict[int, list[int]] = {}
        for source, index in last.items():
            if all(self.position[reader] < end for reader in self.readers[source]):
                freed.setdefault(index, []).append(source)
        total, received = alive
        for index in segment:
            for instruction, sign in (
                (self.instructions[index], 1),
                *((self.instructions[source], -1) for source in freed.get(index, ())),
            ):
                total += sign * instruction.num_bytes
                received += sign * instruction.num_bytes * instruction.is_start
            yield total, received

    # --- Moves -------------------------------------------------------------------------------

    def behind(self, wait: int) -> Iterator[int]:
        """Yield compute after a wait that does not depend on the wait, nearest first."""
        first = self.position[wait] + 1
        for index in self.order[first : first + MAX_PLACES]:
            if self._takes_time(index) and not self.descendants[wait] >> index & 1:
                yield index

    def before(self, start: int) -> Iterator[int]:
        """Yield compute and waits before a start, which does not depend on them, nearest first."""
        end = self.position[start]
        for index in reversed(self.order[max(0, end - MAX_PLACES) : end]):
            is_candidate = self.instructions[index].waits_for is not None or self._takes_time(index)
            if is_candidate and not self.ancestors[start] >> index & 1:
                yield index

    def _takes_time(self, index: int) -> bool:
        instruction = self.instructions[index]
        return instruction.seconds > LEAST_GAIN_S and not instruction.is_start

    def move_into_flight(self, index: int, start: int, wait: int) -> bool:
        """Move an instruction into an exchange's flight if it saves time; return whether it did."""
        place = self.position[index]
        if self.position[start] < place < self.position[wait]:
            return False  # it was moved together with another instruction
        # Before the wait comes what it depends on, behind the start what depends on it.
        is_pulled_up = place > self.position[wait]
        at, end = (self.position[wait], place) if is_pulled_up else (place, self.position[start])
        along = (self.ancestors if is_pulled_up else self.descendants)[index] | 1 << index
        window = self.order[at : end + 1]
        segment = sorted(window, key=lambda other: bool(along >> other & 1) != is_pulled_up)
        is_better = self._gain(at, segment) > LEAST_GAIN_S and self._place(at, segment)
        if is_better:
            # The data of the next start may be ready earlier now, and other ranks wait for it.
            behind = self.order[self.position[wait] :]
            following = next((i for i in behind if self.instructions[i].is_start), None)
            if following is not None:
                self.raise_start(following)
        return is_better

    def raise_start(self, start: int) -> None:
        """Move a start, and the packing for it, before waits that it does not depend on.

        Other ranks wait for this rank's start. It moves before compute only if this rank receives
        nothing by the exchange, because a received buffer would be held longer.
        """
        end = self.position[start]
        at, moved, overtaken = end, [start], list[int]()
        most_s = PACKING * self.instructions[start].seconds
        while at > 0:
            index = self.order[at - 1]
            instruction = self.instructions[index]
            is_needed = bool(self.ancestors[start] >> index & 1)
            if is_needed:
                stays = instruction.waits_for is not None or instruction.seconds > most_s
            else:
                stays = instruction.seconds > 0 and self.instructions[start].num_bytes > 0
            if stays or instruction.is_input or instruction.is_start:
                break
            (moved if is_needed else overtaken).append(index)
            at -= 1
        if overtaken:
            self._place(at, [*reversed(moved), *reversed(overtaken)])

    def _gain(self, at: int, segment: Sequence[int]) -> float:
        """Return how many seconds are saved if a segment is placed at `at`."""
        end = at + len(segment)
        places = range(end, len(self.order))
        waits = (i for i in places if self.instructions[self.order[i]].waits_for is not None)
        horizon = next(islice(waits, HORIZON, None), len(self.order))
        before = self.clock_at(horizon)
        changed = [*segment, *self.order[end:horizon]]
        *_, (after, _) = self._ticks(changed, *self.clocks[at], dict(self.arrival))
        return before - after

    def _place(self, at: int, segment: list[int]) -> bool:
        """Place a segment at `at` if memory allows it; return whether it was placed.

        Memory allows it if each of the two peaks stays within its limit, or does not grow.
        """
        end = at + len(segment)
        old = self.peaks(at, end)
        alive = [self.alive[at], *self._count(at, segment, self.alive[at])]
        for before, after, limit in zip(old, self._most(segment, alive), self.limits, strict=True):
            if after > max(before, limit):
                return False
        self.order[at:end] = segment
        for place, index in enumerate(segment, at):
            self.position[index] = place
        del self.clocks[at + 1 :]
        self.alive[at : end + 1] = alive
        return True


def _closures(instructions: Sequence[Instruction]) -> tuple[list[int], list[int]]:
    """Return the ancestors and descendants of every instruction, as bits of an int.

    Every start depends on the start before it, so that starts keep their order.
    """
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
