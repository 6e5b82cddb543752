"""Plans of batches over nodes: every cell is computed once, and little moves between nodes."""

from __future__ import annotations

import numpy as np
import pytest

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.ir import Shape, Transfers
from cp_inductor.plan.machine import Machine
from tests.support.batch_plans import (
    BOTH_WAYS,
    DOCUMENTS,
    WINDOW,
    chunks_moved,
    documents,
    lognormal,
    plan,
    tables_of,
)
from tests.support.batch_simulate import simulate_batch


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
