"""The scheduler without graphs: what it keeps, on any program, and what it finds on small ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_inductor.schedule.overlap import Instruction, expose, measure, schedule

MS = 1e-3


@st.composite
def programs(draw: st.DrawFn) -> list[Instruction]:
    """Compute, views, exchanges, in any dependence on each other."""
    sizes = draw(st.lists(st.integers(0, 8), max_size=3))
    instructions = [Instruction(is_input=True, num_bytes=size) for size in sizes]
    open_starts: list[int] = []

    def sources(most: int) -> tuple[int, ...]:
        if not instructions:
            return ()
        # An exchange is read when it was waited for.
        readable = [i for i, instruction in enumerate(instructions) if not instruction.is_start]
        picked = draw(st.lists(st.sampled_from(readable), max_size=most)) if readable else []
        return tuple(sorted(set(picked)))

    def buffers_of(inputs: tuple[int, ...]) -> tuple[int, ...]:
        found: set[int] = set()
        for index in inputs:
            instruction = instructions[index]
            if instruction.waits_for is not None:
                found.add(instruction.waits_for)
            elif instruction.is_view:
                found |= set(buffers_of(instruction.inputs))
            else:
                found.add(index)
        return tuple(sorted(found))

    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["compute", "compute", "view", "start", "wait", "size"]))
        inputs = sources(3)
        seconds = draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])) * MS
        num_bytes = draw(st.integers(0, 8))
        is_kept = draw(st.booleans())
        if kind == "wait" and open_starts:
            start = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
            instructions.append(Instruction((start,), waits_for=start, reads=(start,)))
        elif kind == "size" and open_starts:
            # How many rows will arrive is asked before they are waited for.
            instructions.append(Instruction((draw(st.sampled_from(open_starts)),), is_view=True))
        elif kind == "view" and inputs:
            instructions.append(Instruction(inputs, is_view=True))
        else:
            is_start = kind == "start"
            reads = buffers_of(inputs)
            open_starts += [len(instructions)] * is_start
            instructions.append(
                Instruction(
                    inputs,
                    seconds,
                    is_start=is_start,
                    num_bytes=num_bytes,
                    reads=reads,
                    is_kept=is_kept,
                )
            )
    for start in open_starts:
        instructions.append(Instruction((start,), waits_for=start, reads=(start,)))
    return instructions


def peak_bytes(instructions: list[Instruction], order: list[int]) -> int:
    """Count what is alive the slow way: a buffer is, from its maker to its last reader."""
    place = {index: at for at, index in enumerate(order)}
    last = {index: place[index] for index in order}
    for index in order:
        for source in instructions[index].reads:
            last[source] = max(last[source], place[index])
    return max(
        sum(
            instructions[index].num_bytes
            for index in order
            if place[index] <= at and (at <= last[index] or instructions[index].is_kept)
        )
        for at in range(len(order))
    )


@pytest.mark.slow
@given(programs(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_what_any_schedule_keeps(instructions: list[Instruction], budget: int) -> None:
    exposed, order = expose(instructions), schedule(instructions, budget)
    for result in (exposed, order):
        assert sorted(result) == list(range(len(instructions)))
        place = {index: at for at, index in enumerate(result)}
        assert all(
            place[s] < place[i]
            for i, instruction in enumerate(instructions)
            for s in instruction.inputs
        )
        inputs = [index for index, instruction in enumerate(instructions) if instruction.is_input]
        assert result[: len(inputs)] == inputs
        starts = [index for index in result if instructions[index].is_start]
        assert starts == sorted(starts)
        assert measure(instructions, result).peak_bytes == peak_bytes(instructions, result)
    before, after = measure(instructions, exposed), measure(instructions, order)
    assert after.seconds <= before.seconds + 1e-9
    assert after.peak_bytes <= before.peak_bytes + budget


@given(programs())
@settings(max_examples=100, deadline=None)
def test_the_clocks(instructions: list[Instruction]) -> None:
    compute = sum(instruction.seconds for instruction in instructions if not instruction.is_start)
    exchange = sum(instruction.seconds for instruction in instructions if instruction.is_start)
    for order in (expose(instructions), schedule(instructions, 1000)):
        measured = measure(instructions, order)
        assert max(compute, exchange) - 1e-9 <= measured.seconds <= compute + exchange + 1e-9
        assert measured.exposed_s == pytest.approx(measured.seconds - compute)


def names_of(instructions: list[tuple[str, Instruction]], budget: int = 100) -> list[str]:
    order = schedule([instruction for _, instruction in instructions], budget)
    return [instructions[index][0] for index in order]


# k, v and q are projected; k and v travel; a tile at home needs all three, another what arrives.
PROJECTIONS = [
    ("q", Instruction((), 4 * MS, num_bytes=1)),
    ("k", Instruction((), 1 * MS, num_bytes=1)),
    ("start", Instruction((1,), 5 * MS, is_start=True, num_bytes=1, reads=(1,))),
    ("tile 0", Instruction((0, 1), 2 * MS, num_bytes=1, reads=(0, 1))),
    ("wait", Instruction((2,), waits_for=2, reads=(2,))),
    ("view", Instruction((4,), is_view=True)),
    ("tile 1", Instruction((0, 5), 2 * MS, num_bytes=1, reads=(0, 2), is_kept=True)),
]


def test_a_start_goes_before_the_projection_of_queries() -> None:
    assert names_of(PROJECTIONS) == ["k", "start", "q", "tile 0", "wait", "view", "tile 1"]


def test_nothing_moves_further_than_an_exchange_needs() -> None:
    quick = list(PROJECTIONS)
    quick[2] = ("start", Instruction((1,), 1 * MS, is_start=True, num_bytes=1, reads=(1,)))
    assert names_of(quick) == ["q", "k", "start", "tile 0", "wait", "view", "tile 1"]


def test_nothing_moves_beyond_the_budget() -> None:
    big = list(PROJECTIONS)
    big[2] = ("start", Instruction((1,), 5 * MS, is_start=True, num_bytes=50, reads=(1,)))
    # The buffer of the exchange is alive over the tile, then; which it is not if nothing overlaps.
    big[3] = ("tile 0", Instruction((0, 1), 2 * MS, num_bytes=60, reads=(0, 1)))
    assert names_of(big, budget=100).index("start") == 1
    assert names_of(big, budget=0).index("start") == 3


def test_a_gradient_travels_behind_weight_gradients_of_before_and_after() -> None:
    instructions = [
        ("dw of the layer above", Instruction((), 3 * MS, num_bytes=1, is_kept=True)),
        ("tile", Instruction((), 1 * MS, num_bytes=1)),
        ("home", Instruction((1,), 5 * MS, is_start=True, num_bytes=1, reads=(1,))),
        ("wait", Instruction((2,), waits_for=2, reads=(2,))),
        ("dk", Instruction((3,), 1 * MS, num_bytes=1, reads=(2,), is_kept=True)),
        ("dw of q", Instruction((1,), 2 * MS, num_bytes=1, reads=(1,), is_kept=True)),
    ]
    assert names_of(instructions) == [
        "tile",
        "home",
        "dw of the layer above",
        "dw of q",
        "wait",
        "dk",
    ]


def test_what_brings_a_rank_nothing_is_started_at_once() -> None:
    instructions = [
        ("first", Instruction((), 5 * MS, is_start=True, num_bytes=1)),
        ("compute", Instruction((), 9 * MS, num_bytes=1, is_kept=True)),
        ("wait for first", Instruction((0,), waits_for=0, reads=(0,))),
        ("nothing", Instruction((), num_bytes=0)),
        ("second", Instruction((3,), 5 * MS, is_start=True, reads=(3,))),
        ("wait for second", Instruction((4,), waits_for=4, reads=(4,))),
    ]
    assert names_of(instructions)[:4] == ["first", "nothing", "second", "compute"]


def test_steps_come_in_an_order_that_can_be_run() -> None:
    with pytest.raises(AssertionError, match="can be run"):
        schedule([Instruction((1,)), Instruction(())], 0)
