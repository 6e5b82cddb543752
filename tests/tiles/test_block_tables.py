"""Block tables against all pairs, and the tiles that are computed by them against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from cp_inductor.mask.language import BATCH
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles import block_tables, masked_tiles
from cp_inductor.tiles.block_tables import block_table, make_block_table
from cp_inductor.tiles.masked_tiles import masked_tile, masked_tile_backward
from cp_inductor.tiles.tile_masks import Geometry, Indices, Runs
from tests.support.random_attention import STRIDES, blocks_of
from tests.support.random_masks import cells_of_pairs
from tests.support.reference import TOLERANCE, assert_all_close, attend_with_grads, make_qkv

LARGE = 1 << 62
LEAST, MOST = -(1 << 63), (1 << 63) - 1


def geometry_of(queries: Runs, keys: Runs, num_heads: int = 2, first_head: int = 0) -> Geometry:
    """Return a tile that tables hold where it is in the sequence; of pairs, they hold its rows."""
    rows, length = [], 0
    for start, stop in queries:
        rows.append((length, length + stop - start))
        length += stop - start
    heads = (first_head, first_head + num_heads)
    return Geometry(heads, queries, keys, tuple(rows))


def indices_of(
    geometry: Geometry, tables: list[Tensor], batch: int = 2, dtype: torch.dtype = torch.float32
) -> Indices:
    return Indices(geometry, tables, batch, dtype, torch.device("cpu"))


@pytest.fixture(params=[1, 3, 8])
def block(request: pytest.FixtureRequest) -> Iterator[int]:
    """Blocks of a few tokens: many of them in a small tile."""
    with blocks_of(request.param):
        yield request.param


# --- Tables against pairs ---------------------------------------------------------------------

# Queries that end in a short block, and keys with a gap in the middle of one.
QUERIES, KEYS = ((5, 26),), ((2, 9), (17, 33))
LENGTH = 33


def pick(values: list[Any], *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(len(values) + sum(shape))
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), shape, generator=generator)]


ENDS = [LEAST, LEAST + 1, -LARGE - 1, -LARGE, -1, 0, 1, LARGE, LARGE + 1, MOST - 1, MOST]
# Neighbours that are one number as float64.
NEAR = [LARGE, LARGE + 1, LARGE + 2]
SPECIAL = [math.nan, -math.inf, math.inf, 0.1, -0.1, 0.0, 1e38, -1e38, 3e38]

RULES: list[tuple[str, list[Tensor]]] = [
    ("(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)", [pick(NEAR, 2, LENGTH)]),
    ("Eq(t0(b,q)-t0(b,k),0)", [pick(ENDS, 2, LENGTH)]),
    ("Ne(t0(q)-t0(k),0)", [pick(NEAR, LENGTH).sort().values]),
    ("t0(q)-t0(k)<=0", [pick(ENDS, LENGTH)]),
    ("t0(q)-t0(k)+1<=0", [pick(ENDS, LENGTH)]),
    (f"t0(k)-{LARGE + 1}<=0", [pick(NEAR, LENGTH)]),
    (f"Eq(t0(k),{MOST})", [pick([MOST - 1, MOST], LENGTH)]),
    ("Max(t0(q),t0(k))-Min(t0(k),k)<=0", [pick(ENDS, LENGTH)]),
    ("(k-q<=0)&Ne(t0(b,k),0)", [pick([True, False], 2, LENGTH, dtype=torch.bool)]),
    ("Ne(t0(b,h,q,k),0)", [pick([True, True, False], 2, 2, 21, LENGTH, dtype=torch.bool)]),
    ("Ne(t0(q,k),0)|(k-q<=0)", [pick([1, 0], 21, LENGTH, dtype=torch.uint8)]),
    ("x0(k)-x1(q)<=0", [pick(SPECIAL, LENGTH, dtype=torch.float32)] * 2),
    ("~(x0(k)-x1(q)<=0)", [pick(SPECIAL, LENGTH, dtype=torch.float64)] * 2),
    ("x0(k)<=0.1", [pick([0.1, 0.2], LENGTH, dtype=torch.float32)]),
    ("x0(k)>=0.1", [pick([0.1, 0.05], LENGTH, dtype=torch.bfloat16)]),
    ("~(x0(k)*x0(q)-x0(k)<=q)", [pick(SPECIAL, LENGTH, dtype=torch.float32)]),
    ("Ne(x0(k),x0(q))", [pick([math.nan, 0.5, 0.5], LENGTH, dtype=torch.float16)]),
    ("k*0.1-x0(q)<=0", [pick([0.3, 1.2, 2.4], LENGTH, dtype=torch.float32)]),
    ("k-t0(b,h)<=0", [pick([3, 9, 20], 2, 2)]),
    ("k-t0(b,floor(q/4))<=0", [pick([30, 31, 32], 2, 9)]),
    (f"t0(b,floor(q/4))-{LARGE + 1}<=0", [pick(NEAR, 2, 9)]),
    # Strictly less, where the greatest of a block is the least of another.
    ("t0(k)-t0(q)+1<=0", [torch.arange(4, LENGTH + 4) // 8]),
    # 3 * 0.3 is not 3 * bfloat16(0.3).
    ("x0(k)*0.3-0.9<=0", [pick([3.0, 3.0], LENGTH, dtype=torch.bfloat16)]),
    ("Eq(Mod(q,5)-Mod(k,5),0)", []),
    ("Eq(floor(q/8)-floor(k/8),0)&(k-q<=0)", []),
    ("Piecewise((q,k<=9),(t0(k),True))-20<=0", [pick([0, 19, 20, 21], LENGTH)]),
    ("Step(k,20)*t0(b,q)-3<=0", [pick([0, 3, 4], 2, LENGTH)]),
    ("(b+q-k<=0)&(h-1<=0)", []),
    ("True", []),
    ("k-q<=0;x0(h)*(k-q)", [pick([1.0, 0.5], 2, dtype=torch.float32)]),
]


@pytest.mark.parametrize(("text", "tables"), RULES, ids=[text for text, _ in RULES])
def test_tables_against_pairs(text: str, tables: list[Tensor], block: int) -> None:
    """Interval arithmetic is never wrong, and the op is exact."""
    rule, indices = Rule.parse(text), indices_of(geometry_of(QUERIES, KEYS), tables)
    bounded = make_block_table(rule, indices)
    allowed = indices.evaluate(rule.allowed).expand(*bounded.shape[:2], 21, 23)
    exact = cells_of_pairs(allowed, block)
    if rule.bias:
        exact[exact == Cell.FULL] = Cell.PARTIAL
    is_open = bounded == Cell.PARTIAL
    assert torch.equal(bounded[~is_open], exact[~is_open])
    if tables:
        batch = 2 if BATCH in rule.allowed.free_symbols else 1
        arguments = (tables, text, indices.geometry.encode(), batch, torch.float32)
        assert torch.equal(block_table(*arguments), exact)
        is_computed = torch.rand(exact.shape[2:]) < 0.5
        chosen = torch.where(is_computed, exact, Cell.EMPTY)
        assert torch.equal(block_table(*arguments, is_computed), chosen)
        torch.library.opcheck(block_table, arguments, test_utils=("test_schema", "test_faketensor"))


# --- Tiles against float64 --------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A tile under a rule."""

    text: str
    draw: Callable[[], list[Tensor]]
    queries: Runs = ((100, 381),)
    keys: Runs = ((0, 381),)
    shape: tuple[int, int, int] = (2, 4, 2)  # batch, heads, KV heads
    first_head: int = 0


def ids(batch: int = 2, length: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(batch, length, generator=generator) < 0.03).long().cumsum(-1) + LARGE


def bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4


TILES = {
    "documents": Tile("(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)", lambda: [ids()]),
    "documents of all": Tile("(k-q<=0)&Eq(t0(q)-t0(k),0)", lambda: [ids()[0]], shape=(3, 2, 1)),
    "unsorted": Tile("Eq(t0(b,q)-t0(b,k),0)", lambda: [ids()[:, torch.randperm(400)]]),
    "window": Tile("(k-q<=0)&(q-k-140<=0)", list),
    "two runs of keys": Tile("((k-q<=0)&(q-k-50<=0))|(k-9<=0)", list, ((250, 400),), ((0, 400),)),
    "gaps": Tile("(k-q<=0)&(q-k-100<=0)", list, ((20, 90), (300, 370)), ((0, 90), (200, 370))),
    "heads": Tile("k-q-50*h+x0(h)<=0", lambda: [torch.tensor([1.0, 90.0, 9.0, 300.0, 0.0, 0.0])]),
    "other heads": Tile("k-q-40*h+100<=0", list, first_head=2),
    "pairs": Tile("Ne(t0(b,h,q,k),0)", lambda: [bits(2, 4, 281, 400)]),
    "bias of heads": Tile("k-q<=0;(k-q)*x0(h)", lambda: [torch.tensor([0.5, 0.1, 0.01, 0.0])]),
    "bias of entries": Tile("k-q<=0;x0(b,k)", lambda: [torch.rand(2, 400)]),
    "bias, no mask": Tile("True;x0(0,0,q,k);float32", lambda: [torch.rand(1, 1, 281, 400)]),
    "blind rows": Tile("k-q+200<=0", list),
    "nothing": Tile("k-q+2000<=0", list),
    "everything": Tile("k-q-2000<=0", list),
    "a short last block": Tile("(k-q<=0)&(k-260<=0)", list, ((100, 230),), ((0, 130),)),
    "fewer keys than a vector": Tile("k-q<=0", list, ((0, 40),), ((0, 7),)),
    "one pair": Tile("k-q<=0", list, ((3, 4),), ((3, 4),)),
}


LAYOUTS = ("contiguous", "tokens before heads", "tokens innermost", "sliced")


def make_tile(
    tile: Tile, dtype: torch.dtype, *, is_empty: bool = False
) -> tuple[Geometry, list[Tensor], tuple[Any, ...]]:
    """Return where a tile is, its tensors, and what else the ops take; of no entries if empty."""
    batch, num_heads, num_kv_heads = tile.shape
    geometry = geometry_of(tile.queries, tile.keys, num_heads, tile.first_head)
    shape = {"batch": batch, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    whole = make_qkv(geometry.num_queries, kv_len=geometry.num_keys, dtype=dtype, **shape)
    tables, encoded, cells = tile.draw(), geometry.encode(), None
    if is_empty:
        batch, whole = 0, tuple(tensor[:0] for tensor in whole)
        tables = [table[:0] if table.ndim == 4 or len(table) == 2 else table for table in tables]
    if tables:
        of_batch = batch if BATCH in Rule.parse(tile.text).allowed.free_symbols else 1
        cells = block_table(tables, tile.text, encoded, of_batch, dtype)
    return geometry, list(whole), (cells, tables, tile.text, encoded, 0.3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TILES)
def test_tiles_against_float64(name: str, dtype: torch.dtype) -> None:
    tile = TILES[name]
    rule, (batch, num_heads, _) = Rule.parse(tile.text), tile.shape
    geometry, whole, how = make_tile(tile, dtype)
    cells, tables, _, _, scale = how
    places = range(len(name), len(name) + 4)
    query, key, value, grad_out = (
        STRIDES[LAYOUTS[place % 4]](tensor) for tensor, place in zip(whole, places, strict=True)
    )
    before = counters["cp_inductor"]["blocks_computed"]
    out, lse = masked_tile(query, key, value, *how)
    computed = counters["cp_inductor"]["blocks_computed"] - before
    grads = masked_tile_backward(grad_out, query, key, value, out, lse, *how)

    indices = indices_of(geometry, tables, batch, dtype)
    allowed = indices.evaluate(rule.allowed).expand(
        batch, num_heads, geometry.num_queries, geometry.num_keys
    )
    bias = indices.as_tensor(indices.evaluate(rule.bias)) if rule.bias else torch.zeros(())
    if not rule.is_wide:
        bias = bias.to(dtype)
    bias = bias.double().expand(allowed.shape)
    expected = attend_with_grads(*whole, scale=scale, allowed=allowed, bias=bias)
    wide = torch.promote_types(dtype, torch.float32)
    assert [one.dtype for one in (out, *grads)] == [dtype, dtype, wide, wide]
    assert_all_close((one.to(dtype) for one in (out, *grads)), expected, dtype)
    assert torch.equal(lse == -math.inf, ~allowed.any(-1))
    # Nothing is computed but blocks that hold a pair, and of what is alike once for all.
    of_cells = cells_of_pairs(allowed, block_tables.BLOCK) != Cell.EMPTY
    by_entry = BATCH in rule.allowed.free_symbols
    by_head = (cells is not None and cells.shape[1] > 1) or "h" in tile.text.split(";")[0]
    of_cells = of_cells if by_entry else of_cells[:1]
    assert computed == int((of_cells if by_head else of_cells[:, :1]).sum())


@pytest.mark.parametrize("name", ["documents", "window", "heads"])
def test_fakes_are_as_the_tiles(name: str) -> None:
    _, (query, key, value, grad_out), how = make_tile(TILES[name], torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(masked_tile, (query, key, value, *how), test_utils=tests)
    of_tile = (query, key, value, *masked_tile(query, key, value, *how))
    torch.library.opcheck(masked_tile_backward, (grad_out, *of_tile, *how), test_utils=tests)


@pytest.mark.parametrize("name", ["documents", "heads", "pairs", "window", "bias of entries"])
def test_a_batch_without_entries(name: str) -> None:
    _, tensors, how = make_tile(TILES[name], torch.float32, is_empty=True)
    query, key, value, grad_out = tensors
    out, lse = masked_tile(query, key, value, *how)
    grads = masked_tile_backward(grad_out, query, key, value, out, lse, *how)
    for actual, like in zip((out, *grads), (query, query, key, value), strict=True):
        assert actual.shape == like.shape
    assert lse.shape == query.shape[:3]


def test_a_short_last_block_keeps_nan() -> None:
    """The kernel takes a row of NaN for one that sees nothing, if it has fewer than 16 keys."""
    geometry = geometry_of(((128, 140),), ((0, 130),), num_heads=1).encode()
    query, key, value, _ = make_qkv(12, kv_len=130, batch=1, num_heads=1)
    query[:, :, 3] = math.nan
    out, lse = masked_tile(query, key, value, None, [], "k-128>=0", geometry, 0.3)
    is_nan = torch.zeros(12, dtype=torch.bool)
    is_nan[3] = True
    assert torch.equal(lse.isnan()[0, 0], is_nan)
    assert torch.equal(out.isnan().any(-1)[0, 0], is_nan)


class Largest(TorchDispatchMode):
    """Notes the most numbers that an op returned in one tensor."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op."""
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numbers = max(
                    self.numbers, tensor.untyped_storage().nbytes() // tensor.itemsize
                )
        return result


@pytest.mark.parametrize("text", ["(k-q<=0)&(q-k-200<=0)", "k-q<=0;(k-q)*x0(h)"])
def test_no_tensor_grows_with_queries_times_keys(text: str) -> None:
    largest = []
    for length in (2048, 4096):
        geometry = geometry_of(((0, length),), ((0, length),), num_heads=2).encode()
        query, key, value, grad_out = make_qkv(length, batch=1, num_heads=2, head_dim=8)
        tables = [torch.tensor([0.1, 0.2])] if "x0" in text else []
        cells = block_table(tables, text, geometry, 1, torch.float32) if tables else None
        how = (cells, tables, text, geometry, 0.3)
        with (
            mock.patch.object(block_tables, "MAX_BLOCKS", 16),
            mock.patch.object(masked_tiles, "MAX_BIAS", 1 << 18),
            Largest() as mode,
        ):
            # Behind the op, ops inside are not seen.
            out, lse = masked_tile._init_fn(query, key, value, *how)
            masked_tile_backward._init_fn(grad_out, query, key, value, out, lse, *how)
        largest.append(mode.numbers)
    assert largest[1] <= 2 * largest[0] < length * length


# --- Graphs -----------------------------------------------------------------------------------


def test_constants_are_in_the_dtype_of_the_attention() -> None:
    """Padding as models write it: in float32, the lowest float64 would be -oo, and 0 * -oo NaN."""
    keep = torch.tensor([[1, 1, 0, 1, 0]])
    distance = torch.arange(5) - torch.arange(5)[:, None]
    lowest = torch.finfo(torch.float64).min
    runs = ((0, 5),)
    indices = indices_of(geometry_of(runs, runs), [keep], 1, torch.float64)
    for text, expected in (
        (f"{-lowest!r}*t0(b,k)-{-lowest!r}", (1 - keep[:, None, None]).double() * lowest),
        ("0.1*(k-q)", distance[None, None] * torch.tensor(0.1, dtype=torch.float64)),
    ):
        found = indices.evaluate(Rule.parse(f"True;{text}").bias)
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-16)
