"""Execute a plan that the batch decides: tiles gather the rows that numbers name.

    stage 0     tile of rows 1, 2, 5, ... x rows 1, 2, 9, ...    gathered from the rank's own rows
    stage 1     the same from its own rows and those that stage 1 fetched

It is to `cp_inductor.run.view_executor` what `plan_batch` is to a recipe. There, the plan is known
when the graph is compiled, and a graph is one rank's part of it. Here, the graph has a fixed number
of stages and no rank: which rows a stage fetches, which blocks a tile computes, and which partial
results make up a row, it reads from numbers that `plan_batch` made of the batch. All ranks run the
same code, for all batches and lengths.

Tokens are rows, (batch entry, local token, group of heads). A tile gathers the rows that it reads,
block by block, and the rule is on rows as well: see `cp_inductor.mask.rows`.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim,
n rows. A group of heads has H / groups and G / groups of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_inductor.graph.collectives import WAIT
from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS, unpack
from cp_inductor.mask.language import BATCH, HEAD
from cp_inductor.mask.rows import Column, rule_of_rows
from cp_inductor.plan.batch import groups_of_heads
from cp_inductor.plan.batch_chunks import BLOCK
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.batch_tables import Kind, Part, Side
from cp_inductor.run.attention import Attention
from cp_inductor.run.batch_parts import ROWS_OF_RESULTS, TILE_TABLES, layout_of
from cp_inductor.run.row_pool import Pool, cat_behind
from cp_inductor.run.stages import run_stages
from cp_inductor.tiles.combine import combine_stack, sum_stack
from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.tiles.kernels import AnyScale, Kernel, Partial, TileCall
from cp_inductor.tiles.stand_in import delta_of, make_stand_in, make_words
from cp_inductor.tiles.tile_masks import Geometry, Indices
from cp_inductor.torch_private.sizes import note_hint, size_hint


def attend(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor]
) -> list[Tensor]:
    """Attend by the plan of a batch; see `cp_inductor.ops.attention.run_forward`."""
    executor = GatherExecutor(attention, query, key, extras)
    rows = executor.rows
    own = {Side.QUERY: [rows(query)], Side.KEY: [rows(key), rows(value)]}
    executor.run(Direction(own, own, dict.fromkeys(Side, _as_they_are), _attend))
    return executor.combine()


def differentiate(
    attention: Attention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Sequence[Tensor],
) -> list[Tensor]:
    """Differentiate by the plan of a batch; see `cp_inductor.ops.attention.run_backward`."""
    executor = GatherExecutor(attention, query, key, extras)
    rows, takes_delta = executor.rows, executor.kernel.takes_delta
    words = rows(delta_of(out, grad_out) if takes_delta else make_words(out, grad_out))
    of_keys, rest = [*map(rows, (key, value))], [*map(rows, (lse, query, grad_out))]
    sent, read, arrive = [words, *rest], [words, *rest], dict.fromkeys(Side, _as_they_are)
    if not takes_delta:
        # The kernel wants out. For the rows of other ranks, something stands in for it.
        read[0], arrive[Side.QUERY] = rows(out), _with_stand_in
    executor.run(
        Direction(
            own={Side.QUERY: read, Side.KEY: of_keys},
            sent={Side.QUERY: sent, Side.KEY: of_keys},
            arrive=arrive,
            compute=_differentiate,
        )
    )
    return [*executor.sum(Side.QUERY), *executor.sum(Side.KEY)]


def empty_like_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what a result is laid out like: the heads of a token are next to each other."""
    b, h, s, *rest = like.shape
    return like.new_empty((b, s, h, *rest), dtype=dtype or like.dtype).transpose(1, 2)


def _as_they_are(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows


def _with_stand_in(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    words, lse, query, grad_out = rows
    return [make_stand_in(words, grad_out), lse, query, grad_out]


# --- A tile -----------------------------------------------------------------------------------


# From a kernel, the scale, and the rows that a tile reads of queries and of keys, to what it
# computed for these: rows of tensors.
Compute = Callable[
    [Kernel, float | None, Sequence[Tensor], Sequence[Tensor]], dict[Side, list[Tensor]]
]


def _attend(
    kernel: Kernel, scale: float | None, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> dict[Side, list[Tensor]]:
    out, lse = kernel.forward(_call(scale, of_queries[0], *of_keys))
    return {Side.QUERY: [_rows(lse), _rows(out)]}


def _differentiate(
    kernel: Kernel, scale: float | None, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> dict[Side, list[Tensor]]:
    out_or_delta, lse, query, grad_out = of_queries
    call, wanted = _call(scale, query, *of_keys), _heads(grad_out)
    if kernel.takes_delta:
        delta = _heads(out_or_delta)
        dq, dk, dv = kernel.backward_by_delta(call, wanted, _heads(lse), delta)
    else:
        whole = Partial(_heads(out_or_delta), _heads(lse))
        dq, dk, dv = kernel.backward(call, wanted, whole)
    return {Side.QUERY: [_rows(dq)], Side.KEY: [_rows(dk), _rows(dv)]}


def _call(scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> TileCall:
    """Return the call for rows (n, H, D), (m, G, D)."""
    return TileCall(_heads(query), _heads(key), _heads(value), False, scale)


def _heads(rows: Tensor) -> Tensor:
    """(n, H, ...) -> (1, H, n, ...)."""
    return rows.unsqueeze(0).transpose(1, 2)


def _rows(tensor: Tensor) -> Tensor:
    """(1, H, n, ...) -> (n, H, ...)."""
    return tensor.transpose(1, 2).flatten(0, 1)


# --- The rank ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Direction:
    """Forward or backward.

    Attributes:
        own: of each side, what tiles read of the rank's own rows, (n, ...) each.
        sent: what is sent of these.
        arrive: makes of what arrived what tiles read.
        compute: a tile.
    """

    own: Mapping[Side, Sequence[Tensor]]
    sent: Mapping[Side, Sequence[Tensor]]
    arrive: Mapping[Side, Callable[[Sequence[Tensor]], Sequence[Tensor]]]
    compute: Compute


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """Rows that are arriving, and what was sent."""

    message: Tensor
    like: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        """Wait, and return the rows of each tensor."""
        return unpack(WAIT(self.message), self.like)


class GatherExecutor:
    """What a rank does of each stage of its batch's plan; see `cp_inductor.run.stages.StageWork`.

    Args:
        attention: what is computed.
        query, key: this rank's shards; nothing is read of them but shapes, dtype and device.
        extras: tables of the rule; sizes and numbers of `plan_batch`.
    """

    direction: Direction

    def __init__(
        self, attention: Attention, query: Tensor, key: Tensor, extras: Sequence[Tensor]
    ) -> None:
        *tables, self.sizes, self.numbers = extras
        self.attention = attention
        self.kernel = KERNELS[attention.kernel].under_rule
        self.layout = layout_of(attention.source.stages, attention.group_name)
        heads = int(query.shape[1]), int(key.shape[1])
        world_size, of_nodes = self.layout.world_size, attention.nodes
        nodes = Nodes.parse(of_nodes) if of_nodes else None
        self.num_groups = groups_of_heads(attention.rule, *heads, world_size, nodes)
        self.rule = rule_of_rows(attention.source.rule, self.num_groups)
        numbered = sorted(attention.rule.tables)
        self.tables = dict(zip(numbered, tables, strict=True))
        self.shapes = {Side.QUERY: query.shape, Side.KEY: key.shape}
        self.dtype, self.device = query.dtype, query.device

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, H, S, ...) -> (B S groups, H / groups, ...)."""
        return tensor.transpose(1, 2).unflatten(2, (self.num_groups, -1)).flatten(0, 2)

    def run(self, direction: Direction) -> None:
        """Run all stages of a direction."""
        self.direction = direction
        self.pools = {side: Pool(own) for side, own in direction.own.items()}
        self.computed: dict[Side, list[Sequence[Tensor]]] = defaultdict(list)
        self.came_home: dict[Side, list[Sequence[Tensor]]] = defaultdict(list)
        run_stages(self)

    # --- The work of a stage ------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """How many stages there are; the first and the last fetch and send home nothing."""
        return self.layout.last + 1

    def start_fetch(self, stage: int) -> dict[Side, ArrivingRows]:
        """Start what a stage fetches."""
        return self._start(Kind.SEND, stage, self.direction.sent)

    def end_fetch(self, stage: int, fetching: dict[Side, ArrivingRows]) -> None:
        """Wait for it, and add it to the pools."""
        for side, arriving in fetching.items():
            self.pools[side].add(self.direction.arrive[side](arriving.wait()))

    def compute(self, stage: int) -> None:
        """Compute the tile of a stage."""
        parts = {side: Part(Kind.TILE, side, stage) for side in Side}
        places = map(self.layout.place, (*parts.values(), Part(Kind.CELLS, Side.QUERY, stage)))
        *of_sides, is_computed = TILE_TABLES(self.numbers, self.sizes, *places)
        rows = dict(zip(Side, of_sides, strict=True))
        for side in Side:
            self._expect(rows[side], parts[side])
        read = {side: self.pools[side].gather(rows[side].select(1, 0)) for side in Side}
        how = (self.rule.rule, self._indices(rows), self.attention.kernel_options, is_computed)
        kernel, scale = AnyScale(self.kernel(*how)), self.attention.scale
        results = self.direction.compute(kernel, scale, read[Side.QUERY], read[Side.KEY])
        for side, found in results.items():
            self.computed[side].append(found)

    def start_home(self, stage: int) -> dict[Side, ArrivingRows]:
        """Start to send home what the tile of a stage computed for other ranks."""
        return self._start(Kind.HOME, stage, {side: of[-1] for side, of in self.computed.items()})

    def end_home(self, homeward: dict[Side, ArrivingRows] | None) -> None:
        """Wait for results of own rows that others computed."""
        for side, arriving in (homeward or {}).items():
            self.came_home[side].append(arriving.wait())

    def _start(
        self, kind: Kind, stage: int, sent: Mapping[Side, Sequence[Tensor]]
    ) -> dict[Side, ArrivingRows]:
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
            ranks = self.layout.world_size, self.attention.group_name
            message = EXCHANGE_ROWS(outgoing, self.numbers, self.sizes, *places, *ranks)
            self._expect(message, part)
            started[side] = ArrivingRows(message, outgoing)
        return started

    def _expect(self, found: Tensor, part: Part) -> None:
        """Note how many rows a tensor is likely to have: half of the own rows are moved."""
        shape = self.shapes[part.side]
        rows = size_hint(shape[0]) * size_hint(shape[2]) * self.num_groups
        if part.kind is Kind.TILE:
            rows = max(BLOCK, rows // 2 // BLOCK * BLOCK)
        else:
            rows = 2 if part.kind is Kind.SUM else max(BLOCK, rows // 2)
        note_hint(found.shape[0], rows)

    # --- The rule ---------------------------------------------------------------------------

    def _indices(self, rows: dict[Side, Tensor]) -> Indices:
        lengths = [rows[side].shape[0] for side in Side]
        queries, keys = (((0, length),) for length in lengths)
        heads = (0, int(self.shapes[Side.QUERY][1]) // self.num_groups)
        geometry = Geometry(heads, queries, keys, queries)
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

    def combine(self) -> list[Tensor]:
        """Combine partial results of own queries."""
        lses, outs = self._results(Side.QUERY)
        # In a row that no tile computed, nothing was seen.
        which = self._rows_of_results(Side.QUERY)
        lse, out = cat_behind(lses, -float("inf"))[which], cat_behind(outs)[which]
        whole_out, whole_lse = (
            self._as_shard(rows, Side.QUERY) for rows in combine_stack(out, lse)
        )
        return [whole_out.to(self.dtype), whole_lse]

    def sum(self, side: Side) -> list[Tensor]:
        """Sum up gradients of own queries, or of own keys and values."""
        which = self._rows_of_results(side)
        parts_of = self._results(side)
        together = (sum_stack(cat_behind(parts)[which]).to(self.dtype) for parts in parts_of)
        return [self._as_shard(total, side) for total in together]

    def _results(self, side: Side) -> list[tuple[Tensor, ...]]:
        """Return, of each tensor, the rows of all tiles and of all that came home, in order."""
        return [*zip(*self.computed[side], *self.came_home[side], strict=True)]

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
