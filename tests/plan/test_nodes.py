"""Plans over two levels of links: nodes split the heads, and what moves crosses once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cp_inductor.errors import InvalidArgument, InvalidText
from cp_inductor.inspect.compile_for import GPUS
from cp_inductor.plan import InvalidPlan, Machine, Payload, Plan
from cp_inductor.plan.ir import Transfers
from cp_inductor.plan.machine import DEVICES, known_machine
from cp_inductor.plan.simulate import loads_of
from cp_inductor.tiles.kernel_table import KERNELS
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
        replace(good, num_nodes=1).simulate()


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


# --- Machines as text, and as some of their ranks see them.

NODES = Machine.parse("8xh100:nvlink4 x 8:ib400")


@pytest.mark.parametrize(
    "text",
    [
        "gpu:ib400",
        "8xh100:nvlink4 x 8:ib400",
        "72xb200:nvlink5 x ib800",
        "cpu[matmul_flops_per_s=50000000000.0]:tcp",
        "4xcpu[flops_per_s=12345678901.5,hidden=0.25]:tcp x 2:eth10[latency_s=7.1e-05]",
    ],
)
def test_text_is_read_as_it_was_written(text: str) -> None:
    assert Machine.parse(text).format() == text
    assert Machine.parse(text.replace(" x ", "  x ")) == Machine.parse(text)


def test_nodes() -> None:
    assert [NODES.node_of(rank) for rank in (0, 7, 8, 63)] == [0, 0, 1, 7]
    assert [NODES.num_nodes(ranks) for ranks in (1, 8, 9, 64)] == [1, 1, 2, 8]


@pytest.mark.parametrize(
    ("ranks", "levels"),
    [
        (range(8, 16), [(0, "nvlink4")]),
        (range(0, 64, 8), [(0, "ib400")]),
        (range(0, 64, 2), [(4, "nvlink4"), (0, "ib400")]),
        ([0, 1, 2, 8], [(3, "nvlink4"), (0, "ib400")]),
        ([0, 1, 8, 9, 10], [(0, "ib400")]),
        ([0, 8, 1, 9], [(0, "ib400")]),
    ],
)
def test_ranks_of_a_mesh_axis(ranks: list[int], levels: list[tuple[int, str]]) -> None:
    assert [(level.ranks, level.name) for level in NODES.among(list(ranks)).levels] == levels


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("8xh100", InvalidText, "a device and a link"),
        ("h100:nvlink4 x 8:ib400", InvalidText, "a device and a link"),
        ("8xh100:nvlink4 x 8:ib400 x 2:eth10", InvalidText, "a device and a link"),
        ("8xv100:nvlink4", InvalidText, "one of gpu, a100"),
        ("8xh100:nvlink9", InvalidText, "one of ib400, nvlink3"),
        ("8xh100:nvlink4 x eight:ib400", InvalidText, "a number of nodes"),
        ("h100[speed=3]:ib400", InvalidText, "a number for one of flops_per_s"),
        ("h100:ib400[latency_s=fast]", InvalidText, "a number for one of bytes_per_s"),
        ("h100:ib400[bytes_per_s=0]", InvalidArgument, "above zero"),
        ("h100[hidden=2]:ib400", InvalidArgument, "from 0 to 1"),
        ("0xh100:nvlink4 x 8:ib400", InvalidArgument, "how many ranks a node has"),
    ],
)
def test_what_is_no_machine_is_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Machine.parse(text)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (("h100", 8), "h100:nvlink4"),
        (("h100", 16), "8xh100:nvlink4 x ib400"),
        (("b200", 144, 72), "72xb200:nvlink5 x ib400"),
        (("gpu", 16), "gpu:ib400"),
        (("cpu", 4, 4, 8), "cpu[flops_per_s=170000000000.0]:tcp"),
        (("cpu", 4, 4, 4), "cpu[hidden=0.0]:tcp"),
        (("cpu", 4, 4, 2), "cpu[hidden=0.0,at_once=2.0]:tcp"),
        (("cpu", 4, 2, 2), "2xcpu[hidden=0.0]:tcp x eth10"),
    ],
)
def test_what_is_known_without_measuring(known: tuple[str, int], text: str) -> None:
    assert known_machine(*known).format() == text


def test_kernels_compute_whole_blocks_of_causal_tiles() -> None:
    """The longer the tile, the less its diagonal matters; one shorter than a block is a square."""
    plain, blocks = Machine.parse("cpu[causal_keys=0]:tcp"), Machine.parse("cpu:tcp")
    for tokens, share in ((256, 1.0), (1024, 0.75), (4096, 0.5625)):
        plan = make_plan(1, tokens, 4)
        square = plan.flops(0) * 2 * tokens / (tokens + 1)
        launch_s = plain.device.launch_s
        seconds = plan.simulate(blocks).total_s - launch_s
        assert seconds == pytest.approx(share * square / plain.device.flops_per_s, rel=1e-3)
        assert plan.simulate(plain).total_s < seconds + launch_s


def test_ranks_that_share_cores_may_have_unequal_work() -> None:
    """Four ranks on two cores: an all-gather leaves one with 7/4 of the mean, and moves least."""
    shared = "cpu[launch_s=0.0004,hidden=0,at_once={}]:tcp[bytes_per_s=5e8,latency_s=0.0016]"
    of_two, of_four = (
        make_plan(4, 256, 8, 4, machine=shared.format(cores), itemsize=4) for cores in (2, 0)
    )
    assert of_two.strategy == "allgather"
    assert of_two.balance > 1.7
    assert of_four.balance < 1.03
    # Of long sequences all plans take as long, and what is even ends sooner.
    long = make_plan(4, 1 << 13, 8, 4, machine=shared.format(2), itemsize=4)
    assert long.balance < 1.03


# TFLOP/s of dense bfloat16, from NVIDIA's data sheets.
SPECIFIED = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250}


def test_rates_are_of_these_chips_and_kernels() -> None:
    rows = [row for row in KERNELS.values() if row.device == "cuda"]
    names = {row.plain.switch.name for row in rows} | {row.under_rule.name for row in rows}
    assert {*DEVICES} - {"gpu", "cpu"} == GPUS.keys() == SPECIFIED.keys()
    for chip in GPUS:
        of_chip = dict(DEVICES[chip].rates)
        assert of_chip.keys() <= names | {"FA3", "FA4"}
        for rate in of_chip.values():
            assert 0.2 * SPECIFIED[chip] < rate.forward / 1e12 < 0.8 * SPECIFIED[chip]
            assert 0.8 < rate.backward / rate.forward < 0.9
            assert rate.source
    # A kernel that nobody measured has none.
    assert DEVICES["b200"].rate_of("flash") is None
    assert DEVICES["gpu"].rate_of("flash") is None
