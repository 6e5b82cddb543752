"""The scheduler without graphs: what it keeps, on any program, and what it finds on small ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_inductor.schedule.overlap import Step, expose, measure, schedule

MS = 1e-3


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Compute, views, exchanges, in any dependence on each other."""
    sizes = draw(st.lists(st.integers(0, 8), max_size=3))
    steps = [Step(is_input=True, num_bytes=size) for size in sizes]
    open_starts: list[int] = []

    def sources(most: int) -> tuple[int, ...]:
        if not steps:
            return ()
        # An exchange is read when it was waited for.
        readable = [i for i, step in enumerate(steps) if not step.is_start]
        picked = draw(st.lists(st.sampled_from(readable), max_size=most)) if readable else []
        return tuple(sorted(set(picked)))

    def buffers_of(inputs: tuple[int, ...]) -> tuple[int, ...]:
        found: set[int] = set()
        for index in inputs:
            step = steps[index]
            if step.waits_for is not None:
                found.add(step.waits_for)
            elif step.is_view:
                found |= set(buffers_of(step.inputs))
            else:
                found.add(index)
        return tuple(sorted(found))

    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["compute", "compute", "view", "start", "wait"]))
        inputs = sources(3)
        seconds = draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])) * MS
        num_bytes = draw(st.integers(0, 8))
        is_kept = draw(st.booleans())
        if kind == "wait" and open_starts:
            start = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
            steps.append(Step((start,), waits_for=start, reads=(start,)))
        elif kind == "view" and inputs:
            steps.append(Step(inputs, is_view=True))
        else:
            is_start = kind == "start"
            reads = buffers_of(inputs)
            open_starts += [len(steps)] * is_start
            steps.append(
                Step(
                    inputs,
                    seconds,
                    is_start=is_start,
                    num_bytes=num_bytes,
                    reads=reads,
                    is_kept=is_kept,
                )
            )
    for start in open_starts:
        steps.append(Step((start,), waits_for=start, reads=(start,)))
    return steps


def peak_bytes(steps: list[Step], order: list[int]) -> int:
    """Count what is alive the slow way: a buffer is, from its maker to its last reader."""
    place = {index: at for at, index in enumerate(order)}
    last = {index: place[index] for index in order}
    for index in order:
        for source in steps[index].reads:
            last[source] = max(last[source], place[index])
    return max(
        sum(
            steps[index].num_bytes
            for index in order
            if place[index] <= at and (at <= last[index] or steps[index].is_kept)
        )
        for at in range(len(order))
    )


@given(programs(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_what_any_schedule_keeps(steps: list[Step], budget: int) -> None:
    exposed, order = expose(steps), schedule(steps, budget)
    for result in (exposed, order):
        assert sorted(result) == list(range(len(steps)))
        place = {index: at for at, index in enumerate(result)}
        assert all(place[s] < place[i] for i, step in enumerate(steps) for s in step.inputs)
        inputs = [index for index, step in enumerate(steps) if step.is_input]
        assert result[: len(inputs)] == inputs
        starts = [index for index in result if steps[index].is_start]
        assert starts == sorted(starts)
        assert measure(steps, result).peak_bytes == peak_bytes(steps, result)
    before, after = measure(steps, exposed), measure(steps, order)
    assert after.seconds <= before.seconds + 1e-9
    assert after.peak_bytes <= before.peak_bytes + budget


@given(programs())
@settings(max_examples=100, deadline=None)
def test_the_clocks(steps: list[Step]) -> None:
    compute = sum(step.seconds for step in steps if not step.is_start)
    exchange = sum(step.seconds for step in steps if step.is_start)
    for order in (expose(steps), schedule(steps, 1000)):
        measured = measure(steps, order)
        assert max(compute, exchange) - 1e-9 <= measured.seconds <= compute + exchange + 1e-9
        assert measured.exposed_s == pytest.approx(measured.seconds - compute)


def names_of(steps: list[tuple[str, Step]], budget: int = 100) -> list[str]:
    order = schedule([step for _, step in steps], budget)
    return [steps[index][0] for index in order]


# k, v and q are projected; k and v travel; a tile at home needs all three, another what arrives.
PROJECTIONS = [
    ("q", Step((), 4 * MS, num_bytes=1)),
    ("k", Step((), 1 * MS, num_bytes=1)),
    ("start", Step((1,), 5 * MS, is_start=True, num_bytes=1, reads=(1,))),
    ("tile 0", Step((0, 1), 2 * MS, num_bytes=1, reads=(0, 1))),
    ("wait", Step((2,), waits_for=2, reads=(2,))),
    ("view", Step((4,), is_view=True)),
    ("tile 1", Step((0, 5), 2 * MS, num_bytes=1, reads=(0, 2), is_kept=True)),
]


def test_a_start_goes_before_the_projection_of_queries() -> None:
    assert names_of(PROJECTIONS) == ["k", "start", "q", "tile 0", "wait", "view", "tile 1"]


def test_nothing_moves_further_than_an_exchange_needs() -> None:
    quick = list(PROJECTIONS)
    quick[2] = ("start", Step((1,), 1 * MS, is_start=True, num_bytes=1, reads=(1,)))
    assert names_of(quick) == ["q", "k", "start", "tile 0", "wait", "view", "tile 1"]


def test_nothing_moves_beyond_the_budget() -> None:
    big = list(PROJECTIONS)
    big[2] = ("start", Step((1,), 5 * MS, is_start=True, num_bytes=50, reads=(1,)))
    # The buffer of the exchange is alive over the tile, then; which it is not if nothing overlaps.
    big[3] = ("tile 0", Step((0, 1), 2 * MS, num_bytes=60, reads=(0, 1)))
    assert names_of(big, budget=100).index("start") == 1
    assert names_of(big, budget=0).index("start") == 3


def test_a_gradient_travels_behind_weight_gradients_of_before_and_after() -> None:
    steps = [
        ("dw of the layer above", Step((), 3 * MS, num_bytes=1, is_kept=True)),
        ("tile", Step((), 1 * MS, num_bytes=1)),
        ("home", Step((1,), 5 * MS, is_start=True, num_bytes=1, reads=(1,))),
        ("wait", Step((2,), waits_for=2, reads=(2,))),
        ("dk", Step((3,), 1 * MS, num_bytes=1, reads=(2,), is_kept=True)),
        ("dw of q", Step((1,), 2 * MS, num_bytes=1, reads=(1,), is_kept=True)),
    ]
    assert names_of(steps) == ["tile", "home", "dw of the layer above", "dw of q", "wait", "dk"]


def test_what_brings_a_rank_nothing_is_started_at_once() -> None:
    steps = [
        ("first", Step((), 5 * MS, is_start=True, num_bytes=1)),
        ("compute", Step((), 9 * MS, num_bytes=1, is_kept=True)),
        ("wait for first", Step((0,), waits_for=0, reads=(0,))),
        ("nothing", Step((), num_bytes=0)),
        ("second", Step((3,), 5 * MS, is_start=True, reads=(3,))),
        ("wait for second", Step((4,), waits_for=4, reads=(4,))),
    ]
    assert names_of(steps)[:4] == ["first", "nothing", "second", "compute"]


def test_steps_come_in_an_order_that_can_be_run() -> None:
    with pytest.raises(AssertionError, match="can be run"):
        schedule([Step((1,)), Step(())], 0)
