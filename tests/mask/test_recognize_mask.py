"""What masks are said to be, against what they are: every claim holds for every index."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.mask.reader.aten import OPS
from cp_inductor.mask.reader.read import Recognized, read_mask
from cp_inductor.mask.rule import describe
from tests.support import random_masks
from tests.support.ranks import fake_mesh

B, H, S, T = 2, 3, 13, 13


def capture(
    function: Callable[..., Tensor], *inputs: Tensor, num_queries: int = S, num_keys: int = T
) -> tuple[fx.Node, fx.GraphModule]:
    """Return the node of the mask that a function makes, and the graph that it is in."""
    found: list[tuple[fx.Node, fx.GraphModule]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        node = next(n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        found.append((node.kwargs["attn_mask"], gm))
        return gm.forward

    def attend(query: Tensor, key: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=function(*inputs))

    torch._dynamo.reset()
    query, key = torch.randn(B, H, num_queries, 8), torch.randn(B, H, num_keys, 8)
    torch.compile(attend, backend=backend, fullgraph=True)(query, key, *inputs)
    return found[0]


def values_in(gm: fx.GraphModule, inputs: tuple[Tensor, ...]) -> dict[fx.Node, Tensor]:
    """Run a graph that was captured with some inputs; return the value of each node."""

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    # Dynamo numbers what it takes as it meets it; all else are queries and keys.
    by_shape = {tensor.shape: tensor for tensor in inputs}
    shapes = [p.meta["example_value"].shape for p in gm.graph.find_nodes(op="placeholder")]
    values: dict[fx.Node, Tensor] = {}
    Recorder(gm).run(*(by_shape[s] if s in by_shape else torch.randn(s) for s in shapes))
    return values


def compare_masks(recognized: Recognized, values: dict[fx.Node, Tensor], mask: Tensor) -> None:
    num_queries, num_keys = (n if n > 1 else S for n in mask.shape[-2:])
    random_masks.check_rule(recognized, values, mask, (B, H, num_queries, num_keys), num_eps=8)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [3] * 9 + [4] * 2])
POSITIONS = torch.cat([torch.arange(7), torch.arange(6)])[None].repeat(2, 1)
# Where walks over prefix trees enter and leave the node of each token: examples/prefix_trees.py.
TREES = torch.stack([torch.arange(S).repeat(B, 1), torch.arange(S).repeat(B, 1) + 4])
PADDING = torch.ones(B, S, dtype=torch.long).index_fill(1, torch.tensor([11, 12]), 0)


def queries() -> Tensor:
    return torch.arange(S)[:, None]


def keys() -> Tensor:
    return torch.arange(T)[None]


def causal() -> Tensor:
    return torch.ones(S, T, dtype=torch.bool).tril()


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None])[:, None]


def runs(positions: Tensor) -> Tensor:
    """Number the documents of positions that begin anew with each."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


def packed(positions: Tensor) -> Tensor:
    """As Hugging Face does it."""
    ids = runs(positions)
    b = torch.arange(B)[:, None, None, None]
    q, k = torch.arange(S)[None, None, :, None], torch.arange(T)[None, None, None, :]
    return (ids[b, q] == ids[b, k]) & (positions[b, k] <= positions[b, q])


def inverted_padding(mask: Tensor) -> Tensor:
    inverted = 1.0 - mask[:, None, None, :].to(torch.float32)
    return inverted.masked_fill(inverted.to(torch.bool), float("-inf"))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(8, 4), (4, 8), (8, 8)])
def test_rows_that_see_nothing_but_finite_minima(num_queries: int, num_keys: int) -> None:
    """A band of three; queries far behind the last key see none of it, and so all keys alike."""

    def function() -> Tensor:
        distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
        return torch.where(distance.abs() <= 1, 0.0, LOWEST)

    node, gm = capture(function, num_queries=num_queries, num_keys=num_keys)
    recognized = read_mask(node)[0]
    assert recognized is not None
    assert bool(recognized.rule.bias) == (num_queries > num_keys)
    compare_masks(recognized, values_in(gm, ()), function())


def alibi() -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125])
    distance = torch.arange(T)[None] - torch.arange(S)[:, None]
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, float("-inf"))[None]


LOWEST = torch.finfo(torch.float32).min
RATES = torch.rand(H)
# What makes a mask, of an input x that stands before it; what it is called, and how many tables it
# reads. Of padding, a row of nothing else would see all of it alike: the numbers are kept.
MASKS = """
causal() -> causal; 0
torch.zeros(S, T).masked_fill(keys() > queries(), float("-inf"))[None, None] -> causal; 0
torch.triu(torch.full((S, T), float("-inf")), diagonal=1) -> causal; 0
torch.where(causal(), 0.0, LOWEST) -> causal; 0
torch.where(causal() & (queries() - keys() < 4), 0.0, -torch.inf) -> causal, window 4; 0
torch.logical_and(queries() - keys() >= 0, ~(queries() - keys() > 3)) -> causal, window 4; 0
(torch.ones(S, T).tril() * torch.triu(torch.ones(S, T), diagonal=-3)).bool() -> causal, window 4; 0
(queries() // 4 == keys() // 4) & (keys() <= queries()) -> causal, chunks of 4; 0
(keys() <= queries()) | (keys() < 5) -> (causal) or (prefix 5); 0
DOCUMENTS: same(x) & causal() -> causal, document equality; 1
POSITIONS: packed(x) -> causal, document equality; 1
POSITIONS: packed(x) & (x[:, None, None] > x[:, None, :, None] - 4) \
-> causal, window 4, document equality; 1
packed(torch.cat([torch.arange(5), torch.arange(8)])[None].expand(B, -1)) -> causal, 2 documents; 0
PADDING: x[:, None, None, :].bool() -> key padding; 1
PADDING: inverted_padding(x) -> key padding; 1
PADDING: (1.0 - x[:, None, None, :]) * LOWEST -> full, bias; 1
PADDING: causal()[None, None] & x.bool()[:, None, None] -> causal, key padding; 1
DOCUMENTS: of_a_condition(x) -> causal, document equality; 1
TREES: (x[0][:, None] <= x[0][..., None])[:, None] & (x[0][..., None] < x[1][:, None])[:, None] \
-> t0(0, b, k) - t0(0, b, q) <= 0, t0(0, b, q) - t0(1, b, k) + 1 <= 0; 1
alibi() -> causal, ALiBi; 1
RATES: x[:, None, None] * (keys() - queries()).float() -> full, ALiBi; 1
torch.ones(1, 1, S, T, dtype=torch.bool) -> full; 0
torch.ones(S, T, dtype=torch.bool).tril(-3) -> causal, 3 behind; 0
"""


def rows_of(table: str) -> list[list[str]]:
    """Return the parts of rows: text, name, and number of tables if there is one."""
    return [re.split(r" *-> |; (?=\d$)", line) for line in table.split("\n")[1:-1]]


def function_of(text: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return what makes a mask, and its input."""
    name, colon, made = text.partition(": ")
    if not (colon and name.isidentifier()):
        return eval(f"lambda: {text}", globals()), ()
    return eval(f"lambda x: {made}", globals()), (globals()[name],)


def check_mask(text: str) -> Recognized:
    """Read a mask, hold what it is recognized as against what the graph computes, return it."""
    function, inputs = function_of(text)
    node, gm = capture(function, *inputs)
    recognized: Recognized = read_mask(node)[0]
    values = values_in(gm, inputs)
    compare_masks(recognized, values, values[node])
    return recognized


@pytest.mark.parametrize(("text", "name", "num_tables"), rows_of(MASKS))
def test_masks(text: str, name: str, num_tables: str) -> None:
    recognized = check_mask(text)
    assert describe(recognized.rule) == name, recognized.rule
    assert len(recognized.tables) == int(num_tables), recognized.tables


# --- What was misread once --------------------------------------------------------------------


@torch.library.custom_op("cp_inductor_tests::where", mutates_args=())
def swapped_where(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """An op that has the name of another, and does something else."""
    return torch.where(condition, other, value)


@swapped_where.register_fake
def _(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(condition.shape, value.shape, other.shape)
    return value.new_empty(shape)


def counts_that_wrap(p: Tensor) -> Tensor:
    counts = (torch.diff(p, prepend=p[:, :1]) != 1).cumsum(1, dtype=torch.int8)
    return same(counts) & (p[:, None, None] <= p[:, None, :, None])


FAR_APART = torch.tensor([[0] * 5 + [256] * 8, [0] * 2 + [3] * 9 + [259] * 2])
NEXT_TO_256 = torch.tensor([[256] * 5 + [257] * 8, [256] * 2 + [258] * 9 + [259] * 2])
AT_THE_END = torch.tensor([[127] * 8 + [3] * 5, [-128] * 5 + [127] * 8], dtype=torch.int8)
END_OF_INT64 = (1 << 63) - 1
AT_THE_END_OF_INT64 = torch.tensor([[END_OF_INT64] * 8 + [3] * 5, [-END_OF_INT64 - 1] * 13])
LONGER = torch.rand(1, 1, S + 9, T + 9, generator=torch.Generator().manual_seed(0)) < 0.5


def causal_in_a_column(positions: Tensor) -> Tensor:
    ids, positions = runs(positions)[:, 5], positions[:, 5]
    return (ids[:, None] == ids) & (positions <= positions[:, None])


# Each row goes up by one, so that all runs are alike; the numbers of a column do not.
ROWS_OF_ONE_RUN = queries() * 5 % S + keys()
ONES_IN_UINT8 = PADDING.to(torch.uint8)

MISREAD = """
torch.arange(2, end=T + 2)[None] <= queries()
keys() <= torch.minimum(queries(), other=torch.full((S, 1), 5))
keys() <= torch.maximum(queries(), other=torch.full((S, 1), 5))
torch.add(keys(), queries(), alpha=2) <= 9
torch.eq(keys() // 4, other=queries() // 4)
torch.ge(*torch.meshgrid(torch.arange(S), torch.arange(T), indexing="ij"))
torch.outer(torch.arange(S), torch.ones(T, dtype=torch.long)) >= keys()
FAR_APART: same(x.to(torch.int8))
NEXT_TO_256: same(x.to(torch.bfloat16))
DOCUMENTS: same(x.int() * 65536 * 65536)
ONES_IN_UINT8: ((x - 1) < 0)[:, None, None] | (keys() <= queries())
AT_THE_END: (x[:, :, None] < x[:, None])[:, None]
AT_THE_END_OF_INT64: (x[:, :, None] < x[:, None])[:, None]
AT_THE_END_OF_INT64: (x[:, :, None] + 1 > x[:, None])[:, None]
(queries() - 2 > keys()) | ~(queries() - keys() <= END_OF_INT64)
keys() % (T - 1) <= queries() % (S - 1)
NEXT_TO_256: (x.to(torch.bfloat16) <= 256)[:, None, None]
torch.ops.cp_inductor_tests.where(keys() <= queries(), torch.tensor(1.0), torch.tensor(0.0)).bool()
POSITIONS: counts_that_wrap(x)
DOCUMENTS: (x[1].cumsum(0)[torch.argsort(x[0]) % T] > 3)[None] & causal()
ROWS_OF_ONE_RUN: causal_in_a_column(x)
"""


@pytest.mark.parametrize("text", MISREAD.split("\n")[1:-1])
def test_what_was_misread_once(text: str) -> None:
    check_mask(text)


SLICES = """
LONGER: x[:, :, :S, :T] -> a mask tensor
LONGER: x[:, :, :S, :T] & causal() -> causal, a mask tensor
LONGER: x[0, :, :S].narrow(-1, 0, T) -> a mask tensor
LONGER: x.float()[..., :S, :T].masked_fill(~causal(), -torch.inf) -> causal, bias
"""


@pytest.mark.parametrize(("text", "name"), rows_of(SLICES))
def test_a_slice_of_a_longer_mask_is_a_table(text: str, name: str) -> None:
    """A rank is given its own rows of what is read: it must have a row for every query."""
    recognized = check_mask(text)
    assert describe(recognized.rule) == name
    (table,) = recognized.tables
    assert table.meta["example_value"].shape[-2:] == (S, T)


def test_a_shifted_slice_is_read_where_it_is() -> None:
    """All ranks read all of it: its rows are not those of queries."""
    assert not check_mask("LONGER: x[:, :, 4 : S + 4, 9:]").rule.reads_pairs


def test_a_slice_of_longer_padding_is_read_through() -> None:
    longer = torch.ones(B, T + 5, dtype=torch.long)
    node, _ = capture(lambda padding: padding[:, None, None, :T].bool(), longer)
    recognized = read_mask(node)[0]
    assert recognized.tables[0].op == "placeholder"
    more = torch.ones(B + 1, T, dtype=torch.long)
    node, _ = capture(lambda padding: padding[:B, None, None].bool(), more)
    # Batch entries may be sharded by another axis of the mesh, so that all must be those of scores.
    (table,) = read_mask(node)[0].tables
    assert table.meta["example_value"].shape[0] == B


# --- What cannot be traced --------------------------------------------------------------------


def written_to_by(write: Callable[[Tensor], object], ids: Tensor) -> Tensor:
    """A mask of numbers that are written to behind it, and of what they are then."""
    ids = ids.clone()
    mask = same(ids)
    write(ids)
    return mask & (ids >= 0)[:, None, None]


def written_by_assignment(ids: Tensor) -> Tensor:
    ids = ids.clone()
    mask = same(ids)
    ids += torch.arange(S)
    mask |= same(ids)
    return mask & (ids >= 0)[:, None, None]


def written_in_a_checkpoint(ids: Tensor) -> Tensor:
    def body(ids: Tensor) -> Tensor:
        ids.add_(torch.arange(S))
        return ids * 2

    ids = ids.clone()
    mask = same(ids)
    return mask & (checkpoint(body, ids, use_reentrant=False) >= 0)[:, None, None]


@torch.library.custom_op("cp_inductor_tests::clear", mutates_args={"ids"})
def clear(ids: Tensor) -> None:
    """Write, under a name that does not say so."""
    ids.zero_()


def of_a_condition(ids: Tensor) -> Tensor:
    """A higher-order op, which is a table."""
    shifted = torch.cond(ids.sum() > 3, lambda x: x + 1, lambda x: x - 1, (ids,))
    return same(shifted) & causal()


def written_to() -> Tensor:
    mask = torch.ones(S, T, dtype=torch.bool).tril()
    mask[:, 0] = False
    return mask


# What is written to is no table: a rule reads it where the attention is, after all writes.
NOT_UNDERSTOOD = """
written_to()
DOCUMENTS: written_in_a_checkpoint(x)
DOCUMENTS: written_to_by(lambda ids: ids.view(-1)[::2].zero_(), x)
DOCUMENTS: written_by_assignment(x)
DOCUMENTS: written_to_by(lambda ids: torch.add(ids, 1, out=ids), x)
DOCUMENTS: written_to_by(torch.ops.cp_inductor_tests.clear, x)
torch.rand(S, T) > 0.5
DOCUMENTS: (torch.argsort(x, -1)[:, :, None] >= torch.arange(T))[:, None]
queries() / 3 >= torch.arange(T)
(torch.arange(S, dtype=torch.uint8)[:, None] * 100) >= torch.arange(T)
(torch.arange(S, dtype=torch.uint8)[:, None] - 4) >= torch.arange(T)
(torch.arange(S) * 2)[torch.arange(S)[:, None] - 6] >= torch.arange(T)
"""


@pytest.mark.parametrize("text", NOT_UNDERSTOOD.split("\n")[1:-1])
def test_what_is_not_understood_is_taken_as_it_is(text: str) -> None:
    # Whatever was claimed, it holds; and something was left to the tensors.
    assert check_mask(text).tables


@pytest.mark.parametrize("number", [40, 90])
def test_a_rule_that_is_too_large_to_write_is_a_table(number: int) -> None:
    """Constant documents: of 40 the text is longer than is read, of 90 they are read as ids."""

    def attend_in_documents(query: Tensor) -> Tensor:
        places = torch.arange(query.shape[2])
        documents = torch.zeros_like(places)
        for start in range(2, 2 * number, 2):
            documents = documents + (places >= start).long()
        mask = (documents[:, None] == documents) & (places[:, None] >= places)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    with fake_mesh(0, 2) as mesh:
        query = torch.randn(1, 1, number, 8)
        report = cp_inductor.explain(
            attend_in_documents, distribute_tensor(query.repeat(1, 1, 2, 1), mesh, [Shard(2)])
        )
    (found,) = report.attentions
    assert found.verdict == "rewritten"
    assert (number == 90) == ("a mask tensor" not in str(report))


# --- Random programs of every row of the table ------------------------------------------------


def test_every_op_that_is_read_is_drawn() -> None:
    assert set(random_masks.DRAWERS) == set(OPS)


@pytest.mark.slow
@given(st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_random_programs(seed: int) -> None:
    random_masks.check_program(*random_masks.a_program(Random(seed)))


@pytest.mark.parametrize(
    "seed",
    [
        1_001_730,  # clamped to the lowest of float64, which 15 digits make infinite
        1_004_499,  # no more than the greatest of int64, and not so: from 2^63 on
        1_013_346,  # of what is no number, clamped between bounds that exclude each other
        2_003_419,  # tables of one number, and the contrary of a condition on them
        1_003_502,  # the greatest of int64, and the lowest behind it: one apart in int64
    ],
)
def test_programs_that_failed_once(seed: int) -> None:
    random_masks.check_program(*random_masks.a_program(Random(seed)))
