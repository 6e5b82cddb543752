"""Plans over two levels of links: nodes split the heads, and what moves crosses once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cp_inductor.plan import InvalidPlan, Machine, Payload, Plan
from cp_inductor.plan.ir import Transfers
from cp_inductor.plan.timeline import loads_of
from tests.support.plans import make_plan

WINDOW = "(k - q <= 0) & (q - k - 300 <= 0)"


def plan(num_nodes: int, ranks: int, rest: str = "blocks", **how: object) -> Plan:
    world_size, heads = num_nodes * ranks, (4 * num_nodes, 2 * num_nodes)
    how = {"seq_len": world_size * 200 - 77, "head_dim": 16, **how}
    return make_plan(world_size, 200, *heads, strategy=f"nodes{num_nodes}+{rest}", **how)


@pytest.mark.parametrize("mask", ["causal", "full", WINDOW])
@pytest.mark.parametrize(("num_nodes", "ranks"), [(2, 2), (3, 2), (2, 3), (4, 3)])
def test_plans_are_right_for_all_ranks(num_nodes: int, ranks: int, mask: str) -> None:
    for rest in ("blocks", "rows", "allgather"):
        for stages in (1, 2, 3):
            for keep in (0, 2):
                one = plan(num_nodes, ranks, rest, mask=mask, stages=stages, keep=keep)
                for each in (one, one.backward()):
                    each.simulate()


def test_windows_are_rows_beyond_64_ranks() -> None:
    """What a rank needs is with its neighbor, whatever the number of ranks."""
    one = make_plan(72, 2048, 8, mask=WINDOW)
    assert one.strategy == "rows"
    assert {t.source - t.destination for stage in one.stages for t in stage.fetch} == {-1}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_what_moves_crosses_to_a_node_once(num_kv_heads: int) -> None:
    forward = plan(4, 3, num_heads=8, num_kv_heads=num_kv_heads, stages=2)
    for one in (forward, forward.backward()):
        crossed: Counter[tuple[Payload, int, int, int]] = Counter()
        for stage in one.stages:
            for transfers, is_home in ((stage.fetch, False), (stage.home, True)):
                for it in transfers:
                    nodes = it.source // 3, it.destination // 3
                    if nodes[0] != nodes[1]:
                        node = nodes[0] if is_home else nodes[1]
                        for chunk in range(it.span.start, it.span.stop):
                            for head in range(it.heads.start, it.heads.stop):
                                crossed[it.payload, node, chunk, head] += 1
        assert set(crossed.values()) == {1}


def test_wrong_ways_are_found() -> None:
    """Of what ranks pass on; the other rules are broken in test_plan.py."""
    good = plan(2, 2, num_heads=2, num_kv_heads=2, stages=1)
    *before, last = good.stages
    assert last.home and not last.tiles
    some = Transfers(last.home.columns[1:])
    lost = replace(good, stages=(*before, replace(last, home=some)))
    with pytest.raises(InvalidPlan, match="stay away from home"):
        lost.simulate()
    at_once = replace(
        before[0], fetch=Transfers.joined((before[0].fetch, before[1].fetch)).sorted()
    )
    with pytest.raises(InvalidPlan, match="sends what is not there"):
        replace(good, stages=(at_once, replace(before[1], fetch=Transfers()), last)).simulate()
    with pytest.raises(InvalidPlan, match="does not go home"):
        replace(good, returns=False).simulate()


def seconds_and_bytes(one: Plan, machine: Machine) -> tuple[float, float]:
    """Return how long exchanges take, and what crosses to the rank that gets most."""
    loads = [loads_of(each, machine) for each in (one, one.backward())]
    seconds = sum(each.timeline(machine).exchange_s for each in loads)
    return seconds, float(sum(each.received_over(-1) for each in loads).max())


def test_auto_chooses_for_the_machine() -> None:
    """8 nodes of 2, and more ranks than heads."""
    machine = Machine.parse("2xh100:nvlink4 x 8:ib400")
    flat = make_plan(16, 16384, 8, head_dim=128)
    nodes = make_plan(16, 16384, 8, head_dim=128, machine=machine)
    assert nodes.strategy.startswith("nodes8+")
    assert not flat.strategy.startswith("nodes")
    assert nodes.balance < 1.02
    found = seconds_and_bytes(nodes, machine), seconds_and_bytes(flat, machine)
    assert all(of_nodes < 0.8 * of_flat for of_nodes, of_flat in zip(*found, strict=True))


def test_what_crosses_at_64_ranks() -> None:
    """8 nodes of 8, 32 query and 8 KV heads: at most 11 u, and 0.55 of the flat plan's time.

    Links inside are 9 times as fast as between nodes here; NCCL reaches 6 times.
    """
    machine = Machine.parse("8xh100:nvlink4[bytes_per_s=4.5e11] x 8:ib400")
    flat, nodes = (
        make_plan(64, 16384, 32, 8, head_dim=128, strategy=strategy, stages=stages)
        for strategy, stages in (("heads16_own+blocks", 1), ("nodes8+rows", 2))
    )
    assert nodes.balance < 1.02
    found = seconds_and_bytes(nodes, machine), seconds_and_bytes(flat, machine)
    assert found[0][1] < 11 * (2 * 8 * 16384 * 128 * 2)
    assert found[0][0] < 0.55 * found[1][0]


def test_levels_are_counted_apart() -> None:
    machine = Machine.parse("2xgpu:nvlink4 x ib400")
    one = plan(3, 2)
    both = loads_of(one, machine)
    assert (both.received_over() == loads_of(one).received_over()).all()
    outer = [
        sum(
            one.bytes_of(Transfers.of([t])).sum()
            for stage in one.program(rank)
            for t in (*stage.fetch, *stage.home)
            if t.destination == rank and t.source // 2 != rank // 2
        )
        for rank in range(6)
    ]
    assert both.received_over(-1).tolist() == outer


def test_a_slow_level_is_what_an_exchange_waits_for() -> None:
    one = plan(2, 4)
    slow, fast = (
        one.simulate(Machine.parse(f"4xgpu:nvlink4 x ib400[bytes_per_s={rate}]"))
        for rate in ("1e8", "1e12")
    )
    assert slow.compute_s == fast.compute_s
    assert slow.exchange_s > 10 * fast.exchange_s
