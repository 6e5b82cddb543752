"""Plans of batches: every pair is in a cell, every cell has a rank, and little moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BLOCK, BatchPlan, chunks_of, groups_of_heads
from cp_inductor.plan.batch_cells import find_cells
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.ir import Shape, Transfers
from cp_inductor.plan.machine import Machine
from tests.support.batch_simulate import (
    BOTH_WAYS,
    DOCUMENTS,
    WINDOW,
    Tables,
    chunks_moved,
    digest,
    documents,
    lognormal,
    plan,
    simulate_batch,
    tables_of,
)
from tests.support.reference import meaning_of


def pairs_of(text: str, tables: Tables, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return which (entry, query, key) of (B, H, S, T) exist for any head, pair by pair."""
    allowed, _ = meaning_of(text, shape, [torch.from_numpy(table) for table in tables.values()])
    return allowed.any(1).numpy()


def check(found: BatchPlan) -> None:
    """Check what every plan promises; the simulator sees that what a cell needs has arrived."""
    cells = found.query * max(1, len(found.keys)) + found.key
    assert (np.diff(cells) > 0).all()
    assert (found.queries.entry[found.query] == found.keys.entry[found.key]).all()
    assert (found.queries.group[found.query] == found.keys.group[found.key]).all()
    most = found.queries.num_blocks[found.query] * found.keys.num_blocks[found.key]
    assert ((found.weight >= 1) & (found.weight <= most)).all()
    assert ((found.rank >= 0) & (found.rank < found.world_size)).all()
    is_own = (found.queries.rank[found.query] == found.rank) & (
        found.keys.rank[found.key] == found.rank
    )
    assert ((found.stage == 0) == is_own).all()
    assert (found.stage <= found.stages).all()


def check_pairs(found: BatchPlan, pairs: np.ndarray, *, is_exact: bool = False) -> None:
    """Check that every pair is in a cell, and what weighs how much."""
    weight = np.zeros((len(found.queries), len(found.keys)))
    weight[found.query, found.key] = found.weight
    for i, j in product(range(len(found.queries)), range(len(found.keys))):
        entry, q, m = (getattr(found.queries, name)[i] for name in ("entry", "first", "length"))
        other, k, n = (getattr(found.keys, name)[j] for name in ("entry", "first", "length"))
        meet = entry == other and found.queries.group[i] == found.keys.group[j]
        part = pairs[entry, q : q + m, k : k + n] if meet else np.zeros((1, 1), bool)
        blocks = [
            part[a : a + BLOCK, c : c + BLOCK].any()
            for a, c in product(range(0, len(part), BLOCK), range(0, part.shape[1], BLOCK))
        ]
        assert weight[i, j] >= sum(blocks)
        if is_exact:
            assert weight[i, j] == sum(blocks)


@pytest.mark.parametrize("text", [DOCUMENTS, WINDOW, BOTH_WAYS])
@pytest.mark.parametrize(
    ("batch", "lengths", "heads"),
    [
        (1, (512, 512, 512), (4, 2)),
        (2, (300, 0, 700, 5), (8, 4)),
        (3, (128, 128), (4, 1)),
        (1, (1, 2, 0, 900), (2, 2)),
        (1, (640,), (4, 4)),
    ],
)
def test_documents(text: str, batch: int, lengths: tuple[int, ...], heads: tuple[int, int]) -> None:
    generator, total = np.random.default_rng(len(text)), sum(lengths)
    for stages, (mean, size) in enumerate(product((1, 40, 300, 10**9), (0, 256))):
        tables = {0: documents(generator, batch, total, mean)}
        how = {"batch": batch, "heads": heads, "stages": 1 + stages % 3, "size": size}
        found = plan(text, tables, lengths, **how)
        check(found)
        # A window may end between two blocks, of which a document is only in a part.
        pairs = pairs_of(text, tables, (batch, 1, total, total))
        check_pairs(found, pairs, is_exact=sum(n % BLOCK for n in lengths) == 0)
        simulate_batch(found, tables_of(found, batch, lengths))


@pytest.mark.parametrize("text", [DOCUMENTS, WINDOW, BOTH_WAYS])
def test_long_chunks_weigh_as_much_as_their_blocks(text: str) -> None:
    """They are cut in steps: parts that are full, or hold nothing, are not cut into blocks."""
    lengths = (33 * 4 * BLOCK, 0, 200, 16 * BLOCK + 5)
    for mean, size in product((300, 3000, 10**9), (4 * BLOCK, 130 * BLOCK)):
        tables = {0: documents(np.random.default_rng(mean), 1, sum(lengths), mean)}
        chunks, blocks = (chunks_of(1, lengths, of) for of in (size, BLOCK))
        found, expected = (np.zeros((len(of), len(of))) for of in (chunks, blocks))
        for of, weight in ((chunks, found), (blocks, expected)):
            cells = find_cells(Rule.parse(text), tables, of, of, batch=1, num_heads=1)
            weight[cells.query, cells.key] = cells.weight
        starts = np.flatnonzero(np.isin(blocks.first, chunks.first))
        assert len(starts) == len(chunks)
        expected = np.add.reduceat(np.add.reduceat(expected, starts, 0), starts, 1)
        assert (found == expected).all()


HUGE = 2**63 - 1
# Rules, and the kinds of their tables: dims, and what is in them.
HOSTILE = [
    ("Eq(t0(b,q)-t0(b,k),0)", {0: ("bk", "huge")}),
    ("(k-q<=0)&Eq(t0(b,q),t0(b,k))", {0: ("bk", "unsorted")}),
    ("t0(b,q)-t0(b,k)<=0", {0: ("bk", "huge")}),
    ("Ne(t0(b,k),0)", {0: ("bk", "bools")}),
    ("(k-q<=0)&Ne(t0(b,k),0)&Eq(t1(q)-t1(k),0)", {0: ("bk", "bools"), 1: ("k", "sorted")}),
    ("~Eq(t0(b,q)-t0(b,k),0)", {0: ("bk", "sorted")}),
    ("Eq(t0(b,q)-t0(b,k),0)|(k-q<=-600)", {0: ("bk", "sorted")}),
    ("k-t0(b,q)<=0", {0: ("bq", "positions")}),
    ("(t0(b,q)-k<=0)&(k-t1(b,q)<=0)", {0: ("bq", "positions"), 1: ("bq", "positions")}),
    ("q-k-t0(h)<=0", {0: ("h", "small")}),
    ("(k-q<=0)&(q-k-t0(b)<=0)", {0: ("b", "small")}),
    ("Ne(t0(b,0,q,k),0)", {0: ("b1qk", "few")}),
    ("Ne(t0(b,h,q,k),0)&(k-q<=0)", {0: ("bhqk", "few")}),
    ("x0(b,q)-x0(b,k)<=0", {0: ("bk", "nan")}),
    ("~(x0(b,q)-x0(b,k)<=0)", {0: ("bk", "nan")}),
    ("x0(b,k)-0.1<=0", {0: ("bk", "float")}),
    ("x0(q)+x0(k)-1<=0", {0: ("k", "float")}),
    ("~((x0(q)+x0(k)-1<=0)&(k-q<=0))", {0: ("k", "float")}),
    ("t0(b,q)*t0(b,k)<=0", {0: ("bk", "unsorted")}),
    ("Eq(t0(t1(b,k))-t0(t1(b,q)),0)", {0: ("k", "sorted"), 1: ("bk", "positions")}),
    ("Eq(floor(t0(b,q)/3)-floor(t0(b,k)/3),0)", {0: ("bk", "unsorted")}),
    ("Eq(Mod(t0(b,k),5),2)", {0: ("bk", "sorted")}),
    ("Eq(floor(q/49)-floor(k/49),0)", {}),
]


def draw(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    def runs(values: np.ndarray) -> np.ndarray:
        """Return each of some of the values 100 times in a row."""
        drawn = np.repeat(generator.choice(values, shape[-1] // 100 + 1), 100)[: shape[-1]]
        return np.broadcast_to(drawn, shape).copy()

    match kind:
        case "huge":
            return runs(np.array([HUGE, HUGE - 1, -HUGE, -HUGE - 1, 2**53, 2**53 + 1, 0]))
        case "unsorted":
            return runs(np.arange(-9, 9))
        case "sorted":
            return np.cumsum(generator.random(shape) < 0.01, axis=-1)
        case "bools":
            return np.arange(shape[-1]) < np.ones(shape, np.int64) * generator.integers(1, 300)
        case "few":
            return generator.random(shape) < 3e-5
        case "positions":
            low = generator.integers(0, shape[-1] // 2)
            return np.sort(generator.integers(low, low + 50, shape).astype(np.int32), axis=-1)
        case "small":
            return generator.integers(0, 90, shape)
        case "float":
            return generator.choice(np.array([0.1, 0.5, 3.0], np.float32), shape)
        case "nan":
            return runs(np.array([np.nan, np.inf, -np.inf, 1.0], np.float32))
    raise AssertionError(kind)


@pytest.mark.parametrize(("text", "kinds"), HOSTILE)
def test_no_pair_is_dropped(text: str, kinds: Mapping[int, tuple[str, str]]) -> None:
    """This holds for any rule, and whatever is in its tables."""
    lengths, batch, num_heads = (384, 37, 0, 300), 2, 2
    sizes = {"b": batch, "h": num_heads, "q": sum(lengths), "k": sum(lengths), "1": 1}
    for seed in range(3):
        generator = np.random.default_rng(seed)
        tables = {
            number: draw(kind, tuple(sizes[dim] for dim in dims), generator)
            for number, (dims, kind) in kinds.items()
        }
        found = plan(text, tables, lengths, batch=batch, heads=(num_heads, 1))
        check(found)
        simulate_batch(found, tables_of(found, batch, lengths))
        pairs = pairs_of(text, tables, (batch, num_heads, sum(lengths), sum(lengths)))
        check_pairs(found, pairs)


def test_what_cannot_exist_is_left_out() -> None:
    """Padding, and other rules over tables: bounds are not only safe, they also say something."""
    padding = np.arange(1024)[None] < np.array([[200], [1000]])
    found = plan("(k-q<=0)&Ne(t0(b,k),0)", {0: padding}, (512, 512), batch=2)
    of_first = found.queries.entry[found.query] == 0
    assert found.keys.first[found.key[of_first]].max() == 128
    assert found.num_blocks == (1 + 7 * 2) + 8 * 9 / 2
    nothing = plan("Ne(t0(b,k),0)", {0: np.zeros((1, 512), np.int64)}, (256, 256))
    assert not len(nothing.query) and nothing.balance == 1.0
    read_first = plan("k-t0(b,q)<=0", {0: np.full((1, 512), 100)}, (256, 256))
    assert set(read_first.keys.first[read_first.key]) == {0}


def test_document_numbers_may_be_anything() -> None:
    """Hashes, in any order and dtype: the plan is that of documents numbered 0, 1, 2, ..."""
    generator = np.random.default_rng(5)
    ids = np.concatenate([lognormal(seed, 8192, 6.5, 1.0) for seed in (1, 2)])
    expected = digest(plan(DOCUMENTS, {0: ids}, (2048,) * 4, batch=2))
    assert digest(plan(DOCUMENTS, {0: ids.astype(np.int32)}, (2048,) * 4, batch=2)) == expected
    for low, high in ((-5000, 5000), (-(2**63), 2**63 - 1)):
        hashes = np.unique(generator.integers(low, high, 9000))
        shuffled = generator.permutation(hashes)[ids]
        assert digest(plan(DOCUMENTS, {0: shuffled}, (2048,) * 4, batch=2)) == expected


def test_cross_attention() -> None:
    """Queries and keys have their own lengths and document numbers."""
    text = "Eq(t0(b,q)-t1(b,k),0)"
    generator = np.random.default_rng(0)
    for lengths, key_lengths in product([(256, 256), (100, 0)], [(700, 300), (0, 90)]):
        tables = {
            0: documents(generator, 2, sum(lengths), 60),
            1: documents(generator, 2, sum(key_lengths), 110),
        }
        found = plan(text, tables, lengths, key_lengths=key_lengths, batch=2, stages=3)
        check(found)
        check_pairs(found, pairs_of(text, tables, (2, 1, sum(lengths), sum(key_lengths))))
        simulate_batch(found, tables_of(found, 2, lengths, key_lengths))


# World size, tokens, log mean and sigma, heads: the worst rank's units of the worst seed, at
# most, in one stage and in two. In two, results go home twice if both stages compute with a chunk.
BATCHES = [
    (8, 32768, 8.5, 1.0, (8, 8), (8.0, 8.0)),
    (8, 32768, 8.5, 1.0, (32, 8), (14.5, 14.5)),
    (8, 131072, 7.5, 1.0, (32, 8), (7.0, 8.5)),
    (8, 131072, 20.0, 0.1, (32, 8), (14.5, 14.5)),
    (8, 131072, 20.0, 0.1, (8, 8), (8.0, 8.0)),
    (64, 1 << 20, 9.0, 1.5, (32, 8), (22.0, 22.0)),
    (5, 50000, 8.5, 1.0, (8, 8), (4.5, 4.6)),
    # 22.8 in one stage if ranks do not mind how much they receive
    (16, 131072, 9.0, 1.5, (32, 8), (22.0, 24.0)),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", BATCHES)
def test_work_is_balanced_and_little_moves(case: tuple[Any, ...], stages: int) -> None:
    world_size, length, log_mean, sigma, heads, most = case
    lengths = [len(part) for part in np.array_split(np.arange(length), world_size)]
    for seed in range(4 if world_size < 64 else 1):
        tables = {0: lognormal(seed, length, log_mean, sigma)}
        found = plan(DOCUMENTS, tables, lengths, heads=heads, stages=stages)
        check(found)
        assert found.balance <= 1.05
        unit = 2 * (length / world_size) * heads[1] * 128 * 2
        received = [
            found.bytes_received(
                rank, num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, itemsize=2
            )
            for rank in range(world_size)
        ]
        assert max(received) / unit <= most[stages - 1]


@pytest.mark.parametrize(
    ("text", "heads", "world_size", "expected"),
    [
        (DOCUMENTS, (8, 8), 2, 4),
        (DOCUMENTS, (12, 6), 3, 3),
        (DOCUMENTS, (8, 2), 8, 2),
        (DOCUMENTS, (10, 5), 8, 1),
        (DOCUMENTS, (8, 8), 1, 1),
        (f"{DOCUMENTS};x1(h)*(k-q)", (8, 8), 2, 1),
        ("(k-q<=0)&Eq(t0(b,h,q)-t0(b,h,k),0)", (8, 8), 2, 1),
        ("(k-q<=0)&(k-t0(h)<0)", (8, 8), 2, 1),
    ],
)
def test_heads_are_cut_where_a_rule_does_not_know_them(
    text: str, heads: tuple[int, int], world_size: int, expected: int
) -> None:
    assert groups_of_heads(Rule.parse(text), *heads, world_size) == expected


def test_heads_are_cut_finer_over_nodes() -> None:
    rule, nodes = Rule.parse(DOCUMENTS), Nodes(2, 8)
    assert [groups_of_heads(rule, 32, n, 4, nodes) for n in (1, 2, 8, 16)] == [1, 2, 8, 8]


def test_nothing_moves_without_a_reason() -> None:
    for document in (1, 1024):
        ids = np.repeat(np.arange(8192 // document), document)[None]
        found = plan(DOCUMENTS, {0: ids}, (2048,) * 4)
        assert (found.stage == 0).all() and found.balance == 1.0
    alone = plan(DOCUMENTS, {0: np.zeros((1, 2048), np.int64)}, (2048,))
    assert (alone.stage == 0).all()


def test_stages_share_what_is_fetched() -> None:
    """For long documents, no stage fetches more than three quarters of what both fetch."""
    found = plan(DOCUMENTS, {0: np.zeros((1, 1 << 16), np.int64)}, (1 << 13,) * 8, stages=2)
    fetched = np.zeros((3, 8))
    for stage, transfers in enumerate(found.fetches):
        for price, chunks, of_keys in ((3, found.queries, False), (2, found.keys, True)):
            _, rank, chunk = chunks_moved(transfers, of_keys=of_keys)
            np.add.at(fetched[stage], rank, price * chunks.length[chunk])
    assert (fetched.max(0) <= 0.75 * fetched.sum(0)).all()


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("starts", [(), (300,), (500, 777, 778, 1700), tuple(range(97, 2048, 97))])
def test_the_simulator_executes_it(starts: Sequence[int], stages: int) -> None:
    """A rule without tables describes documents of known lengths as well."""
    steps = "+".join(f"Step(q,{start})-Step(k,{start})" for start in starts)
    rule = Rule.parse(f"(k-q<=0)&Eq({steps},0)" if starts else "(k-q<=0)&(q-k-600<=0)")
    lengths = (512,) * 4
    found = plan(rule.format(), {}, lengths, stages=stages)
    if starts:
        ids = np.searchsorted(np.array(starts), np.arange(2048), side="right")[None]
        assert digest(found) == digest(plan(DOCUMENTS, {0: ids}, lengths, stages=stages))
    simulate_batch(found, tables_of(found, 1, lengths))


def test_bytes_are_those_of_the_payloads() -> None:
    """Counted by hand: rank 0 has four fifths of a document of 640, and rank 1 helps it."""
    found = plan("full", {}, (512, 128), heads=(2, 1), stages=1, size=128)
    away = {
        side: {
            (int(rank), int(chunk))
            for rank, chunk in zip(found.rank, which, strict=True)
            if chunks.rank[chunk] != rank
        }
        for side, chunks, which in (
            ("query", found.queries, found.query),
            ("key", found.keys, found.key),
        )
    }
    for rank in range(2):
        expected = 0
        # q; q, the gradient of out and two statistics. Home: out and lse; dq.
        for to, chunk in away["query"]:
            expected += 2 * 128 * (64 * 2 * 3 + 8) * (to == rank)
            expected += 2 * 128 * (64 * 2 * 2 + 4) * (found.queries.rank[chunk] == rank)
        # k and v, twice. Home: their gradients.
        for to, chunk in away["key"]:
            expected += 128 * (64 * 2 * 4) * (to == rank)
            expected += 128 * (64 * 2 * 2) * (found.keys.rank[chunk] == rank)
        sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "itemsize": 2}
        assert found.bytes_received(rank, **sizes) == expected > 0


# --- Plans of batches over nodes: every cell is computed once, and little moves between nodes.


@pytest.mark.parametrize("text", [DOCUMENTS, WINDOW, BOTH_WAYS])
@pytest.mark.parametrize(
    ("size", "batch", "lengths"),
    [
        (2, 1, (512,) * 4),
        (3, 1, (384,) * 6),
        (2, 2, (300, 0, 700, 5, 256)),  # the last node has one rank
        (2, 1, (0, 0, 600, 90)),  # a node without tokens
        (4, 1, (200, 300, 100)),  # one node
    ],
)
def test_every_cell_is_computed_once(
    text: str, size: int, batch: int, lengths: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(size)
    for mean in (1, 60, 400, 10**9):
        tables = {0: documents(generator, batch, sum(lengths), mean)}
        nodes = Nodes(size, 8)
        found = plan(text, tables, lengths, batch=batch, nodes=nodes)
        flat = plan(text, tables, lengths, batch=batch)
        cells = ("query", "key", "weight")
        assert all(np.array_equal(getattr(found, n), getattr(flat, n)) for n in cells)
        simulate_batch(found, tables_of(found, batch, lengths))
        again = plan(text, tables, lengths, batch=batch, nodes=nodes)
        assert np.array_equal(found.rank, again.rank)
        if size >= len(lengths):
            assert np.array_equal(found.rank, flat.rank)


def tokens_between(found: BatchPlan, size: int) -> np.ndarray:
    """Return the tokens that each rank receives of other nodes, on the way out and home."""
    received = np.zeros(found.world_size)
    fetched = Transfers.joined(found.fetches)
    for of_keys, chunks in (False, found.queries), (True, found.keys):
        owner, rank, chunk = chunks_moved(fetched, of_keys=of_keys)
        is_between = rank // size != owner // size
        for to in (rank, owner):
            lengths = chunks.length[chunk][is_between]
            received += np.bincount(to[is_between], lengths, found.world_size)
    return received


def test_little_moves_between_nodes() -> None:
    """16 ranks in nodes of 4, with documents that are much shorter than what a node stores."""
    lengths = (2048,) * 16
    worst, of_flat = 0.0, 0.0
    for seed in range(3):
        tables = {0: documents(np.random.default_rng(seed), 1, sum(lengths), 600)}
        how = (DOCUMENTS, tables, lengths)
        flat = plan(*how, heads=(32, 8))
        found = plan(*how, heads=(32, 8), nodes=Nodes(4, 8))
        assert found.balance <= 1.06
        # Tokens count once for each group of heads.
        worst += tokens_between(found, 4).max() / found.num_groups
        of_flat += tokens_between(flat, 4).max() / flat.num_groups
    assert worst <= 0.65 * of_flat, (worst, of_flat)


def test_many_ranks_are_balanced() -> None:
    """Each has enough chunks, though heads are cut into eight groups."""
    lengths = (16384,) * 128
    for seed in range(2):
        # A few long documents are most of the work.
        numbers = lognormal(seed, sum(lengths), 7.5, 1.0)
        found = plan(DOCUMENTS, {0: numbers}, lengths, heads=(32, 8), nodes=Nodes(8, 8))
        assert found.balance <= 1.06, (seed, found.balance)


def test_a_slow_link_keeps_work_in_its_node() -> None:
    """Balance costs what moves for it: as much as the price of a link says, and not more."""
    lengths = (1024,) * 8
    tables = {0: documents(np.random.default_rng(2), 1, sum(lengths), 600)}
    moved, balance = [], []
    for wait in (0, 10, 10**6):
        found = plan(DOCUMENTS, tables, lengths, heads=(8, 4), nodes=Nodes(4, 8, wait))
        moved.append(tokens_between(found, 4).max())
        balance.append(found.balance)
    assert balance[0] == balance[1] <= 1.06 < balance[2]
    assert moved[0] == moved[1] > 1.3 * moved[2]


def test_a_node_that_has_its_share_gives_nothing() -> None:
    """One document fills each node: nothing crosses."""
    lengths = (1024,) * 8
    tables = {0: np.repeat(np.arange(2), 4096)[None]}
    found = plan(DOCUMENTS, tables, lengths, heads=(8, 4), nodes=Nodes(4, 8))
    assert tokens_between(found, 4).sum() == 0
    assert found.balance < 1.2


def test_nodes_of_a_machine() -> None:
    machine = Machine.parse("8xh100:nvlink4 x 8:ib400")
    # 4096 bytes at 50 GB/s, and a block of 128 x 128 pairs, forward and backward, at 516 TFLOP/s.
    shape = Shape(1, 32, 8, 128, 2)
    wait = round(1000 * (4096 / 50e9) / (128**2 * 32 * 14 * 128 / machine.device.flops_per_s))
    # What NCCL reaches inside is 6 times as fast.
    assert Nodes.of(machine, 64, shape) == Nodes(8, 6, wait)
    assert Nodes.of(machine, 8, shape) is None
    assert Nodes.of(Machine(), 64, shape) is None
    assert Nodes.parse(Nodes(8, 9, 45).format()) == Nodes(8, 9, 45)
    # Links that are alike have the plans of one level.
    assert Nodes.of(Machine.parse("8xh100:ib400 x 8:ib400"), 64, shape) is None
