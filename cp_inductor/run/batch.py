"""Attention by a plan that the batch decides: the op pair, and the one description behind it.

    forward     start fetch 1 . own tile . [wait . start fetch s + 1 . tile s . start home s] ...
                . own tile . wait . combine
    backward    the same; what goes home are gradients

It is to `cp_inductor.run.execute` what `plan_batch` is to a recipe. There, the plan is known when
the graph is compiled, and a graph is one rank's part of it. Here, the graph has a fixed number of
stages and no rank: which rows a stage fetches, which blocks a tile computes, and which partial
results make up a row, it reads from numbers that `plan_batch` made of the batch. All ranks run the
same code, for all batches and lengths.

Tokens are rows, (batch entry, local token, group of heads). A tile gathers the rows that it reads,
block by block, and the rule is on rows as well: see `cp_inductor.mask.rows`. The eager kernels call
the functions below on tensors, and `lower_attention` traces them.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim,
n rows. A group of heads has H / groups and G / groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cp_inductor.graph.collectives import WAIT
from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS, unpack
from cp_inductor.mask.language import BATCH, HEAD
from cp_inductor.mask.rows import Column, rule_of_rows
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import groups_of_heads
from cp_inductor.plan.batch_chunks import BLOCK
from cp_inductor.plan.batch_tables import Kind, Layout, Part, Side
from cp_inductor.run.batch_parts import ROWS_OF_RESULTS, TILE_TABLES, layout_of
from cp_inductor.tiles.combine import accumulation_dtype, combine_stack, sum_stack
from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.tiles.kernels import AnyScale, Partial, RuleKernel, TileCall
from cp_inductor.tiles.stand_in import fold_lse_gradient, make_stand_in, make_words
from cp_inductor.tiles.tile_masks import Geometry, Indices
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.sizes import is_known, note_hint, size_hint


@dataclass(frozen=True, slots=True)
class BatchAttention:
    """Everything about one attention by a plan of its batch, but its tensors.

    Attributes:
        rule_text: of the rule.
        stages: that fetch.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: see `cp_inductor.tiles.kernel_table.choose_kernel`.
        group_name: c10d name of the process group behind the sequence axis.
        kernel_options: for the templates of tiles under a mask on CUDA; see `FlexCUDA`.
    """

    rule_text: str
    stages: int
    scale: float | None
    kernel: str
    group_name: str
    kernel_options: str = ""

    @property
    def rule(self) -> Rule:
        """Which pairs exist."""
        return Rule.parse(self.rule_text)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op pair that say this."""
        how = (self.rule_text, self.stages, self.scale, self.kernel, self.group_name)
        return (*how, self.kernel_options)

    @property
    def layout(self) -> Layout:
        """Which parts a plan has."""
        return layout_of(self.stages, self.group_name)

    @property
    def under_rule(self) -> type[RuleKernel]:
        """What computes tiles."""
        return KERNELS[self.kernel].under_rule


@torch.library.custom_op("cp_inductor::batch_attention", mutates_args=())
def batch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: list[Tensor],
    sizes: Tensor,
    numbers: Tensor,
    rule: str,
    stages: int,
    scale: float | None,
    kernel: str,
    group_name: str,
    kernel_options: str,
) -> list[Tensor]:
    """Attend from this rank's queries to the keys of all ranks, by a plan of `plan_batch`.

    Args:
        query: (B, H, S, D), this rank's shard.
        key, value: (B, G, T, D), this rank's shards.
        tables: what the rule reads, whole.
        sizes, numbers: of `plan_batch`.
        rule, stages, scale, kernel, group_name, kernel_options: see `BatchAttention`.

    Returns:
        out (B, H, S, D) in the dtype of query, and lse (B, H, S).
    """
    this = BatchAttention(rule, stages, scale, kernel, group_name, kernel_options)
    return run_batch_forward(this, query, key, value, *tables, sizes, numbers)


@batch_attention.register_fake
def _(query: Tensor, *args: Any) -> list[Tensor]:
    return [_of_rows(query), _of_rows(query[..., 0], accumulation_dtype(query))]


@torch.library.custom_op("cp_inductor::batch_attention_backward", mutates_args=())
def batch_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    sizes: Tensor,
    numbers: Tensor,
    rule: str,
    stages: int,
    scale: float | None,
    kernel: str,
    group_name: str,
    kernel_options: str,
) -> list[Tensor]:
    """Differentiate `batch_attention`: [dq, dk, dv], shaped as they are."""
    this = BatchAttention(rule, stages, scale, kernel, group_name, kernel_options)
    tensors = (grad_out, query, key, value, out, lse)
    return run_batch_backward(this, *tensors, *tables, sizes, numbers)


@batch_attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> list[Tensor]:
    return [_of_rows(tensor) for tensor in (query, key, value)]


def _of_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor in which the heads of a token are next to each other."""
    b, h, s, *rest = like.shape
    return like.new_empty((b, s, h, *rest), dtype=dtype or like.dtype).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, tables, sizes, numbers, *ctx.arguments = inputs
    ctx.save_for_backward(query, key, value, *output, sizes, numbers, *tables)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, out, lse, sizes, numbers, *tables = ctx.saved_tensors
    grad_out, grad_lse = grads
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        out, grad_out = fold_lse_gradient(out, grad_out, grad_lse)
    tensors = (query, key, value, out, lse, tables, sizes, numbers)
    dq, dk, dv = batch_attention_backward(grad_out, *tensors, *ctx.arguments)
    return dq, dk, dv, [None] * len(tables), None, None, *[None] * len(ctx.arguments)


run_uncompiled(_backward)
batch_attention.register_autograd(_backward, setup_context=_setup_context)


FORWARD: Any = torch.ops.cp_inductor.batch_attention.default
BACKWARD: Any = torch.ops.cp_inductor.batch_attention_backward.default


# What a rank computes, only the batch says. This is what it does of causal attention.
@register_flop_formula(torch.ops.cp_inductor.batch_attention)
def _flops(query: torch.Size, key: torch.Size, *args: Any, **kwargs: Any) -> int:
    batch, heads, length, head_dim = query
    return 2 * batch * heads * length * key[2] * head_dim


@register_flop_formula(torch.ops.cp_inductor.batch_attention_backward)
def _backward_flops(
    grad_out: torch.Size, query: torch.Size, key: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return 5 * _flops(query, key) // 2


# --- What both directions do ------------------------------------------------------------------


def run_batch_forward(this: BatchAttention, *tensors: Tensor) -> list[Tensor]:
    """Attend; takes query, key, value, the tables, sizes and numbers of `batch_attention`."""
    query, key, value, *tables, sizes, numbers = tensors
    rank = _Rank(this, query, key, tables, sizes, numbers)
    own = {Side.QUERY: [rank.rows(query)], Side.KEY: [rank.rows(key), rank.rows(value)]}
    arrive = dict.fromkeys(Side, _as_they_are)
    return rank.run(_Direction(own, own, arrive, _attend, {Side.QUERY: rank.combine}))


def run_batch_backward(this: BatchAttention, *tensors: Tensor) -> list[Tensor]:
    """Differentiate; takes the tensors of `batch_attention_backward`."""
    grad_out, query, key, value, out, lse, *tables, sizes, numbers = tensors
    rank = _Rank(this, query, key, tables, sizes, numbers)
    takes_delta = this.under_rule.takes_delta
    words = rank.rows(_delta(out, grad_out) if takes_delta else make_words(out, grad_out))
    of_keys, rest = [*map(rank.rows, (key, value))], [*map(rank.rows, (lse, query, grad_out))]
    sent, read, arrive = [words, *rest], [words, *rest], dict.fromkeys(Side, _as_they_are)
    if not takes_delta:
        # The kernel wants out. For the rows of other ranks, something stands in for it.
        read[0], arrive[Side.QUERY] = rank.rows(out), _with_stand_in
    return rank.run(
        _Direction(
            own={Side.QUERY: read, Side.KEY: of_keys},
            sent={Side.QUERY: sent, Side.KEY: of_keys},
            arrive=arrive,
            compute=_differentiate,
            results={Side.QUERY: rank.sum_queries, Side.KEY: rank.sum_keys},
        )
    )


def _as_they_are(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows


def _with_stand_in(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    words, lse, query, grad_out = rows
    return [make_stand_in(words, grad_out), lse, query, grad_out]


def _delta(out: Tensor, grad_out: Tensor) -> Tensor:
    dtype = accumulation_dtype(out)
    return (out.to(dtype) * grad_out.to(dtype)).sum(-1)


def _rows(tensor: Tensor) -> Tensor:
    """(1, H, n, ...) -> (n, H, ...)."""
    return tensor.transpose(1, 2).flatten(0, 1)


# From a rank, its tile, and the rows that the tile reads of queries and of keys, to what it
# computed for these: rows of tensors.
Compute = Callable[["_Rank", "_Tile", Sequence[Tensor], Sequence[Tensor]], dict[Side, list[Tensor]]]


# Of each tensor of results, the rows of all tiles and of all that came home, in order.
Results = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class _Direction:
    """Forward or backward.

    Attributes:
        own: of each side, what tiles read of the rank's own rows, (n, ...) each.
        sent: what is sent of these.
        arrive: makes of what arrived what tiles read.
        compute: a tile.
        results: of each side that has any, what makes the rank's own part of them.
    """

    own: Mapping[Side, Sequence[Tensor]]
    sent: Mapping[Side, Sequence[Tensor]]
    arrive: Mapping[Side, Callable[[Sequence[Tensor]], Sequence[Tensor]]]
    compute: Compute
    results: Mapping[Side, Callable[[Results], list[Tensor]]]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows that a stage computes with.

    Attributes:
        kernel: computes it.
        scale: of the scores.
    """

    kernel: AnyScale
    scale: float | None

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> TileCall:
        """Return the call for rows (n, H, D), (m, G, D)."""
        return TileCall(_heads(query), _heads(key), _heads(value), False, self.scale)


def _heads(rows: Tensor) -> Tensor:
    """(n, H, ...) -> (1, H, n, ...)."""
    return rows.unsqueeze(0).transpose(1, 2)


def _attend(
    rank: _Rank, tile: _Tile, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> dict[Side, list[Tensor]]:
    out, lse = tile.kernel.forward(tile.call(of_queries[0], *of_keys))
    return {Side.QUERY: [_rows(lse), _rows(out)]}


def _differentiate(
    rank: _Rank, tile: _Tile, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> dict[Side, list[Tensor]]:
    out_or_delta, lse, query, grad_out = of_queries
    call, wanted = tile.call(query, *of_keys), _heads(grad_out)
    if rank.this.under_rule.takes_delta:
        delta = _heads(out_or_delta)
        dq, dk, dv = tile.kernel.backward_by_delta(call, wanted, _heads(lse), delta)
    else:
        whole = Partial(_heads(out_or_delta), _heads(lse))
        dq, dk, dv = tile.kernel.backward(call, wanted, whole)
    return {Side.QUERY: [_rows(dq)], Side.KEY: [_rows(dk), _rows(dv)]}


class _Rank:
    """One rank's tensors and numbers.

    Args:
        this: the attention.
        query, key: this rank's shards; nothing is read of them but shapes, dtype and device.
        tables: of the rule.
        sizes, numbers: of `plan_batch`.
    """

    def __init__(
        self,
        this: BatchAttention,
        query: Tensor,
        key: Tensor,
        tables: Sequence[Tensor],
        sizes: Tensor,
        numbers: Tensor,
    ) -> None:
        self.this, self.layout = this, this.layout
        heads = int(query.shape[1]), int(key.shape[1])
        self.num_groups = groups_of_heads(this.rule, *heads, self.layout.world_size)
        self.rule = rule_of_rows(this.rule_text, self.num_groups)
        numbered = sorted(this.rule.tables)
        self.tables = dict(zip(numbered, tables, strict=True))
        self.sizes, self.numbers = sizes, numbers
        self.shapes = {Side.QUERY: query.shape, Side.KEY: key.shape}
        self.dtype, self.device = query.dtype, query.device

    def _expect(self, found: Tensor, part: Part) -> None:
        """Note how many rows a tensor is likely to have: half of the own rows are moved."""
        shape = self.shapes[part.side]
        rows = size_hint(shape[0]) * size_hint(shape[2]) * self.num_groups
        if part.kind is Kind.TILE:
            rows = max(BLOCK, rows // 2 // BLOCK * BLOCK)
        else:
            rows = 2 if part.kind is Kind.SUM else max(BLOCK, rows // 2)
        note_hint(found.shape[0], rows)

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, H, S, ...) -> (B S groups, H / groups, ...)."""
        return tensor.transpose(1, 2).unflatten(2, (self.num_groups, -1)).flatten(0, 2)

    def run(self, direction: _Direction) -> list[Tensor]:
        """Run all stages, and return the results of both sides."""
        pools = {side: _Pool(own) for side, own in direction.own.items()}
        found: dict[Side, list[Sequence[Tensor]]] = {side: [] for side in direction.results}
        came_home: dict[Side, list[Sequence[Tensor]]] = {side: [] for side in direction.results}
        homeward: dict[Side, _Arriving] = {}
        fetching: dict[Side, _Arriving] = {}
        for stage in range(self.layout.last + 1):
            for side, arriving in fetching.items():
                pools[side].add(direction.arrive[side](arriving.wait()))
            fetching = self._start(Kind.SEND, stage + 1, direction.sent)
            results = self._compute(stage, direction, pools)
            for side, arriving in homeward.items():
                came_home[side].append(arriving.wait())
            homeward = self._start(Kind.HOME, stage, results)
            for side, rows in results.items():
                found[side].append(rows)
        assert not homeward and not fetching, "the last stage fetches nothing and keeps its results"
        together: list[Tensor] = []
        for side, finish in direction.results.items():
            together += finish([*zip(*found[side], *came_home[side], strict=True)])
        return together

    def _start(
        self, kind: Kind, stage: int, sent: Mapping[Side, Sequence[Tensor]]
    ) -> dict[Side, _Arriving]:
        """Start the exchanges of a stage, if it has any."""
        if not 1 <= stage <= self.layout.stages:
            return {}
        started = {}
        for side, tensors in sent.items():
            part = Part(kind, side, stage)
            # The CPU's tiles sum up gradients of keys in float32; what is sent of them is rounded.
            is_rounded = kind is Kind.HOME and side is Side.KEY
            outgoing = [tensor.to(self.dtype) for tensor in tensors] if is_rounded else [*tensors]
            places = self.layout.place(part), self.layout.place_of_rows(part)
            ranks = self.layout.world_size, self.this.group_name
            message = EXCHANGE_ROWS(outgoing, self.numbers, self.sizes, *places, *ranks)
            self._expect(message, part)
            started[side] = _Arriving(message, outgoing)
        return started

    def _compute(
        self, stage: int, direction: _Direction, pools: Mapping[Side, _Pool]
    ) -> dict[Side, list[Tensor]]:
        parts = {side: Part(Kind.TILE, side, stage) for side in Side}
        places = map(self.layout.place, (*parts.values(), Part(Kind.CELLS, Side.QUERY, stage)))
        *of_sides, is_computed = TILE_TABLES(self.numbers, self.sizes, *places)
        rows = dict(zip(Side, of_sides, strict=True))
        for side in Side:
            self._expect(rows[side], parts[side])
        read = {side: pools[side].gather(rows[side].select(1, 0)) for side in Side}
        tile = self._tile(is_computed, rows)
        return direction.compute(self, tile, read[Side.QUERY], read[Side.KEY])

    # --- The rule ---------------------------------------------------------------------------

    def _tile(self, is_computed: Tensor, rows: dict[Side, Tensor]) -> _Tile:
        how = (self.rule.rule, self._indices(rows), self.this.kernel_options, is_computed)
        return _Tile(AnyScale(self.this.under_rule(*how)), self.this.scale)

    def _indices(self, rows: dict[Side, Tensor]) -> Indices:
        lengths = [rows[side].shape[0] for side in Side]
        queries, keys = (((0, length),) for length in lengths)
        heads = (0, int(self.shapes[Side.QUERY][1]) // self.num_groups)
        geometry = Geometry(heads, queries, keys, queries, keys, queries)
        return Indices(geometry, self._columns(rows), batch=1, dtype=self.dtype, device=self.device)

    def _columns(self, rows: dict[Side, Tensor]) -> list[Tensor]:
        """Return the tables of the rule on rows."""
        lanes = {side: rows[side].select(1, 1) for side in Side}
        positions = {side: rows[side].select(1, 2) for side in Side}
        # Rows without a token read what any other reads; they are in no pair. Their position is 0.
        entries = {side: lane.clamp(min=0) for side, lane in lanes.items()}
        if self.num_groups > 1:
            entries = {side: lane // self.num_groups for side, lane in entries.items()}
        read = [self._column(column, entries, positions) for column in self.rule.columns]
        return [*lanes.values(), *positions.values(), *read]

    def _column(
        self, column: Column, entries: Mapping[Side, Tensor], positions: Mapping[Side, Tensor]
    ) -> Tensor:
        table = self.tables[column.number]
        if column.side is None:
            return table
        side = Side.KEY if str(column.side) == "k" else Side.QUERY
        where = list(column.where)
        for dim in reversed(range(len(where))):
            if where[dim].is_Integer:
                table = table.select(dim, int(where.pop(dim)))
        if HEAD in where:
            heads = where.index(HEAD)
            table = table.movedim(heads, 0)
            where.pop(heads)
        at = [entries[side] if symbol == BATCH else positions[side] for symbol in where]
        index = [None, *at] if column.has_heads else at
        found: Tensor = torch.ops.aten.index.Tensor(table, index)
        return found

    # --- Results ----------------------------------------------------------------------------

    def _rows_of_results(self, side: Side) -> Tensor:
        """Return the rows of results that make up own rows, (n, own rows)."""
        shape, part = self.shapes[side], Part(Kind.SUM, side)
        own = shape[0] * shape[2] * self.num_groups
        found: Tensor = ROWS_OF_RESULTS(self.numbers, self.sizes, self.layout.place(part), own)
        self._expect(found, part)
        return found

    def _as_shard(self, rows: Tensor, side: Side) -> Tensor:
        """(B S groups, H / groups, ...) -> (B, H, S, ...)."""
        batch, _, length, _ = self.shapes[side]
        by_group = rows.unflatten(0, (batch, length, self.num_groups))
        return by_group.flatten(2, 3).transpose(1, 2)

    def combine(self, results: Results) -> list[Tensor]:
        """Combine partial results of own queries."""
        lses, outs = results
        # Of a row of nothing, nothing was seen.
        which = self._rows_of_results(Side.QUERY)
        lse, out = _cat(lses, -float("inf"))[which], _cat(outs)[which]
        whole_out, whole_lse = (
            self._as_shard(rows, Side.QUERY) for rows in combine_stack(out, lse)
        )
        return [whole_out.to(self.dtype), whole_lse]

    def sum_queries(self, results: Results) -> list[Tensor]:
        """Sum up gradients of own queries."""
        return self._sum(results, Side.QUERY)

    def sum_keys(self, results: Results) -> list[Tensor]:
        """Sum up gradients of own keys and values."""
        return self._sum(results, Side.KEY)

    def _sum(self, results: Results, side: Side) -> list[Tensor]:
        which = self._rows_of_results(side)
        together = (sum_stack(_cat(parts)[which]).to(self.dtype) for parts in results)
        return [self._as_shard(total, side) for total in together]


class _Pool:
    """Rows that a rank has: of zeros, its own, and those that arrived, of several tensors.

    Args:
        own: (n, ...) each, the rank's own rows.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        self.parts: list[Sequence[Tensor]] = [own]
        self.together: list[Tensor] | None = None

    def add(self, arrived: Sequence[Tensor]) -> None:
        """Add rows behind those that are there."""
        self.parts.append(arrived)
        self.together = None

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Return some rows, in that order; of row 0, zeros."""
        own = self.parts[0]
        if len(self.parts) == 1 and not is_known(own[0].shape[0] == 0):
            # Own rows alone are not copied before they are gathered.
            at = (rows - 1).clamp(min=0)
            is_row = rows > 0
            return [_only(tensor.index_select(0, at), is_row) for tensor in own]
        if self.together is None:
            self.together = [_cat(parts) for parts in zip(*self.parts, strict=True)]
        return [tensor.index_select(0, rows) for tensor in self.together]


def _only(tensor: Tensor, is_row: Tensor) -> Tensor:
    """Put zeros in all rows but some."""
    return torch.where(is_row.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


def _cat(parts: Sequence[Tensor], first: float = 0.0) -> Tensor:
    """Return a row of a number, and the parts behind it, in their widest dtype."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    row = parts[0].new_full((1, *parts[0].shape[1:]), first, dtype=dtype)
    return torch.cat([row, *(part.to(dtype) for part in parts)])


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Rows that are arriving, and what was sent."""

    message: Tensor
    like: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        """Wait, and return the rows of each tensor."""
        return unpack(WAIT(self.message), self.like)
