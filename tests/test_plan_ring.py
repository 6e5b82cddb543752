"""The ring as a plan: every rank of every small world, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cp_inductor.plan import Exchange, RingStep, TileMask, plan_ring
from cp_inductor.plan.ring import format_ring

WORLD_SIZES = (*range(1, 17), 64)


def plans(world_size: int, *, is_causal: bool) -> list[tuple[RingStep, ...]]:
    return [plan_ring(rank, world_size, is_causal=is_causal) for rank in range(world_size)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_needed_tile_is_computed_once(world_size: int, is_causal: bool) -> None:
    tiles = {
        (rank, step.owner): step.mask
        for rank, steps in enumerate(plans(world_size, is_causal=is_causal))
        for step in steps
    }
    assert len(tiles) == world_size**2
    for (query_rank, key_rank), mask in tiles.items():
        if not is_causal or key_rank < query_rank:
            assert mask is TileMask.FULL
        elif key_rank == query_rank:
            assert mask is TileMask.CAUSAL
        else:
            assert mask is TileMask.EMPTY


def simulate(steps_of: list[tuple[RingStep, ...]]) -> None:
    """Run all ranks in lockstep; fail where data is missing or the two ends disagree."""
    world_size = len(steps_of)
    held: list[int | None] = list(range(world_size))
    returned = [[rank] for rank in range(world_size)]
    for index in range(world_size):
        now = [steps[index] for steps in steps_of]
        for rank, step in enumerate(now):
            if step.mask is not TileMask.EMPTY:
                assert held[rank] == step.owner, f"rank {rank} has {held[rank]} in step {index}"
        rotations = [step.rotate for step in now]
        assert len({rotate is None for rotate in rotations}) == 1, "a collective on some ranks only"
        if rotations[0] is not None:
            arrived = deliver([rotate for rotate in rotations if rotate], held)
            held = [blocks[0] if blocks else None for blocks in arrived]
        returns = [step.give_back for step in now]
        assert len({give_back is None for give_back in returns}) == 1
        if returns[0] is not None:
            arrived = deliver([back for back in returns if back], list(range(world_size)))
            for owner, borrowers in enumerate(arrived):
                returned[owner].extend(borrowers)
    for owner, ranks in enumerate(returned):
        needed = [r for r, steps in enumerate(steps_of) if has_tile_of(steps, owner)]
        assert sorted(ranks) == needed


def deliver(exchanges: list[Exchange], payload: list[int | None]) -> list[list[int]]:
    arrived: list[list[int]] = [[] for _ in exchanges]
    for source, exchange in enumerate(exchanges):
        for destination, count in enumerate(exchange.sends):
            assert exchanges[destination].receives[source] == count
            if count:
                block = payload[source]
                assert block is not None
                arrived[destination].append(block)
    return arrived


def has_tile_of(steps: tuple[RingStep, ...], owner: int) -> bool:
    return any(step.owner == owner and step.mask is not TileMask.EMPTY for step in steps)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_together_move_what_tiles_need(world_size: int, is_causal: bool) -> None:
    simulate(plans(world_size, is_causal=is_causal))


def test_the_simulation_sees_a_lost_block() -> None:
    steps_of = plans(3, is_causal=False)
    broken = steps_of[1][0]
    rotate = Exchange((0, 0, 0), (1, 0, 0))
    steps_of[1] = (RingStep(broken.owner, broken.mask, rotate, None), *steps_of[1][1:])
    with pytest.raises(AssertionError):
        simulate(steps_of)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_per_attention(world_size: int, is_causal: bool) -> None:
    for steps in plans(world_size, is_causal=is_causal):
        assert sum(step.rotate is not None for step in steps) == world_size - 1
        assert sum(step.give_back is not None for step in steps) == world_size - 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_travels_that_nobody_uses(world_size: int) -> None:
    pairs = world_size * (world_size - 1) // 2
    for is_causal, expected in ((True, pairs), (False, 2 * pairs)):
        steps_of = plans(world_size, is_causal=is_causal)
        steps = [step for rank_steps in steps_of for step in rank_steps]
        assert sum(step.rotate.num_sent for step in steps if step.rotate) == expected
        assert sum(step.give_back.num_sent for step in steps if step.give_back) == expected


def test_format() -> None:
    text = format_ring(plan_ring(1, 3, is_causal=True), is_backward=True)
    assert text == (
        "step 0: kv of rank 1, causal tile, rotate to 2 from 0\n"
        "step 1: kv of rank 0, full tile, rotate to 2, give back to 0 from 2\n"
        "step 2: kv of rank 2, empty tile, give back nothing"
    )


def test_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        plan_ring(4, 4, is_causal=True)


def test_plans_need_no_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('cp_inductor');"
        "package.__path__ = ['cp_inductor']; sys.modules['cp_inductor'] = package;"
        "import cp_inductor.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
