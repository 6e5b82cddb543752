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
    compute = sum(instruction.seconds for instruction in instructions if not instruction.is_start)
    exchange = sum(instruction.seconds for instruction in instructions if instruction.is_start)
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
        measured = measure(instructions, result)
        assert measured.peak_bytes == peak_bytes(instructions, result)
        assert max(compute, exchange) - 1e-9 <= measured.seconds <= compute + exchange + 1e-9
        assert measured.exposed_s == pytest.approx(measured.seconds - compute)
    before, after = measure(instructions, exposed), measure(instructions, order)
    assert after.seconds <= before.seconds + 1e-9
    assert after.peak_bytes <= before.peak_bytes + budget
