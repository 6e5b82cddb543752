"""Rows of a plan that the batch decides: its parts are tables of rows, which are gathered.

    stage 0     tile of rows 1, 2, 5, ... x rows 1, 2, 9, ...    gathered from the rank's own rows
    stage 1     the same from its own rows and those that stage 1 fetched

The graph has a fixed number of stages and no rank: which rows a stage fetches, which blocks a tile
computes, and which partial results make up a row, it reads from numbers that `plan_batch` made of
the batch. All ranks run the same code, for all batches and lengths.

Tokens are rows, (batch entry, local token, group of heads). A tile gathers the rows that it reads,
block by block, and the rule is on rows as well: see `rule_of_rows`. A pool has, of each
tensor, a row of zeros, the rank's own, and behind them what each stage fetched.

How many rows there are, a graph learns when it runs: to the compiler, these sizes are symbols that
only the data binds. They are chosen so that nothing depends on them but loops: rows of tiles come
in blocks of 128 and are never none.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim,
n rows. A group of heads has H / groups and G / groups of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.graph.collectives import WAIT
from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS, read_part, unpack
from cp_inductor.mask.language import BATCH, HEAD, KEY, number_of
from cp_inductor.mask.rule import Column, rule_of_rows
from cp_inductor.plan import Payload
from cp_inductor.plan.batch import groups_of_heads
from cp_inductor.plan.batch_cells import BLOCK
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.batch_tables import COLUMNS, ROW_COLUMNS, Kind, Layout, Part, Side
from cp_inductor.run.attention import Attention, PerBatch
from cp_inductor.run.merge import Tensors, merge_stack
from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.tiles.kernels import Kernel, TileCall
from cp_inductor.tiles.stand_in import delta_of, make_stand_in, make_words
from cp_inductor.tiles.tile_masks import Geometry, Indices
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import is_known, new_size, note_hint, size_hint

# Tensors of rows, by name. Those of a wider dtype come first, as messages have them.
Named = dict[str, Tensor]


class Pool:
    """Rows (n, ...) that a rank has, of several tensors: of zeros, its own, and what arrived."""

    def __init__(self, own: Named) -> None:
        self.parts, self.together = [own], Named()

    def add(self, arrived: Named) -> None:
        """Add rows behind those that are there."""
        self.parts.append(arrived)
        self.together = {}

    def gather(self, rows: Tensor) -> Named:
        """Return some rows, in that order; of row 0, zeros."""
        own = self.parts[0]
        if len(self.parts) == 1 and not is_known(next(iter(own.values())).shape[0] == 0):
            # Own rows alone are not copied before they are gathered.
            at = (rows - 1).clamp(min=0)
            is_row = rows > 0
            return {
                name: torch.where(is_row.view(-1, *[1] * (of.ndim - 1)), of.index_select(0, at), 0)
                for name, of in own.items()
            }
        if not self.together:
            self.together = {name: cat_behind([p[name] for p in self.parts]) for name in own}
        return {name: tensor.index_select(0, rows) for name, tensor in self.together.items()}


def cat_behind(parts: Sequence[Tensor], first: float = 0.0) -> Tensor:
    """Return a row of one number, and the parts behind it, in their widest dtype."""
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    row = parts[0].new_full((1, *parts[0].shape[1:]), first, dtype=dtype)
    return torch.cat([row, *(part.to(dtype) for part in parts)])


@dataclass(frozen=True, slots=True)
class RowTile:
    """The tile of a stage: which rows it reads, and which of its blocks it computes."""

    rows: dict[Side, Tensor]
    is_computed: Tensor


# Rows that are arriving, and what was sent, by side.
Arriving = Mapping[Side, tuple[Tensor, Named]]


class Tables:
    """What a rank has of its batch's plan, from what `run_forward` takes; see there.

    In the backward, `begin_backward` has to follow.
    """

    def __init__(
        self, attention: Attention, shards: Tensors, extras: Tensors, *, is_backward: bool
    ) -> None:
        query, key, value = shards
        *tables, self.sizes, self.numbers = extras
        source = attention.source
        assert isinstance(source, PerBatch)
        self.attention = attention
        self.kernel = KERNELS[attention.kernel].under_rule
        self.layout = layout_of(source.stages, attention.group_name)
        self.num_stages = self.layout.last + 1  # the first and the last fetch and send nothing
        heads = int(query.shape[1]), int(key.shape[1])
        nodes = Nodes.parse(source.nodes) if source.nodes else None
        self.num_groups = groups_of_heads(attention.rule, *heads, self.layout.world_size, nodes)
        self.rule, self.columns = rule_of_rows(source.rule, self.num_groups)
        self.tables = dict(zip(sorted(attention.rule.tables), tables, strict=True))
        self.shapes = {Side.QUERY: query.shape, Side.KEY: key.shape}
        self.dtype, self.device = query.dtype, query.device
        self.kept: list[Tensor] = []
        self.computed: dict[Side, list[Named]] = defaultdict(list)
        self.came_home: dict[Side, list[Named]] = defaultdict(list)
        self.sent = {
            Side.QUERY: {"query": self._rows(query)},
            Side.KEY: {"key": self._rows(key), "value": self._rows(value)},
        }
        self.pools = {} if is_backward else {side: Pool(own) for side, own in self.sent.items()}

    def begin_backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, kept: Sequence[Tensor]
    ) -> None:
        """Put at hand what is differentiated: <out, grad_out> for a kernel that takes it."""
        takes_delta, of_queries = self.kernel.takes_delta, self.sent[Side.QUERY]
        words = self._rows(delta_of(out, grad_out) if takes_delta else make_words(out, grad_out))
        rest = {"lse": self._rows(lse), **of_queries, "grad_out": self._rows(grad_out)}
        self.sent[Side.QUERY] = {"out": words, **rest}
        own = {"out": words if takes_delta else self._rows(out), **rest}
        self.pools = {Side.QUERY: Pool(own), Side.KEY: Pool(self.sent[Side.KEY])}

    def _rows(self, tensor: Tensor) -> Tensor:
        """(B, H, S, ...) -> (B S groups, H / groups, ...)."""
        return tensor.transpose(1, 2).unflatten(2, (self.num_groups, -1)).flatten(0, 2)

    # --- Exchanges --------------------------------------------------------------------------

    def start_fetch(self, stage: int) -> Arriving:
        """Start what a stage fetches."""
        return self._start(Kind.SEND, stage, self.sent)

    def end_fetch(self, stage: int, fetching: Arriving) -> None:
        """Wait for it, and add it to the pools."""
        for side, (message, sent) in fetching.items():
            rows = unpack(WAIT(message), sent)
            if "out" in rows and not self.kernel.takes_delta:
                # The kernel wants out. For the rows of other ranks, something stands in for it.
                rows["out"] = make_stand_in(rows["out"], rows["grad_out"])
            self.pools[side].add(rows)

    def start_home(self, stage: int) -> Arriving:
        """Start to send home what the tile of a stage computed for other ranks."""
        return self._start(Kind.HOME, stage, {side: of[-1] for side, of in self.computed.items()})

    def end_home(self, homeward: Arriving | None) -> None:
        """Wait for results of own rows that others computed."""
        for side, (message, sent) in (homeward or {}).items():
            self.came_home[side].append(unpack(WAIT(message), sent))

    def _start(self, kind: Kind, stage: int, sent: Mapping[Side, Named]) -> Arriving:
        """Start the exchanges of a stage, if it has any."""
        if not 1 <= stage <= self.layout.stages:
            return {}
        started = {}
        for side, tensors in sent.items():
            part = Part(kind, side, stage)
            if kind is Kind.HOME and side is Side.KEY:
                # The CPU's tiles sum up gradients of keys in float32; what is sent is rounded.
                tensors = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
            places = self.layout.place(part), self.layout.place_of_rows(part)
            ranks = self.layout.world_size, self.attention.group_name
            outgoing = [*tensors.values()]
            message = EXCHANGE_ROWS(outgoing, self.numbers, self.sizes, *places, *ranks)
            self._expect(message, part)
            started[side] = message, tensors
        return started

    def _expect(self, counted: Tensor, part: Part) -> None:
        """Note how many rows a tensor is likely to have: half of the own rows are moved."""
        shape = self.shapes[part.side]
        rows = size_hint(shape[0]) * size_hint(shape[2]) * self.num_groups
        if part.kind is Kind.TILE:
            rows = max(BLOCK, rows // 2 // BLOCK * BLOCK)
        else:
            rows = 2 if part.kind is Kind.SUM else max(BLOCK, rows // 2)
        note_hint(counted.shape[0], rows)

    # --- Tiles ------------------------------------------------------------------------------

    def tiles(self, stage: int) -> Iterator[RowTile]:
        """Yield the tile of a stage."""
        parts = {side: Part(Kind.TILE, side, stage) for side in Side}
        places = map(self.layout.place, (*parts.values(), Part(Kind.CELLS, Side.QUERY, stage)))
        *of_sides, is_computed = tile_tables(self.numbers, self.sizes, *places)
        rows = dict(zip(Side, of_sides, strict=True))
        for side in Side:
            self._expect(rows[side], parts[side])
        yield RowTile(rows, is_computed)

    def read(self, tile: RowTile, names: Sequence[str]) -> list[Tensor]:
        """Gather what a tile reads, (1, H, n, ...) each."""
        read = Named()
        for side in Side:
            read |= self.pools[side].gather(tile.rows[side].select(1, 0))
        return [read[name].unsqueeze(0).transpose(1, 2) for name in names]

    def calls(
        self, tile: RowTile, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[slice, Kernel, TileCall]]:
        """Yield the call of a tile."""
        queries, keys = (((0, tile.rows[side].shape[0]),) for side in Side)
        heads = (0, int(self.shapes[Side.QUERY][1]) // self.num_groups)
        geometry, columns = Geometry(heads, queries, keys, queries), self._columns(tile.rows)
        indices = Indices(geometry, columns, 1, self.dtype, self.device)
        options = self.attention.kernel_options
        kernel = self.kernel(self.rule, indices, options, tile.is_computed)
        call = TileCall(query, key, value, False, self.attention.scale)
        yield slice(None), kernel, call

    def _columns(self, rows: dict[Side, Tensor]) -> list[Tensor]:
        """Return the tables of the rule on rows."""
        lanes = {side: rows[side].select(1, 1) for side in Side}
        positions = {side: rows[side].select(1, 2) for side in Side}
        # Rows without a token read what any other reads; they are in no pair. Their position is 0.
        entries = {side: lane.clamp(min=0) for side, lane in lanes.items()}
        if self.num_groups > 1:
            entries = {side: lane // self.num_groups for side, lane in entries.items()}
        read = [self._column(column, entries, positions) for column in self.columns]
        return [*lanes.values(), *positions.values(), *read]

    def _column(
        self, column: Column, entries: Mapping[Side, Tensor], positions: Mapping[Side, Tensor]
    ) -> Tensor:
        table = self.tables[number_of(column)]
        where = list(column.args)
        if not where:
            return table
        side = Side.KEY if KEY in where else Side.QUERY
        for dim in reversed(range(len(where))):
            if where[dim].is_Integer:
                table = table.select(dim, int(where.pop(dim)))
        if HEAD in where:
            table = table.movedim(where.index(HEAD), 0)
            where.remove(HEAD)
        at = [entries[side] if symbol == BATCH else positions[side] for symbol in where]
        index = [None, *at] if HEAD in column.args else at
        values: Tensor = torch.ops.aten.index.Tensor(table, index)
        return values

    # --- Results ----------------------------------------------------------------------------

    def add(self, result: Payload, tile: RowTile, tensors: Sequence[Tensor]) -> None:
        """Note what a tile computed, as rows, of which statistics are first in messages."""
        named = zip(result.parts, tensors, strict=True)
        rows = {name: tensor.transpose(1, 2).flatten(0, 1) for name, tensor in named}
        wide_first = (*result.statistics, *result.tensors)
        self.computed[_side_of(result)].append({name: rows[name] for name in wide_first})

    def result(self, result: Payload) -> Tensors:
        """Combine, or sum up, what was computed of own rows, by whichever rank."""
        side = _side_of(result)
        (batch, _, length, _), part = self.shapes[side], Part(Kind.SUM, side)
        own, place = batch * length * self.num_groups, self.layout.place(part)
        which: Tensor = rows_of_results(self.numbers, self.sizes, place, own)
        self._expect(which, part)
        computed = [*self.computed[side], *self.came_home[side]]

        stacks = []
        for name in result.parts:
            # In a row that no tile computed, nothing was seen.
            nothing = -float("inf") if name in result.statistics else 0.0
            stacks.append(cat_behind([rows[name] for rows in computed], nothing)[which])
        merged = dict(zip(result.parts, merge_stack(result, stacks), strict=True))
        merged |= {name: merged[name].to(self.dtype) for name in result.tensors}
        # (B S groups, H / groups, ...) -> (B, H, S, ...).
        groups = (batch, length, self.num_groups)
        by_group = (rows.unflatten(0, groups) for rows in merged.values())
        return tuple(rows.flatten(2, 3).transpose(1, 2) for rows in by_group)


def _side_of(result: Payload) -> Side:
    return Side.KEY if result.is_of_keys else Side.QUERY


# --- A plan's numbers, part by part ------------------------------------------------------------


def layout_of(stages: int, group_name: str) -> Layout:
    """Return which parts the plans of a group's batches have."""
    return Layout(stages, dist.get_world_size(group_of(group_name)))


@torch.library.custom_op("cp_inductor::rows_of_results", mutates_args=())
def rows_of_results(numbers: Tensor, sizes: Tensor, place: int, width: int) -> Tensor:
    """Return which rows of results make up a rank's own rows, (n, width); n is 2 at least.

    The place is `Layout.place` of a SUM part.
    """
    if not width:
        return numbers.new_empty((2, 0))
    return read_part(numbers, sizes, place).view(-1, width).clone()


@rows_of_results.register_fake
def _(numbers: Tensor, sizes: Tensor, place: int, width: int) -> Tensor:
    return numbers.new_empty((new_size(2), width))


@torch.library.custom_op("cp_inductor::tile_tables", mutates_args=())
def tile_tables(
    numbers: Tensor, sizes: Tensor, queries: int, keys: int, cells: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that a tile reads, and which of its blocks it computes.

    One op, because these are a few numbers, for which generated code would be long.

    The places are `Layout.place` of its TILE parts and of its CELLS part.

    Returns:
        Rows of queries (128 n, 3) and of keys (128 m, 3): row of the pool, lane, and position.
        Rows that have no token read row 0 of the pool, and are of lane -1, or -2 those of keys, so
        that they make no pairs with each other. Behind them, (n, m) bool.
    """
    of_queries, of_keys = (
        read_part(numbers, sizes, place).view(-1, len(COLUMNS)) for place in (queries, keys)
    )
    slots, of_columns = (blocks[:, COLUMNS.index("slot")] for blocks in (of_queries, of_keys))
    is_computed = read_part(numbers, sizes, cells)[slots.unsqueeze(1) + of_columns] != 0
    return _tile_rows(of_queries, -1), _tile_rows(of_keys, -2), is_computed


@tile_tables.register_fake
def _(numbers: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    n, m = new_size(1), new_size(1)
    of_queries, of_keys = (numbers.new_empty((BLOCK * size, len(ROW_COLUMNS))) for size in (n, m))
    return of_queries, of_keys, numbers.new_empty((n, m), dtype=torch.bool)


def _tile_rows(blocks: Tensor, missing: int) -> Tensor:
    """(n, columns), a TILE part -> (128 n, 3); `missing` is the lane of rows without a token."""
    first, step, length, lane, position = (
        blocks[:, COLUMNS.index(name), None]
        for name in ("pool", "step", "length", "lane", "position")
    )
    inside = torch.arange(BLOCK, device=blocks.device)
    is_row = inside < length
    columns = (
        torch.where(is_row, first + inside * step, 0),
        torch.where(is_row, lane, missing),
        torch.where(is_row, position + inside, 0),
    )
    return torch.stack(columns, -1).flatten(0, 1)
