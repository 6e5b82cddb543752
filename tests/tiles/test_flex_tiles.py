"""Tiles of flex attention: mask, score function and block tables against masks of whole tiles.

The op of flex attention computes in eager, on the CPU and in float64, what its template would. It
ignores the block tables, so these are compared with the mask by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Mask, Span, Tile
from cp_inductor.plan.grid import Grid
from cp_inductor.tiles.aten_kernels import Math
from cp_inductor.tiles.block_tables import list_blocks
from cp_inductor.tiles.dims import Tokens
from cp_inductor.tiles.flex_tiles import FlexCUDA
from cp_inductor.tiles.kernels import Partial, TileCall
from cp_inductor.tiles.tile_masks import TileMasks
from cp_inductor.torch_private.tracing import trace_fake
from tests.support.reference import assert_within

LENGTH, HEADS, KV_HEADS, HEAD_DIM, BATCH = 700, 4, 2, 16, 2

DOCUMENTS = torch.tensor([[0] * 150 + [1] * 300 + [2] * 250, [3] * 699 + [4]])
PADDING = torch.arange(LENGTH)[None] < torch.tensor([[500], [700]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
PAIRS = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3
BIAS = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
BUCKETS = torch.randn(LENGTH, dtype=torch.float64)

RULES = {
    "window": ("(k-q<=0)&(q-k-99<=0)", ()),
    "documents": ("(k-q<=0)&Eq(t0(b,k),t0(b,q))", (DOCUMENTS,)),
    "padding": ("Ne(t0(b,k),0)", (PADDING,)),
    "a slope for each head": ("k-q<=0;x0(h)*(k-q);float32", (SLOPES,)),
    "a mask tensor": ("Ne(t0(q,k),0)", (PAIRS,)),
    "a bias tensor": ("True;x0(h,q,k);float32", (BIAS,)),
    "a table of distances": ("k-q<=0;x0(q-k);float32", (BUCKETS,)),
    "a stretch that every query sees": ("(k-q<=0)|(k-39<=0)", ()),
    "nothing": ("k-q+100000<=0", ()),
    "a soft cap": ("k-q<=0;20*Tanh(s/20)", ()),
    "a temperature and a table": ("k-q-50<=0;s*Power(x0(h),2)+x0(h)*Sigmoid(s)", (SLOPES,)),
    "the head's number": ("k-q+50*h<=0;(k-q)*h;float32", ()),
    "remainders": ("Eq(Mod(q,64),Mod(k,64))", ()),
}


def make(
    text: str,
    tables: tuple[Tensor, ...],
    *,
    has_gaps: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[TileMasks, Tile]:
    """Return the masks of rank 1 of two, and a tile of all but the first KV head."""
    grid = Grid(2, 4, LENGTH, LENGTH)
    own = grid.own(1)
    start = grid.num_tokens(Span(0, own.start), of_keys=False)
    length = grid.num_tokens(own, of_keys=False)
    tokens = Tokens(grid, length, length)
    # A table of pairs holds the rank's own rows.
    cut = [
        table.narrow(-2, start, length) if table.shape[-2:] == (LENGTH, LENGTH) else table
        for table in (table.to(device) for table in tables)
    ]
    like = torch.zeros(BATCH, HEADS, length, HEAD_DIM, dtype=dtype, device=device)
    masks = TileMasks(Rule.parse(text), tokens, own, cut, like)
    queries: tuple[Span, ...] = (own,)
    keys: tuple[Span, ...] = (Span(1, grid.num_chunks),)
    if has_gaps:
        queries = Span(own.start, own.start + 1), Span(own.start + 2, own.stop)
        keys = Span(0, own.start + 1), Span(own.start + 2, grid.num_chunks)
    return masks, Tile(1, queries, keys, Span(2, 4), Mask.PARTIAL)


def make_tensors(masks: TileMasks, tile: Tile) -> tuple[Tensor, ...]:
    geometry = masks.geometry(tile)
    generator = torch.Generator().manual_seed(0)
    num_heads, lengths = len(tile.heads), (geometry.num_queries, geometry.num_keys)
    shapes = [(num_heads, lengths[0]), (1, lengths[1]), (1, lengths[1]), (num_heads, lengths[0])]
    return tuple(
        torch.randn(BATCH, *shape, HEAD_DIM, dtype=torch.float64, generator=generator)
        for shape in shapes
    )


@pytest.mark.parametrize("has_gaps", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_tile_is_that_of_its_mask(name: str, has_gaps: bool) -> None:
    masks, tile = make(*RULES[name], has_gaps=has_gaps)
    query, key, value, grad_out = make_tensors(masks, tile)
    bias = masks.bias(tile, slice(None))
    assert bias is not None
    kernel, call = FlexCUDA(masks.rule, masks.indices(tile)), TileCall(query, key, value, scale=0.3)
    partial = kernel.forward(call)
    change = masks.change(tile, slice(None))
    exact = TileCall(query, key, value, scale=0.3, bias=bias, change=change)
    expected = Math().forward(exact)
    torch.testing.assert_close(partial, expected, check_dtype=False)
    # As in a plan, of whole rows: other tiles have raised the lse.
    whole = Partial(expected.out * 0.7, expected.lse + 0.5)
    grads = kernel.backward(call, grad_out, whole)
    wanted = Math().backward(exact, grad_out, whole)
    torch.testing.assert_close(grads, tuple(wanted[:3]))


def through_inductor(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Trace a function of tensors, compile the graph, and run it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
    gm = trace_fake(function, fakes, select_decomp_table())
    return compile_fx_inner(gm, fakes, is_inference=True)(list(tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_the_templates_on_a_device(name: str, dtype: torch.dtype) -> None:
    masks, tile = make(*RULES[name], dtype=dtype, device="cuda")
    exact, _ = make(*RULES[name])
    tensors = [tensor.to(dtype) for tensor in make_tensors(masks, tile)]
    query, key, value, grad_out = (tensor.double() for tensor in tensors)
    bias = exact.bias(tile, slice(None))
    change = exact.change(tile, slice(None))
    whole_call = TileCall(query, key, value, scale=0.3, bias=bias, change=change)
    expected = Math().forward(whole_call)
    wanted = Math().backward(whole_call, grad_out, expected)
    # What the rule reads is an input of the graph as well.
    given = [*(t.cuda() for t in tensors), expected.out.to(dtype).cuda(), expected.lse.cuda()]
    read = masks.tables

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        query, key, value, grad_out, out, lse, *tables = inputs
        masks.tables = tables
        call = TileCall(query, key, value, scale=0.3)
        kernel = FlexCUDA(masks.rule, masks.indices(tile))
        partial = kernel.forward(call)
        return (*partial, *kernel.backward(call, grad_out, Partial(out, lse.float())))

    out, lse, *grads = through_inductor(run, *given, *read)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close(lse.cpu().double(), expected.lse, rtol=tolerance, atol=tolerance)
    for actual, correct in zip((out, *grads), (expected.out, *wanted[:3]), strict=True):
        assert_within(actual.cpu(), correct, tolerance)


def computed(block_mask: BlockMask, allowed: Tensor, by: str) -> Tensor:
    """Return the pairs that the template computes, given lists of blocks "kv" or "q"."""
    pairs = torch.zeros_like(allowed)
    if by == "q":
        pairs, allowed = pairs.transpose(-1, -2), allowed.transpose(-1, -2)
    counted = torch.zeros(pairs.shape[:2] + tuple(-(-n // 128) for n in pairs.shape[2:]))
    for kind in ("", "full_"):
        number = getattr(block_mask, f"{kind}{by}_num_blocks")
        indices = getattr(block_mask, f"{kind}{by}_indices")
        number = number.expand(*pairs.shape[:2], -1)
        indices = indices.expand(*pairs.shape[:2], -1, -1)
        for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in number.shape)).tolist():
            for column in indices[b, h, row, : number[b, h, row]].tolist():
                counted[b, h, row, column] += 1
                rows = slice(row * 128, row * 128 + 128)
                columns = slice(column * 128, column * 128 + 128)
                block = allowed[b, h, rows, columns]
                pairs[b, h, rows, columns] = block if kind == "" else True
    assert counted.max() <= 1
    return pairs.transpose(-1, -2) if by == "q" else pairs


@pytest.mark.parametrize("has_gaps", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_the_blocks_hold_the_pairs(name: str, has_gaps: bool) -> None:
    masks, tile = make(*RULES[name], has_gaps=has_gaps)
    indices = masks.indices(tile)
    lengths = (indices.geometry.num_queries, indices.geometry.num_keys)
    allowed = indices.evaluate(masks.rule.allowed).expand(BATCH, len(tile.heads), *lengths)
    block_mask = FlexCUDA(masks.rule, masks.indices(tile)).block_mask(has_columns=True)
    for by in ("kv", "q"):
        assert torch.equal(computed(block_mask, allowed, by), allowed)


@pytest.mark.parametrize("name", ["documents", "window", "the head's number"])
@pytest.mark.parametrize("has_columns", [False, True])
def test_the_op_that_lists_blocks_keeps_its_word(name: str, has_columns: bool) -> None:
    """Fakes have the sizes and strides of what it returns."""
    masks, tile = make(*RULES[name])
    indices = masks.indices(tile)
    how = (Rule(masks.rule.allowed).format(), indices.geometry.encode(), BATCH, torch.float64)
    arguments = (masks.like, indices.tables, *how, has_columns)
    torch.library.opcheck(list_blocks, arguments, test_utils=("test_schema", "test_faketensor"))
    assert len(list_blocks(*arguments)) == (8 if has_columns else 4)
