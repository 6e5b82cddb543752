"""Random attentions on the ranks of a plan, forward and backward, against float64.

    python -m tests.support.random_attention --count 2000
    python -m tests.support.random_attention --count 500 --seed 7

Ranks are threads of one process, and the two collectives that plans are made of move tensors
between them. Drawn are shapes, dtypes, lengths, ranks, strategies, masks, scales, what is
unusual about the inputs, their strides, and which of them get a gradient. A result is wrong where
it is further off than its dtype's tolerance (`tests/support/reference.py`) of the magnitudes that
it is a sum of, and further than a few times what the same kernel is off on one device.

Some inputs hold NaN. It must be wherever it is on one device and a pair that exists leads to, but
for tiles of few keys, and must not be where no tile leads to: a tile may multiply with 0 what its
mask hides, as the kernel of one device does.

Prints what was drawn, how often, and the first attention that is wrong.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.mask.rule import Rule
from cp_inductor.ops import attention as ops
from cp_inductor.plan import Mask, Recipe, Span, Tile, backward_plan, forward_plan, resolve
from cp_inductor.plan.strategies import TABLE
from cp_inductor.tiles import block_tables, masked_tiles
from cp_inductor.tiles.dims import Tokens
from cp_inductor.tiles.tile_masks import TileMasks
from tests.support.reference import (
    TOLERANCE,
    assert_close,
    assert_within,
    attend,
    attend_with_grads,
    meaning_of,
    repeat_heads,
    run_tile,
    scores_of,
    shard,
    sum_repeats,
    with_grads,
)

# --- Ranks that are threads -------------------------------------------------------------------

DEADLINE_S = 60


class World:
    """Ranks that are threads of this process, and the collectives among them."""

    def __init__(self, size: int) -> None:
        self.size, self.here = size, threading.local()
        self.meeting = threading.Barrier(size, timeout=DEADLINE_S)
        self.sent: list[Sequence[Tensor]] = [()] * size

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function on every rank; return their results, or raise what the first raised."""

        def be(rank: int) -> Any:
            self.here.rank = rank
            try:
                return function(rank)
            except Exception:
                self.meeting.abort()
                raise

        with self._is_here(), ThreadPoolExecutor(self.size) as threads:
            ranks = [threads.submit(be, rank) for rank in range(self.size)]
        errors = [error for rank in ranks if (error := rank.exception())]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors, "ranks wait for each other in vain"
        return [rank.result() for rank in ranks]

    @contextmanager
    def _is_here(self) -> Iterator[None]:
        collectives = torch.ops._c10d_functional
        with (
            mock.patch.object(ops, "agreed", return_value=nullcontext()),
            mock.patch.object(collectives, "all_to_all_single", self.exchange),
            mock.patch.object(collectives, "wait_tensor", lambda tensor: tensor),
        ):
            yield

    def exchange(
        self, buffer: Tensor, received: Sequence[int], sent: Sequence[int], _: str
    ) -> Tensor:
        """Do what all_to_all_single does."""
        rank = self.here.rank
        self.sent[rank] = buffer.split(list(sent))
        self.meeting.wait()
        parts = [parts[rank] for parts in self.sent]
        assert [part.numel() for part in parts] == list(received), "sizes of messages"
        arrived = torch.cat(parts)
        self.meeting.wait()
        return arrived


# --- What is drawn ----------------------------------------------------------------------------

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
STRATEGIES = ("auto", *TABLE, "heads2+blocks", "heads2_own+blocks")
NAMES = ("query", "key", "value", "grad_out")
RESULTS = ("out", "dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Attention:
    """One attention, all of it that is not numbers of tensors; tests say what they change."""

    seed: int = 0
    dtype: str = "float64"
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    seq_len: int = 40
    kv_len: int = 40
    world_size: int = 2
    strategy: str = "rows"
    late: int = 0
    stages: int = 1
    keep: int = 0
    chunks: int = 0
    mask: str = "causal"
    scale: float | None = None
    inputs: str = "normal"
    strides: tuple[str, ...] = ("contiguous",) * 4
    needs_grad: tuple[bool, ...] = (True,) * 3
    has_nan: str | None = None
    dropout_p: float = 0.0  # is not drawn


def an_attention(seed: int) -> Attention:
    """Draw one; what does not go together is refused when it is planned."""
    random = Random(seed)
    num_kv_heads = random.choice([1, 1, 2, 3, 4])
    world_size = random.choice([1, 2, 2, 3, 3, 4, 5])
    seq_len = random.choice([1, 2, 3, 5, 17, 31, 67, 101, 130, 197])
    dtype = random.choice(list(DTYPES))
    kv_len = random.choice([seq_len] * 4 + [1, 4, 23, 90])
    mask = random.choice([*MASKS, "causal", "causal", "full"])
    needs_grad = tuple(random.random() < 0.7 for _ in range(3))
    if mask == "documents":
        kv_len = seq_len
    return Attention(
        seed=seed,
        dtype=dtype,
        batch=random.choice([1, 2, 3]),
        num_heads=num_kv_heads * random.choice([1, 1, 2, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=random.choice([1, 3, 8, 16, 40, 64, 80, 128]),
        seq_len=seq_len,
        kv_len=kv_len,
        world_size=world_size,
        strategy=random.choice(STRATEGIES),
        late=random.choice([0, 0, 1]),
        stages=random.choice([0, 0, 1, 2, 3]),
        keep=random.choice([0, 0, 1]),
        chunks=random.choice([0, 0, 2, 4, 6]),
        mask=mask,
        scale=random.choice([None] * 4 + [0.0, -0.3, 0.3, 1e-6, 30.0]),
        inputs=random.choice([*INPUTS, "normal", "normal"]),
        strides=tuple(random.choice([*STRIDES, "contiguous"]) for _ in NAMES),
        needs_grad=needs_grad if any(needs_grad) else (True, True, True),
        has_nan=random.choice(NAMES) if random.random() < 0.2 else None,
    )


PLAIN = Attention()


Inputs = dict[str, Tensor]


def huge(name: str) -> Callable[[Inputs], object]:
    """One token of it is 100 times as large."""
    return lambda t: t[name][:, :, t[name].shape[2] // 2].mul_(100)


def scale_logits(factor: float) -> Callable[[Inputs], object]:
    return lambda t: (t["query"].mul_(factor**0.5), t["key"].mul_(factor**0.5))


def make_equal(t: Inputs) -> None:
    for tensor in t.values():
        tensor.copy_(tensor[:1, :1, :1, :1].clone().expand_as(tensor))


def sink(t: Inputs) -> None:
    """The first key takes all: its score is 50 of a head dim of 64, that of the others 0."""
    t["query"].zero_()[..., 0] = 20
    t["key"].zero_()[:, :, 0, 0] = 20


def sink_of_a_model(t: Inputs) -> None:
    """The first key takes most, as in trained language models: its score is 12, others' normal."""
    t["query"][..., 0] = 8
    t["key"][..., 0] = 0
    t["key"][:, :, 0, 0] = 12


def copy_itself(t: Inputs) -> None:
    """Each token takes all of itself, or of another one with the same number."""
    length, heads = (min(t[name].shape[dim] for name in ("query", "key")) for dim in (2, 1))
    t["key"][:, :, :length].copy_(t["query"][:, :heads, :length])
    scale_logits(10)(t)


def two_of_grad(t: Inputs) -> None:
    """Under a sink, the gradient has two coordinates."""
    sink(t)
    t["grad_out"][..., 2:] = 0


# What is unusual about the inputs, all of them normal otherwise, (B, H, S, D) in float64.
INPUTS: dict[str, Callable[[Inputs], object]] = {
    "normal": lambda t: None,
    "logits x 10": scale_logits(10),
    "logits x 100": scale_logits(100),
    "sink": sink,
    "sink of a model": sink_of_a_model,
    "each token itself": copy_itself,
    "uniform rows": lambda t: t["query"].zero_(),
    "one huge key": huge("key"),
    "one huge query": huge("query"),
    "one huge value": huge("value"),
    "one huge gradient": huge("grad_out"),
    "equal": make_equal,
    "zeros": lambda t: [tensor.zero_() for tensor in t.values()],
    "zero values": lambda t: t["value"].zero_(),
    "gradient of one": lambda t: t["grad_out"][..., 1:].zero_(),
    "gradient of a sum": lambda t: t["grad_out"].fill_(1),
    "two of a gradient": two_of_grad,
    "no gradient at half": lambda t: t["grad_out"][:, :, ::2].zero_(),
    "tiny gradient": lambda t: t["grad_out"].mul_(1e-6),
}


class Masked(NamedTuple):
    """A rule, the dims of its table among b, h, q, k and d (distances), and how that is drawn."""

    rule: str
    table: str = ""
    draw: Callable[..., Tensor] | None = None
    has_gradient: bool = False


def bits(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) < 0.7


def documents(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) < 0.1).long().cumsum(-1)


def numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


MASKS: dict[str, Masked] = {
    "full": Masked("full"),
    "causal": Masked("causal"),
    "window": Masked("(k-q<=0)&(q-k-9<=0)"),
    "both sides": Masked("(k-q-4<=0)&(q-k-9<=0)"),
    "blind": Masked("(k-q+5<=0)"),
    "nothing": Masked("(k-q+500<=0)"),
    "chunks": Masked("(k-q<=0)&Eq(floor(q/30)-floor(k/30),0)"),
    "prefix": Masked("(k-q<=0)|(k-40<=0)"),
    "two documents": Masked("(k-q<=0)&Eq(Step(q,70)-Step(k,70),0)"),
    "documents": Masked("(k-q<=0)&(Eq(t0(b,q)-t0(b,k),0))", "bk", documents),
    "padding": Masked("Ne(t0(b,k),0)", "bk", bits),
    "table": Masked("Ne(t0(b,h,q,k),0)", "bhqk", bits),
    "causal table": Masked("(k-q<=0)&(Ne(t0(q,k),0))", "qk", bits),
    "distance": Masked("k-q<=0;(k-q)*x0(h)/8", "h", numbers),
    "table of distances": Masked("True;x0(h,k-q+200)", "hd", numbers),
    "bias": Masked("True;x0(h,q,k)", "hqk", numbers),
    "bias, causal": Masked("k-q<=0;x0(b,0,q,k)", "b1qk", numbers, has_gradient=True),
    "learned bias": Masked("True;x0(0,h,q,k)", "1hqk", numbers, has_gradient=True),
}


# --- How tensors lie in memory ----------------------------------------------------------------


def every_second(tensor: Tensor) -> Tensor:
    padded = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
    padded[..., ::2] = tensor
    return padded[..., ::2]


def sliced(tensor: Tensor) -> Tensor:
    b, h, s, d = tensor.shape
    padded = tensor.new_full((b + 1, h + 2, s + 3, d + 1), float("nan"))
    padded[1:, 1:-1, 2:-1, 1:] = tensor
    return padded[1:, 1:-1, 2:-1, 1:]


def expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """Return what repeats the first of a dim, without a copy."""
    return lambda tensor: tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand_as(tensor)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "tokens before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens innermost": lambda t: t.mT.contiguous().mT,
    "features outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second": every_second,
    "sliced": sliced,
    **{f"expanded {dim}": expanded(dim) for dim in range(4)},
}


# --- What is right ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """The tensors of all ranks together, in the order of the sequence.

    Attributes:
        inputs: query, key, value and the gradient of out, rounded to the dtype.
        table: of the mask, (B | 1, H | 1, S | 1, T | 1), or less; None if it has none.
        allowed: (B, H, S, T), which pairs exist.
        bias: (B, H, S, T), float64.
    """

    inputs: tuple[Tensor, ...]
    table: Tensor | None
    allowed: Tensor
    bias: Tensor


def make_whole(case: Attention) -> Whole:
    """Draw the tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, masked = DTYPES[case.dtype], MASKS[case.mask]
    of_queries = (case.batch, case.num_heads, case.seq_len, case.head_dim)
    of_keys = (case.batch, case.num_kv_heads, case.kv_len, case.head_dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in zip(NAMES, shapes, strict=True)
    }
    INPUTS[case.inputs](inputs)
    for name, strides in zip(NAMES, case.strides, strict=True):
        if strides.startswith("expanded"):
            inputs[name] = STRIDES[strides](inputs[name])
    lengths = {"b": case.batch, "h": case.num_heads, "q": case.seq_len, "k": case.kv_len, "1": 1}
    lengths["d"] = 400
    table = None
    if masked.draw:
        table = masked.draw([lengths[letter] for letter in masked.table], generator)
        if table.is_floating_point():
            table = table.to(dtype)
    tables = [] if table is None else [table.double() if table.is_floating_point() else table]
    shape = (case.batch, case.num_heads, case.seq_len, case.kv_len)
    allowed, bias = meaning_of(masked.rule, shape, tables)
    return Whole(
        tuple(
            tensor.to(dtype).expand(shape)
            for tensor, shape in zip(inputs.values(), shapes, strict=True)
        ),
        table,
        allowed,
        bias.double(),
    )


class Exact(NamedTuple):
    """(out, dq, dk, dv, dbias), and the sums of the magnitudes that each number is made of.

    `loss` is by how much more they are off because scores are rounded.
    """

    results: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    loss: float

    @property
    def magnitudes(self) -> list[float]:
        return [self.loss * one.max().item() for one in self.sums]


def attend_exactly(case: Attention, whole: Whole) -> Exact:
    """Attend and differentiate in float64, by the definition."""
    how: dict[str, Any] = {"allowed": whole.allowed, "scale": case.scale}

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attend(q, k, v, bias=bias, **how)

    q, k, v, do = (tensor.double() for tensor in whole.inputs)
    *results, ds = with_grads(run, (q, k, v, whole.bias, do))
    p = scores_of(q, k, bias=whole.bias, **how).softmax(-1).nan_to_num(0.0)
    q, do = q.abs(), do.abs()
    k, v = (repeat_heads(tensor.abs(), case.num_heads) for tensor in (k, v))
    # The last is also what a bias's gradient is.
    terms = p * (do @ v.mT + (p @ v * do).sum(-1, keepdim=True))
    size = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    # What is rounded of a score is an error of its probability.
    worst = (q @ k.mT * size + whole.bias.abs()).max().item()
    loss = 1 + worst * 2.0**-24 / torch.finfo(DTYPES[case.dtype]).eps
    if case.dtype == "float64":
        loss = 1 + worst
    of_keys = (sum_repeats(one, case.num_kv_heads) for one in (terms.mT @ q * size, p.mT @ do))
    sums = (p @ v, terms @ k * size, *of_keys)
    if whole.table is not None and MASKS[case.mask].has_gradient:
        dims = [dim for dim in (0, 1) if whole.table.shape[dim] == 1]
        ds, terms = (tensor.sum(dims, keepdim=True) for tensor in (ds, terms))
    return Exact((*results, ds), (*sums, terms), loss)


def attend_on_one_device(case: Attention, whole: Whole) -> tuple[Tensor, ...]:
    """Return (out, dq, dk, dv) of the kernel that tiles are computed by."""
    is_causal, bias = case.mask == "causal" and case.seq_len == case.kv_len, None
    if not is_causal and case.mask != "full":
        bias = whole.bias.to(DTYPES[case.dtype]).masked_fill(~whole.allowed, -math.inf)
    inputs = [tensor.contiguous() for tensor in whole.inputs]
    how: dict[str, Any] = {"is_causal": is_causal, "scale": case.scale, "bias": bias}
    out, _, *grads = run_tile("flash_cpu", inputs, **how)
    return out, *grads


# --- The ranks --------------------------------------------------------------------------------


def plan_of(case: Attention) -> Recipe:
    """Return the recipe.

    Raises:
        UnsupportedStrategy: the strategy does not fit.
    """
    recipe = Recipe(
        world_size=case.world_size,
        query_length=case.seq_len,
        key_length=case.kv_len,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        itemsize=DTYPES[case.dtype].itemsize,
        rule=Rule.parse(MASKS[case.mask].rule).format(),
        strategy=case.strategy,
        stages=case.stages,
        keep=case.keep,
        chunks=case.chunks,
        late=case.late,
    )
    return resolve(recipe, site=str(case.seed))


def attend_sharded(case: Attention, whole: Whole, recipe: Recipe) -> list[list[Tensor | None]]:
    """Return (out, dq, dk, dv, dbias) of each rank, None what nobody asked for."""
    text, masked = recipe.format(), MASKS[case.mask]

    def run(rank: int) -> list[Tensor | None]:
        *leaves, grad_out = (
            STRIDES[strides](piece_of(tensor, case, rank))
            for tensor, strides in zip(whole.inputs, case.strides, strict=True)
        )
        for leaf, needs_grad in zip(leaves, case.needs_grad, strict=True):
            leaf.requires_grad_(needs_grad)
        extras = [] if whole.table is None else [table_of(whole.table, case, rank)]
        if masked.has_gradient:
            extras[0].requires_grad_()
        seeds = [torch.tensor(case.seed)] if case.dropout_p else []
        how = (text, rank, case.scale, "flash_cpu", "world", case.dropout_p, masked.has_gradient)
        out, _, *kept = ops.attention(*leaves, [*extras, *seeds], *how)
        assert len(kept) <= recipe.keep and not any(tensor.requires_grad for tensor in kept)
        found: list[Tensor | None] = [out.detach()]
        wanted = [tensor for tensor in (*leaves, *extras) if tensor.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad_out))
        for tensor in (*leaves, *extras):
            found.append(next(grads) if tensor.requires_grad else None)
        return found

    return World(case.world_size).run(run)


def piece_of(tensor: Tensor, case: Attention, rank: int) -> Tensor:
    return shard(tensor, rank, case.world_size)


def table_of(table: Tensor, case: Attention, rank: int) -> Tensor:
    """Return what a rank has of a table: all of it; of pairs, its own queries."""
    dims = MASKS[case.mask].table
    if "q" in dims and "k" in dims:
        dim = dims.index("q")
        table = shard(table, rank, case.world_size, dim)
    return table.clone()


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Cut tiles under a mask into blocks of so few queries and keys."""
    with (
        mock.patch.object(block_tables, "BLOCK", size),
        mock.patch.object(masked_tiles, "BLOCK", size),
    ):
        block_tables.cells_without_tables.cache_clear()
        yield
    block_tables.cells_without_tables.cache_clear()


# --- NaN --------------------------------------------------------------------------------------


def plant_nan(case: Attention, whole: Whole) -> Whole:
    """Make one number of one tensor a NaN, or all that are expanded from one."""
    random = Random(case.seed)
    inputs = list(whole.inputs)
    which = NAMES.index(case.has_nan or "")
    tensor, strides = inputs[which].clone(), case.strides[which]
    place: list[int | slice] = [random.randrange(n) for n in tensor.shape]
    if strides.startswith("expanded"):
        place[int(strides[-1])] = slice(None)
    tensor[tuple(place)] = math.nan
    inputs[which] = tensor
    return replace(whole, inputs=tuple(inputs))


def spread_nan(case: Attention, whole: Whole, pairs: Tensor) -> tuple[Tensor, ...]:
    """Return where NaN comes to be in (out, dq, dk, dv), if these pairs are computed."""
    q, k, v, do = (tensor.isnan() for tensor in whole.inputs)
    repeats = case.num_heads // case.num_kv_heads
    k, v = (repeat_heads(tensor, case.num_heads) for tensor in (k, v))

    def through(left: Tensor, right: Tensor) -> Tensor:
        return (left.double() @ right.double()) > 0

    pairs_of = pairs.double()
    blind_q, blind_k = q.any(-1, keepdim=True), k.any(-1, keepdim=True)
    row = (pairs & (blind_q | blind_k.mT)).any(-1, keepdim=True)
    out = row | through(pairs_of, v)
    delta = (out | do).any(-1, keepdim=True)
    ds = pairs & (row | delta | do.any(-1, keepdim=True) | v.any(-1, keepdim=True).mT)
    dq = ds.any(-1, keepdim=True) | through(pairs_of, k)
    dk = ds.any(-2, keepdim=True).mT | through(pairs_of.mT, q)
    dv = (pairs & row).any(-2, keepdim=True).mT | through(pairs_of.mT, do)
    kv_heads = (case.num_kv_heads, repeats)
    dk, dv = (one.expand_as(k).unflatten(1, kv_heads).any(2) for one in (dk, dv))
    return out.expand_as(q), dq.expand_as(q), dk, dv


# Where a tile has fewer, a row of nothing but NaN is one that sees nothing, to the CPU's kernel.
MIN_KEYS = 16


def fewest_keys(case: Attention, recipe: Recipe) -> int:
    """Return of how many keys the smallest tile is."""
    tiles = [tile for stage in forward_plan(recipe).stages for tile in stage.tiles]
    tokens = tokens_of(case, recipe)
    lengths = [sum(int(tokens.of(s, of_keys=True)) for s in tile.keys) for tile in tiles]
    return min(lengths, default=0)


def tokens_of(case: Attention, recipe: Recipe) -> Tokens:
    grid, own = recipe.grid, recipe.grid.own(0)
    return Tokens(grid, *(grid.num_tokens(own, of_keys=of_keys) for of_keys in (False, True)))


def pairs_of_tiles(case: Attention, recipe: Recipe) -> Tensor:
    """Return which pairs some tile computes, (B, H, S, T), be it to mask them."""
    tokens = tokens_of(case, recipe)

    def places(spans: Sequence[Span], *, of_keys: bool) -> Tensor:
        starts = (int(tokens.of(Span(0, span.start), of_keys=of_keys)) for span in spans)
        lengths = (int(tokens.of(span, of_keys=of_keys)) for span in spans)
        parts = zip(starts, lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in parts])

    pairs = torch.zeros(case.batch, case.num_heads, case.seq_len, case.kv_len, dtype=torch.bool)
    plans = (forward_plan(recipe), backward_plan(recipe))
    for tile in (tile for plan in plans for stage in plan.stages for tile in stage.tiles):
        rows, columns = places(tile.queries, of_keys=False), places(tile.keys, of_keys=True)
        pairs[:, tile.heads.start : tile.heads.stop, rows[:, None], columns] = True
    return pairs


# --- Comparing --------------------------------------------------------------------------------


def check(case: Attention) -> str:
    """Hold an attention against what is right; say what kind it was.

    Raises:
        AssertionError: it is wrong.
    """
    try:
        recipe = plan_of(case)
    except UnsupportedStrategy:
        return "refused"
    whole = make_whole(case)
    exact, single = attend_exactly(case, whole), attend_on_one_device(case, whole)
    if case.has_nan:
        check_nan(case, whole, exact, recipe)
        return f"NaN in {case.has_nan}"
    errors = [
        (a.double() - b).abs().max().item() for a, b in zip(single, exact.results[:4], strict=True)
    ]
    for rank, found in enumerate(attend_sharded(case, whole, recipe)):
        for index, actual in enumerate(found):
            if actual is None:
                continue
            part = table_of if index == len(RESULTS) - 1 else piece_of
            expected = part(exact.results[index], case, rank)
            size, error = exact.magnitudes[index], (*errors, 0.0)[index]
            compare(actual, expected, case, size, error, f"{RESULTS[index]} on rank {rank}")
    return case.mask


def keep_of(seed: int, shape: Sequence[int], dropout_p: float) -> Tensor:
    """Return what every probability (B, H, S, T) is multiplied with on one process."""
    batch, num_heads, *lengths = shape
    grid = Recipe(1, *lengths, num_heads, num_heads, 8, 8, "full", chunks=1).grid
    like = torch.empty(batch, num_heads, lengths[0], 8, dtype=torch.float64)
    own = Span(0, 1)
    masks = TileMasks(Rule.parse("full"), Tokens(grid, *lengths), own, (), like)
    tile = Tile(0, (own,), (own,), Span(0, num_heads), Mask.FULL)
    return masks.keep(tile, slice(None), torch.tensor(seed), dropout_p)


def check_plans(case: Attention, plans: Sequence[Mapping[str, Any]]) -> None:
    """Hold out, dq, dk and dv under each of some plans against float64, as far as dtypes round."""
    whole, failures = make_whole(case), list[str]()
    how: dict[str, Any] = {"scale": case.scale, "allowed": whole.allowed, "bias": whole.bias}
    if case.dropout_p:
        how["keep"] = keep_of(case.seed, whole.allowed.shape, case.dropout_p)
    expected = attend_with_grads(*whole.inputs, **how)
    for plan in plans:
        planned = replace(case, **plan)
        try:
            recipe = plan_of(planned)
        except UnsupportedStrategy:
            has_pairs = planned.strategy == "blocks" and {"q", "k"} <= set(MASKS[case.mask].table)
            assert has_pairs or planned.strategy.startswith("heads"), plan
            continue
        try:
            for rank, found in enumerate(attend_sharded(planned, whole, recipe)):
                for name, actual, wanted in zip(RESULTS, found[:4], expected, strict=False):
                    assert actual is not None
                    piece = piece_of(wanted, case, rank)
                    assert_close(actual, piece, DTYPES[case.dtype], f"{name} on rank {rank}")
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{plan}: {error}")
    assert not failures, "\n".join(failures)


def check_nan(case: Attention, whole: Whole, exact: Exact, recipe: Recipe) -> None:
    """Hold where NaN is against where it must be and may be; elsewhere nothing has changed."""
    planted = plant_nan(case, whole)
    reached = spread_nan(case, planted, whole.allowed)
    # It may end on one device, too: times a scale of 0, or where a kernel loses it.
    single = attend_on_one_device(case, planted)
    must = [reaches & one.isnan() for reaches, one in zip(reached, single, strict=True)]
    if fewest_keys(case, recipe) < MIN_KEYS:
        must = [torch.zeros_like(one) for one in must]
    may = spread_nan(case, planted, pairs_of_tiles(case, recipe) | whole.allowed)
    for rank, found in enumerate(attend_sharded(case, planted, recipe)):
        for index, actual in enumerate(found[:-1]):
            if actual is None:
                continue
            what = f"{RESULTS[index]} on rank {rank}"
            is_nan = actual.isnan()
            assert (is_nan | ~piece_of(must[index], case, rank)).all(), f"{what}: lost NaN"
            assert not (is_nan & ~piece_of(may[index], case, rank)).any(), f"{what}: stray NaN"
            is_nan |= piece_of(reached[index], case, rank)
            expected = piece_of(exact.results[index], case, rank).masked_fill(is_nan, 0.0)
            actual = actual.masked_fill(is_nan, 0.0)
            compare(actual, expected, case, exact.magnitudes[index], 0.0, what)


def compare(
    actual: Tensor, expected: Tensor, case: Attention, magnitude: float, error: float, what: str
) -> None:
    """Compare a result that sums up to a magnitude, and has an error on one device."""
    dtype = DTYPES[case.dtype]
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = max(TOLERANCE[dtype] * magnitude + 16 * smallest, 4 * error)
    if expected.numel() and expected.abs().max() > torch.finfo(dtype).max / 2:
        bound = math.inf
    assert actual.dtype == dtype, f"{what}: {actual.dtype}"
    assert_within(actual, expected, bound, what, is_relative=False)


# --- The command ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first attention")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.count):
        case = an_attention(seed)
        try:
            kinds[check(case)] += 1
        except Exception:
            print(f"wrong: {case}")
            raise
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{args.count} attentions: {found}")


if __name__ == "__main__":
    main()
