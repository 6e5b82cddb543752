"""What masks are said to be, against what they are: every claim holds for every index."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.mask.describe import describe
from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import INDICES, is_of_pairs, table
from cp_inductor.mask.reader.aten import OPS
from cp_inductor.mask.reader.to_rule import Recognized
from cp_inductor.mask.reader.values import DIMS, RunTimeTables, range_of
from cp_inductor.mask.reader.writes import Writes
from cp_inductor.mask.rule import Rule
from cp_inductor.passes.recognize_mask import recognize_mask
from tests.support import random_masks
from tests.support.ranks import fake_mesh

B, H, S, T = 2, 3, 13, 13


def mask_of(rule: Rule, tables: list[Tensor], num_queries: int = S, num_keys: int = T) -> Tensor:
    """Evaluate a rule for every index: bool, or what is added to the scores."""
    sizes = (B, H, num_queries, num_keys)
    tables = [t if t.is_floating_point() else t.long() for t in tables]
    values = {
        symbol: torch.arange(n).view([-1 if d == dim else 1 for d in range(4)])
        for dim, (symbol, n) in enumerate(zip(INDICES, sizes, strict=True))
    }
    operations = Operations(
        read=lambda number, where, _: tables[number][tuple(torch.as_tensor(w) for w in where)],
        floor_divide=lambda a, b: torch.div(torch.as_tensor(a), b, rounding_mode="floor"),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        choose=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
        as_integer=lambda condition: torch.as_tensor(condition).long(),
        boolean=torch.tensor,
    )
    allowed = torch.as_tensor(evaluate(rule.allowed, values, operations))
    if not rule.bias:
        return allowed.expand(sizes)
    bias = torch.as_tensor(evaluate(rule.bias, values, operations)).double()
    return torch.where(allowed, bias, -torch.inf).expand(sizes)


def capture(
    function: Callable[..., Tensor], *inputs: Tensor, num_queries: int = S, num_keys: int = T
) -> tuple[fx.Node, list[Tensor]]:
    """Return the node of the mask that a function makes, from Dynamo, and the graph's inputs."""
    found: list[tuple[fx.Node, list[Tensor]]] = []

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


def values_of(node: fx.Node, gm: fx.GraphModule, inputs: list[Tensor]) -> dict[fx.Node, Tensor]:
    """Run a graph from Dynamo on real tensors; return the value of each node."""

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    values: dict[fx.Node, Tensor] = {}
    Recorder(gm).run(*inputs)
    return values


def check(function: Callable[..., Tensor], *inputs: Tensor, name: str, num_tables: int) -> None:
    """Hold the recognized rule against the mask that the function returns."""
    node, gm = capture(function, *inputs)
    recognized = recognize_mask(node)
    assert describe(recognized.rule) == name, recognized.rule
    assert len(recognized.tables) == num_tables, recognized.tables
    compare_masks(recognized, values_in(node, gm, inputs), function(*inputs))


def compare_masks(recognized: Recognized, values: dict[fx.Node, Tensor], mask: Tensor) -> None:
    tables = [values[table] for table in recognized.tables]
    num_queries, num_keys = (n if n > 1 else S for n in mask.shape[-2:])
    actual = mask_of(recognized.rule, tables, num_queries, num_keys)
    expected = mask.expand(actual.shape)
    if mask.dtype == torch.bool:
        assert actual.dtype == torch.bool
        assert (actual == expected).all()
    elif actual.dtype == torch.bool:
        # The lowest of finite numbers leaves a pair out, unless a row has nothing else.
        actual = torch.where(actual, 0.0, -torch.inf).to(mask.dtype)
        torch.testing.assert_close(weights_under(actual), weights_under(expected))
    else:
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-6)


def weights_under(mask: Tensor) -> Tensor:
    """Return the weights of attention under a mask that is added to scores, in its dtype."""
    scores = torch.linspace(-1, 1, mask.numel(), dtype=mask.dtype).view(mask.shape)
    return (scores + mask).softmax(-1).nan_to_num(0.0)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [3] * 9 + [4] * 2])
POSITIONS = torch.cat([torch.arange(7), torch.arange(6)])[None].repeat(2, 1)
PADDING = torch.ones(B, S, dtype=torch.long).index_fill(1, torch.tensor([11, 12]), 0)


def causal() -> Tensor:
    return torch.ones(S, T, dtype=torch.bool).tril()


def additive() -> Tensor:
    future = torch.arange(T)[None] > torch.arange(S)[:, None]
    return torch.zeros(S, T).masked_fill(future, float("-inf"))[None, None]


def additive_triu() -> Tensor:
    return torch.triu(torch.full((S, T), float("-inf")), diagonal=1)


def where() -> Tensor:
    q, k = torch.arange(S).view(-1, 1), torch.arange(T).view(1, -1)
    return torch.where((q >= k) & (q - k < 4), 0.0, -torch.inf)


def window() -> Tensor:
    offset = torch.arange(S).unsqueeze(-1) - torch.arange(T)
    return torch.logical_and(offset >= 0, ~(offset > 3))


def windows_in_torch() -> Tensor:
    ones = torch.ones(S, T)
    return (torch.tril(ones) * torch.triu(ones, diagonal=-3)).bool()


def chunked() -> Tensor:
    q, k = torch.arange(S)[:, None], torch.arange(T)[None]
    return (q // 4 == k // 4) & (k <= q)


def prefix() -> Tensor:
    q, k = torch.arange(S)[:, None], torch.arange(T)[None]
    return (k <= q) | (k < 5)


def documents(ids: Tensor) -> Tensor:
    same = ids[:, :, None] == ids[:, None, :]
    return (same & torch.ones(S, T, dtype=torch.bool).tril())[:, None]


def packed(positions: Tensor) -> Tensor:
    """As Hugging Face does it."""
    first = positions[:, :1] - 1
    ids = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    b = torch.arange(B)[:, None, None, None]
    q, k = torch.arange(S)[None, None, :, None], torch.arange(T)[None, None, None, :]
    return (ids[b, q] == ids[b, k]) & (positions[b, k] <= positions[b, q])


def packed_windows(positions: Tensor) -> Tensor:
    b = torch.arange(B)[:, None, None, None]
    q, k = torch.arange(S)[None, None, :, None], torch.arange(T)[None, None, None, :]
    return packed(positions) & (positions[b, k] > positions[b, q] - 4)


def packed_constants() -> Tensor:
    return packed(torch.cat([torch.arange(5), torch.arange(8)])[None].expand(B, -1))


def padding(mask: Tensor) -> Tensor:
    return mask[:, None, None, :].bool()


def inverted_padding(mask: Tensor) -> Tensor:
    inverted = 1.0 - mask[:, None, None, :].to(torch.float32)
    return inverted.masked_fill(inverted.to(torch.bool), float("-inf"))


def additive_and_finite() -> Tensor:
    return torch.where(causal(), 0.0, torch.finfo(torch.float32).min)


def band_and_finite(num_queries: int, num_keys: int) -> Tensor:
    """A band of three; queries far behind the last key see none of it, and so all keys alike."""
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    return torch.where(distance.abs() <= 1, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(8, 4), (4, 8), (8, 8)])
def test_rows_that_see_nothing_but_finite_minima(num_queries: int, num_keys: int) -> None:
    def function() -> Tensor:
        return band_and_finite(num_queries, num_keys)

    node, gm = capture(function, num_queries=num_queries, num_keys=num_keys)
    recognized = recognize_mask(node)
    assert recognized is not None
    assert bool(recognized.rule.bias) == (num_queries > num_keys)
    compare_masks(recognized, values_in(node, gm, ()), function())


def padding_and_finite(mask: Tensor) -> Tensor:
    return (1.0 - mask[:, None, None, :]) * torch.finfo(torch.float32).min


def causal_and_padding(mask: Tensor) -> Tensor:
    return causal()[None, None] & mask.bool()[:, None, None]


def alibi() -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125])
    distance = torch.arange(T)[None] - torch.arange(S)[:, None]
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, float("-inf"))[None]


def learned_slopes(slopes: Tensor) -> Tensor:
    distance = (torch.arange(T)[None] - torch.arange(S)[:, None]).float()
    return slopes[:, None, None] * distance


def everything() -> Tensor:
    return torch.ones(1, 1, S, T, dtype=torch.bool)


def shifted() -> Tensor:
    return torch.ones(S, T, dtype=torch.bool).tril(-3)


@pytest.mark.parametrize(
    ("function", "inputs", "name", "num_tables"),
    [
        (causal, (), "causal", 0),
        (additive, (), "causal", 0),
        (additive_triu, (), "causal", 0),
        (where, (), "causal, window 4", 0),
        (window, (), "causal, window 4", 0),
        (windows_in_torch, (), "causal, window 4", 0),
        (chunked, (), "causal, chunks of 4", 0),
        (prefix, (), "(causal) or (prefix 5)", 0),
        (documents, (DOCUMENTS,), "causal, document equality", 1),
        (packed, (POSITIONS,), "causal, document equality", 1),
        (packed_windows, (POSITIONS,), "causal, window 4, document equality", 1),
        (packed_constants, (), "causal, 2 documents", 0),
        (padding, (PADDING,), "key padding", 1),
        (inverted_padding, (PADDING,), "key padding", 1),
        (additive_and_finite, (), "causal", 0),
        # A row of nothing but padding would see all of it alike: the numbers are kept.
        (padding_and_finite, (PADDING,), "full, bias", 1),
        (causal_and_padding, (PADDING,), "causal, key padding", 1),
        (alibi, (), "causal, ALiBi", 1),
        (learned_slopes, (torch.rand(H),), "full, ALiBi", 1),
        (everything, (), "full", 0),
        (shifted, (), "causal, 3 behind", 0),
    ],
)
def test_masks(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], name: str, num_tables: int
) -> None:
    check(function, *inputs, name=name, num_tables=num_tables)


# --- What was misread once --------------------------------------------------------------------


def queries() -> Tensor:
    return torch.arange(S)[:, None]


def keys() -> Tensor:
    return torch.arange(T)[None]


@torch.library.custom_op("cp_inductor_tests::where", mutates_args=())
def swapped_where(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """An op that has the name of another, and does something else."""
    return torch.where(condition, other, value)


@swapped_where.register_fake
def _(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(condition.shape, value.shape, other.shape)
    return value.new_empty(shape)


def of_documents(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def mask(ids: Tensor) -> Tensor:
        changed = change(ids)
        return (changed[:, :, None] == changed[:, None])[:, None]

    return mask


def ones_in_uint8() -> Tensor:
    return torch.ones(B, S, dtype=torch.uint8).index_fill(1, torch.tensor([11, 12]), 0)


FAR_APART = torch.tensor([[0] * 5 + [256] * 8, [0] * 2 + [3] * 9 + [259] * 2])
NEXT_TO_256 = torch.tensor([[256] * 5 + [257] * 8, [256] * 2 + [258] * 9 + [259] * 2])
AT_THE_END = torch.tensor([[127] * 8 + [3] * 5, [-128] * 5 + [127] * 8], dtype=torch.int8)
END_OF_INT64 = (1 << 63) - 1
AT_THE_END_OF_INT64 = torch.tensor([[END_OF_INT64] * 8 + [3] * 5, [-END_OF_INT64 - 1] * 13])
LONGER = torch.rand(1, 1, S + 9, T + 9, generator=torch.Generator().manual_seed(0)) < 0.5

MISREAD = {
    "arange(2, end=...)": (lambda: torch.arange(2, end=T + 2)[None] <= queries(), ()),
    "minimum(q, other=...)": (
        lambda: keys() <= torch.minimum(queries(), other=torch.full((S, 1), 5)),
        (),
    ),
    "maximum(q, other=...)": (
        lambda: keys() <= torch.maximum(queries(), other=torch.full((S, 1), 5)),
        (),
    ),
    "add(alpha=2)": (lambda: torch.add(keys(), queries(), alpha=2) <= 9, ()),
    "eq(other=...)": (lambda: torch.eq(keys() // 4, other=queries() // 4), ()),
    "meshgrid": (
        lambda: (lambda q, k: k <= q)(
            *torch.meshgrid(torch.arange(S), torch.arange(T), indexing="ij")
        ),
        (),
    ),
    "outer": (
        lambda: torch.outer(torch.arange(S), torch.ones(T, dtype=torch.long)) >= keys(),
        (),
    ),
    "int8 of documents": (of_documents(lambda ids: ids.to(torch.int8)), (FAR_APART,)),
    "bfloat16 of documents": (of_documents(lambda ids: ids.to(torch.bfloat16)), (NEXT_TO_256,)),
    "products of int32": (of_documents(lambda ids: ids.int() * 65536 * 65536), (DOCUMENTS,)),
    "uint8 - 1": (
        lambda m: ((m - 1) < 0)[:, None, None] | (keys() <= queries()),
        (ones_in_uint8(),),
    ),
    "int8 less": (lambda d: (d[:, :, None] < d[:, None])[:, None], (AT_THE_END,)),
    "int64 less": (lambda d: (d[:, :, None] < d[:, None])[:, None], (AT_THE_END_OF_INT64,)),
    "int64 + 1": (lambda d: (d[:, :, None] + 1 > d[:, None])[:, None], (AT_THE_END_OF_INT64,)),
    "not within the greatest": (
        lambda: (queries() - 2 > keys()) | ~(queries() - keys() <= END_OF_INT64),
        (),
    ),
    "a remainder of its greatest": (lambda: keys() % (T - 1) <= queries() % (S - 1), ()),
    "bfloat16 at its limit": (
        lambda ids: (ids.to(torch.bfloat16) <= 256)[:, None, None],
        (NEXT_TO_256,),
    ),
    "a where of one's own": (
        lambda: torch.ops.cp_inductor_tests.where(
            keys() <= queries(), torch.tensor(1.0), torch.tensor(0.0)
        ).bool(),
        (),
    ),
    "counts that wrap": (
        lambda p: (
            of_documents(
                lambda p: (torch.diff(p, prepend=p[:, :1]) != 1).cumsum(1, dtype=torch.int8)
            )(p)
            & (p[:, None, None] <= p[:, None, :, None])
        ),
        (POSITIONS,),
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_what_was_misread_once(name: str) -> None:
    function, inputs = MISREAD[name]
    node, gm = capture(function, *inputs)
    compare_masks(recognize_mask(node), values_in(node, gm, inputs), function(*inputs))


def values_in(
    node: fx.Node, gm: fx.GraphModule, inputs: tuple[Tensor, ...]
) -> dict[fx.Node, Tensor]:
    """Run a graph that was captured with some inputs; return the value of each node."""
    # Dynamo numbers what it takes as it meets it; all else are queries and keys.
    by_shape = {tensor.shape: tensor for tensor in inputs}
    shapes = [p.meta["example_value"].shape for p in gm.graph.find_nodes(op="placeholder")]
    given = [by_shape[shape] if shape in by_shape else torch.randn(shape) for shape in shapes]
    return values_of(node, gm, given)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda buffer: buffer[:, :, :S, :T], "a mask tensor"),
        (lambda buffer: buffer[:, :, :S, :T] & causal(), "causal, a mask tensor"),
        (lambda buffer: buffer[0, :, :S].narrow(-1, 0, T), "a mask tensor"),
        (
            lambda buffer: buffer.float()[..., :S, :T].masked_fill(~causal(), -torch.inf),
            "causal, bias",
        ),
    ],
)
def test_a_slice_of_a_longer_mask_is_a_table(function: Callable[..., Tensor], name: str) -> None:
    """A rank is given its own rows of what is read: it must have a row for every query."""
    node, gm = capture(function, LONGER)
    recognized = recognize_mask(node)
    assert describe(recognized.rule) == name
    (table,) = recognized.tables
    assert table.meta["example_value"].shape[-2:] == (S, T)
    compare_masks(recognized, values_in(node, gm, (LONGER,)), function(LONGER))


def test_a_shifted_slice_is_read_where_it_is() -> None:
    """All ranks read all of it: its rows are not those of queries."""
    node, gm = capture(lambda buffer: buffer[:, :, 4 : S + 4, 9:], LONGER)
    recognized = recognize_mask(node)
    assert not recognized.rule.reads_pairs
    compare_masks(recognized, values_in(node, gm, (LONGER,)), LONGER[:, :, 4 : S + 4, 9:])


def test_ranges_of_products_with_what_may_be_infinite() -> None:
    index, entry = DIMS[0], table(0, is_integer=False)(DIMS[0])
    tables = RunTimeTables(ranges=[(-math.inf, math.inf)])
    assert range_of(index * entry, {index: 5}, tables) == (-math.inf, math.inf)
    tables = RunTimeTables(ranges=[(-math.inf, 0)])
    assert range_of(index * entry, {index: 5}, tables) == (-math.inf, 0)


def test_a_slice_of_longer_padding_is_read_through() -> None:
    longer = torch.ones(B, T + 5, dtype=torch.long)
    node, _ = capture(lambda padding: padding[:, None, None, :T].bool(), longer)
    recognized = recognize_mask(node)
    assert recognized.tables[0].op == "placeholder"
    more = torch.ones(B + 1, T, dtype=torch.long)
    node, _ = capture(lambda padding: padding[:B, None, None].bool(), more)
    # Batch entries may be sharded by another axis of the mesh, so that all must be those of scores.
    (table,) = recognize_mask(node).tables
    assert table.meta["example_value"].shape[0] == B


# --- What cannot be traced --------------------------------------------------------------------


def written_in_a_checkpoint(ids: Tensor) -> Tensor:
    def body(ids: Tensor) -> Tensor:
        ids.add_(torch.arange(S))
        return ids * 2

    ids = ids.clone()
    same = (ids[:, :, None] == ids[:, None])[:, None]
    return same & (checkpoint(body, ids, use_reentrant=False) >= 0)[:, None, None]


def written_through_a_view(ids: Tensor) -> Tensor:
    ids = ids.clone()
    same = ids[:, :, None] == ids[:, None]
    ids.view(-1)[::2].zero_()
    return (same & (ids >= 0)[:, None])[:, None]


def written_by_an_out_argument(ids: Tensor) -> Tensor:
    ids = ids.clone()
    same = ids[:, :, None] == ids[:, None]
    torch.add(ids, 1, out=ids)
    return (same & (ids >= 0)[:, None])[:, None]


@torch.library.custom_op("cp_inductor_tests::clear", mutates_args={"ids"})
def clear(ids: Tensor) -> None:
    """Write, under a name that does not say so."""
    ids.zero_()


def written_by_an_op_of_ones_own(ids: Tensor) -> Tensor:
    ids = ids.clone()
    same = ids[:, :, None] == ids[:, None]
    torch.ops.cp_inductor_tests.clear(ids)
    return (same & (ids >= 0)[:, None])[:, None]


@pytest.mark.parametrize(
    "function",
    [
        written_in_a_checkpoint,
        written_through_a_view,
        written_by_an_out_argument,
        written_by_an_op_of_ones_own,
    ],
)
def test_what_is_written_to_is_no_table(function: Callable[[Tensor], Tensor]) -> None:
    """What a rule reads is read where the attention is, after all that was written until then."""
    node, gm = capture(function, DOCUMENTS)
    recognized = recognize_mask(node)
    values = values_in(node, gm, (DOCUMENTS,))
    compare_masks(recognized, values, function(DOCUMENTS))


def of_a_condition(ids: Tensor) -> Tensor:
    shifted = torch.cond(ids.sum() > 3, lambda x: x + 1, lambda x: x - 1, (ids,))
    return documents(shifted)


def test_what_cannot_be_run_may_write() -> None:
    def fails(tensor: Tensor) -> Tensor:
        raise TypeError

    graph = fx.Graph()
    read, unread = graph.placeholder("read"), graph.placeholder("unread")
    read.meta["example_value"], unread.meta["example_value"] = torch.ones(2), torch.ones(2)
    node = graph.call_function(fails, (read,))
    writes = Writes(graph)
    assert writes.has(read, besides=()) and not writes.has(read, besides=[node])
    assert not writes.has(unread, besides=())


def test_a_higher_order_op_is_a_table() -> None:
    node, gm = capture(of_a_condition, DOCUMENTS)
    recognized = recognize_mask(node)
    assert describe(recognized.rule) == "causal, document equality"
    compare_masks(recognized, values_in(node, gm, (DOCUMENTS,)), of_a_condition(DOCUMENTS))


def written_to() -> Tensor:
    mask = torch.ones(S, T, dtype=torch.bool).tril()
    mask[:, 0] = False
    return mask


def source_written_to(ids: Tensor) -> Tensor:
    ids = ids.clone()
    same = ids[:, :, None] == ids[:, None, :]
    ids.fill_(0)
    return (same & (ids[:, :, None] == 0))[:, None]


def random() -> Tensor:
    return torch.rand(S, T) > 0.5


def sorted_(ids: Tensor) -> Tensor:
    return (torch.argsort(ids, -1)[:, :, None] >= torch.arange(T))[:, None]


def rounded() -> Tensor:
    third = torch.arange(S)[:, None] / 3
    return third >= torch.arange(T)


def wrapped() -> Tensor:
    return (torch.arange(S, dtype=torch.uint8)[:, None] * 100) >= torch.arange(T)


def wrapped_below() -> Tensor:
    return (torch.arange(S, dtype=torch.uint8)[:, None] - 4) >= torch.arange(T)


def from_the_end() -> Tensor:
    table = torch.arange(S) * 2
    return table[torch.arange(S)[:, None] - 6] >= torch.arange(T)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (written_to, ()),
        (source_written_to, (DOCUMENTS,)),
        (random, ()),
        (sorted_, (DOCUMENTS,)),
        (rounded, ()),
        (wrapped, ()),
        (wrapped_below, ()),
        (from_the_end, ()),
    ],
)
def test_what_is_not_understood_is_taken_as_it_is(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    node, gm = capture(function, *inputs)
    recognized = recognize_mask(node)
    # Whatever was claimed, it holds; and something was left to the tensors.
    assert recognized.tables
    values = values_in(node, gm, inputs)
    compare_masks(recognized, values, values[node])


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


def test_a_bias_that_wants_a_gradient() -> None:
    weight = torch.randn(H, S, T, requires_grad=True)

    def function(weight: Tensor) -> Tensor:
        return weight.masked_fill(~causal(), float("-inf"))[None]

    node, _ = capture(function, weight)
    recognized = recognize_mask(node)
    assert recognized.has_bias and recognized.tables[-1] is node
    assert is_of_pairs(recognized.indices[-1])
    assert describe(recognized.rule) == "causal, bias"


# --- Random programs --------------------------------------------------------------------------


class Program:
    """A graph that grows with the tensors that it computes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values = fx.node.map_arg((args, kwargs), lambda node: self.values[node])
        if isinstance(target, str):
            node = self.graph.call_method(target, args, kwargs)
            value = getattr(values[0][0], target)(*values[0][1:], **values[1])
        else:
            node = self.graph.call_function(target, args, kwargs)
            value = target(*values[0], **values[1])
        return self._note(node, value)

    def input(self, value: Tensor) -> fx.Node:
        return self._note(self.graph.placeholder(f"x{len(self.values)}"), value)

    def _note(self, node: fx.Node, value: Tensor) -> fx.Node:
        self.values[node] = node.meta["example_value"] = value
        return node


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, fx.Node]:
    """Index tensors in rows and columns, and what can be computed of them."""
    import operator

    program = Program()
    add = program.add

    def draw_index(is_query: bool) -> fx.Node:
        """A tensor (S, 1) or (1, T), or of every batch entry (B, 1, S, 1) or (B, 1, 1, T)."""
        kind = draw(st.sampled_from(["arange", "arange", "step", "table", "documents", "gather"]))
        if kind == "arange":
            flat = add(torch.arange, S)
        elif kind == "step":
            jumps = draw(st.lists(st.booleans(), min_size=S, max_size=S))
            flat = add(torch.cumsum, add(torch.tensor, jumps), 0)
        elif kind == "table":
            values = draw(st.lists(st.integers(-3, 9), min_size=S, max_size=S))
            flat = program.input(torch.tensor(values))
        elif kind == "gather":
            values = draw(st.lists(st.integers(0, 9), min_size=2 * S, max_size=2 * S))
            source = program.input(torch.tensor(values))
            shift = draw(st.integers(0, S))
            flat = add(operator.getitem, source, add(operator.add, add(torch.arange, S), shift))
        else:
            values = draw(st.lists(st.integers(0, 2), min_size=B * S, max_size=B * S))
            both = program.input(torch.tensor(values).view(B, S))
            where = (
                (slice(None), None, slice(None), None) if is_query else (slice(None), None, None)
            )
            return add(operator.getitem, both, where)
        return add("unsqueeze", flat, -1) if is_query else add(operator.getitem, flat, (None,))

    def draw_number(depth: int) -> fx.Node:
        if depth == 0 or draw(st.booleans()):
            return draw_index(draw(st.booleans()))
        kind = draw(
            st.sampled_from(["add", "sub", "mul", "floordiv", "mod", "neg", "clamp", "where"])
        )
        left = draw_number(depth - 1)
        number = draw(st.integers(1, 6))
        if kind in ("add", "sub"):
            right = draw(st.sampled_from([number, None]))
            function = getattr(operator, kind)
            return add(function, left, draw_number(depth - 1) if right is None else right)
        if kind == "mul":
            return add(operator.mul, left, number - 3)
        if kind in ("floordiv", "mod"):
            return add(getattr(operator, kind), left, number)
        if kind == "neg":
            return add(operator.neg, left)
        if kind == "clamp":
            return add("clamp", left, min=number - 4, max=number + 5)
        return add(torch.where, draw_mask(0), left, number)

    def draw_mask(depth: int) -> fx.Node:
        if depth == 0 or draw(st.booleans()):
            word = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
            right = draw(st.sampled_from(["number", "index"]))
            other = draw(st.integers(-2, S)) if right == "number" else draw_number(1)
            return add(getattr(operator, word), draw_number(1), other)
        kind = draw(
            st.sampled_from(["and_", "or_", "invert", "where", "masked_fill", "cast", "tril"])
        )
        mask = draw_mask(depth - 1)
        if kind == "invert":
            return add(operator.invert, mask)
        if kind == "cast":
            return add("bool", add("to", mask, torch.float32))
        if kind == "tril":
            wide = add(operator.and_, mask, add(torch.ones, S, T, dtype=torch.bool))
            return add("tril", wide, draw(st.integers(-4, 4)))
        other = draw_mask(depth - 1)
        if kind == "where":
            return add(torch.where, mask, other, draw_mask(0))
        if kind == "masked_fill":
            wide = add(operator.or_, mask, add(operator.and_, other, False))
            return add("masked_fill", wide, other, draw(st.booleans()))
        return add(getattr(operator, kind), mask, other)

    mask = draw_mask(2)
    if draw(st.booleans()):
        mask = add(
            "masked_fill", add(torch.zeros, 1, 1, S, T), add("logical_not", mask), -torch.inf
        )
    return program, mask


@pytest.mark.slow
@given(programs())
@settings(max_examples=150, deadline=None)
def test_random_masks(drawn: tuple[Program, fx.Node]) -> None:
    program, node = drawn
    mask = program.values[node]
    if mask.dim() > 4:
        return
    recognized = recognize_mask(node)
    assert isinstance(recognized.rule.allowed, sympy.logic.boolalg.Boolean)
    compare_masks(recognized, program.values, mask)
    text = recognized.rule.format()
    assert " " not in text and Rule.parse(text) == Rule.parse(Rule.parse(text).format())
    again = Recognized(Rule.parse(text), recognized.tables, recognized.indices)
    compare_masks(again, program.values, mask)


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
