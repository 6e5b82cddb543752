"""Rows of a plan known when a graph is compiled: its parts are constant slices, read as views.

    stage 0     tile q[2:4] x kv[2:4]     reads the rank's shards
    stage 1     tile q[2:4] x kv[0:2]     reads a view of the message that stage 1 fetched
      =>
    results of tiles to other ranks' tokens go home, the rest is merged

The plan is one rank's part, and so is a graph that traces this. All ranks emit the same collectives
in the same order: which there are is read from the whole plan. They are emitted as a start and a
wait, never through the functional-collective wrappers, which put the wait right behind its start
when traced.

A tile under a mask is computed by a kernel that reads the rule itself, if one serves; else in parts
of its queries, each under a bias, so that no more scores are made at once than memory has room for.

Shapes: B batch, H query heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_inductor.mask.language import SCORE
from cp_inductor.plan import Mask, Payload, Span, Tile, backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.merge import RESULTS, Results, Tensors
from cp_inductor.run.messages import Arriving, Messages
from cp_inductor.run.records import (
    Contents,
    Groups,
    fetch_of,
    home_of,
    reads_shard,
    records_of,
    runs_leaving,
)
from cp_inductor.run.store import Piece, Store, concatenate
from cp_inductor.tiles.aten_kernels import Math
from cp_inductor.tiles.dims import SEQUENCE_DIM, Tokens
from cp_inductor.tiles.kernel_table import KERNELS, get_kernel
from cp_inductor.tiles.kernels import Kernel, RuleKernel, TileCall
from cp_inductor.tiles.stand_in import make_stand_in, make_words, store_beside
from cp_inductor.tiles.tile_masks import MAX_SCORE_BYTES, TileMasks, bias_dtype
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import is_fake

_ALL = slice(None)


class Views:
    """What a rank has of a plan of a recipe, from what `run_forward` takes; see there."""

    def __init__(
        self, attention: Attention, shards: Tensors, extras: Tensors, *, is_backward: bool
    ) -> None:
        query, key, value = shards
        plan = (backward_plan if is_backward else forward_plan)(attention.recipe)
        self.plan, self.attention, self.rank = plan, attention, attention.rank
        self.own, self.program = plan.grid.own(self.rank), plan.program(self.rank)
        self.num_stages = len(self.program)
        tokens = Tokens(plan.grid, query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        self.store = Store(tokens, like=query)
        self.messages = Messages(self.store, self.rank, attention.group_name)
        self.results = Results(plan, self.rank, self.store)
        self.add, self.result = self.results.add, self.results.of_shard
        self.seed = extras[-1] if attention.dropout_p else None
        tables = extras if self.seed is None else extras[:-1]
        self.masks = TileMasks(attention.rule, tokens, self.own, tables, query)
        self.maths = defaultdict[Tile, list[Math]](list)
        self.plain, by_rule = get_kernel(attention.kernel), KERNELS[attention.kernel].under_rule
        # What reads the rule itself, if it serves here.
        serves = is_fake(query) or not by_rule.needs_graph
        serves = serves and by_rule.obstacle(self.masks.rule, query.shape[-1]) is None
        self.under_rule: type[RuleKernel] | None = by_rule if serves else None
        # Whether tiles are what no kernel does: those of aten would round a wide bias.
        rule, dtype = self.masks.rule, query.dtype
        is_plain = rule.score == SCORE and bias_dtype(rule, dtype) == dtype
        is_special = self.under_rule is None and not is_plain
        self.needs_math = attention.has_bias or attention.dropout_p > 0 or is_special
        self.fetches = [fetch_of(plan, self.rank, index) for index in range(self.num_stages)]
        self.homes = [home_of(plan, self.rank, index) for index in range(self.num_stages)]
        self.kept: list[Tensor] = []
        self.messages.note_sent(self.fetches)
        if not is_backward or reads_shard(attention):
            self._add_own({"query": query})
            self._add_own({"key": key, "value": value}, of_keys=True)

    def begin_backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, kept: Sequence[Tensor]
    ) -> None:
        """Put at hand what is differentiated, and what the forward kept of its exchanges."""
        self._add_own({"grad_out": grad_out, "out": out, "lse": lse})
        # The queries that are differentiated from a message, by whichever rank.
        payloads = (Payload.QUERY_GRAD_OUT, Payload.GRAD_OUT)
        if any(t.payload in payloads and t.source == self.rank for f in self.fetches for t in f):
            self._add_own({"delta": make_words(out, grad_out)})
        forward = forward_plan(self.attention.recipe)
        exchanged = [
            fetch_of(forward, self.rank, index)
            for index, stage in enumerate(forward.stages[: self.plan.num_kept])
            if stage.fetch
        ]
        for buffer, transfers in zip(kept, exchanged, strict=True):
            records = records_of(transfers, self.rank, self.plan.grid, are_sent=False)
            self.messages.unpack(buffer, records)

    def _add_own(self, tensors: dict[str | Contents, Tensor], *, of_keys: bool = False) -> None:
        """Put this rank's shards at hand."""
        shape = self.plan.shape
        heads = shape.kv_heads(shape.all_heads) if of_keys else shape.all_heads
        self.store.pieces.append(Piece((self.own,), Groups.single(heads), of_keys, tensors))

    # --- Exchanges ----------------------------------------------------------------------------

    def start_fetch(self, stage: int) -> Arriving | None:
        """Start what a stage fetches, if any rank fetches something."""
        # Whether there is an exchange does not depend on the rank: one that takes no part hangs.
        if stage == self.num_stages or not self.plan.stages[stage].fetch:
            return None
        return self.messages.start(self.fetches[stage])

    def end_fetch(self, stage: int, fetching: Arriving | None) -> None:
        """Wait for what a stage fetches, and put it at hand; what is not needed is let go."""
        if stage:
            self.store.forget(self._spans_needed_from(stage))
        if fetching is None:
            return
        buffer = fetching.wait()
        arrived = self.messages.unpack(buffer, fetching.records)
        if stage < self.plan.num_kept:
            self.kept.append(buffer)
        with_delta = [piece for piece in arrived if "delta" in piece.tensors]
        for heads in dict.fromkeys(piece.heads for piece in with_delta):
            self._stand_in([piece for piece in with_delta if piece.heads == heads])

    def _stand_in(self, arrived: Sequence[Piece]) -> None:
        """Make what stands in for out in rows of others, in one kernel for all that arrived."""

        def tokens_first(name: str) -> Tensor:
            """Put them together as messages have them, (t, B, h, ...), which is one kernel."""
            return concatenate([of.tensors[name].movedim(SEQUENCE_DIM, 0) for of in arrived])

        grad_out = tokens_first("grad_out")
        made: dict[str | Contents, Tensor] = {}
        for name in self.plain.packed:
            made[name] = store_beside(tokens_first(name), grad_out)
            for piece in arrived:
                del piece.tensors[name]
        made["out"] = make_stand_in(tokens_first("delta"), grad_out)
        spans = tuple(span for piece in arrived for span in piece.spans)
        tensors = {name: tensor.movedim(0, SEQUENCE_DIM) for name, tensor in made.items()}
        self.store.pieces.append(replace(arrived[0], spans=spans, tensors=tensors))

    def _spans_needed_from(self, stage: int) -> list[Span]:
        """Return chunks of which tiles are still computed, or which later stages send on."""
        tiles = [tile for later in self.program[stage:] for tile in later.tiles]
        fetched = [transfer for later in self.program[stage + 1 :] for transfer in later.fetch]
        sent = [transfer.span for transfer in fetched if transfer.source == self.rank]
        return [*(span for tile in tiles for span in (*tile.queries, *tile.keys)), *sent]

    def start_home(self, stage: int) -> Arriving | None:
        """Merge what this rank computed of other ranks' tokens, and start to send it home."""
        if not self.plan.stages[stage].home:
            return None
        home = self.homes[stage]
        at_hand = [*self.store.pieces]
        leaving = [transfer for transfer in home if transfer.source == self.rank]
        for result in RESULTS:
            for span, heads in runs_leaving(leaving, result):
                merged = self.results.over(result, span, heads, of_tiles=True)
                self.store.pieces.append(Piece.of(result, (span,), heads, merged))
            itself = [transfer for transfer in leaving if transfer.destination == self.rank]
            self.results.withdraw(result, {t.heads for t in itself if t.payload is result})
        started = self.messages.start(home)
        self.store.pieces = at_hand
        return started

    def end_home(self, homeward: Arriving | None) -> None:
        """Wait for results of this rank's tokens that others computed."""
        if homeward is not None:
            for arrived in self.messages.arrive(homeward):
                self.results.add_arrived(*arrived)

    # --- Tiles --------------------------------------------------------------------------------

    def tiles(self, stage: int) -> Sequence[Tile]:
        """Return the tiles of a stage; keys of several that lie apart are put together once."""
        tiles = self.program[stage].tiles
        spans_of = defaultdict[Span, list[tuple[Span, ...]]](list)
        for tile in tiles:
            keys, heads = tile.side(self.plan.shape, of_keys=True)
            spans_of[heads].append(keys)
        for heads, spans in spans_of.items():
            if len(set(spans)) > 1:
                self.store.put_together(spans, heads)
        return tiles

    def read(self, tile: Tile, names: Sequence[str]) -> list[Tensor]:
        """Return what a tile reads: views, where it lies together."""
        tensors = []
        for name in names:
            part = tile.side(self.plan.shape, of_keys=name in Payload.KEY_VALUE.tensors)
            # What several tiles read in the order of its shape is copied once.
            is_in_order = name == "lse" and name in self.plain.packed
            tensors.append(self.store.take(name, *part, is_in_order=is_in_order))
        return tensors

    def calls(
        self, tile: Tile, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[slice, Kernel, TileCall]]:
        """Yield a tile in parts of its queries, each of no more scores than are made at once."""
        attention, scale, rule = self.attention, self.attention.scale, self.masks.rule
        has_mask = tile.mask is Mask.PARTIAL or bool(rule.bias) or rule.score != SCORE
        if not self.needs_math and (self.under_rule is not None or not has_mask):
            kernel: Kernel = self.plain
            if has_mask and self.under_rule is not None:
                kernel = self.under_rule(rule, self.masks.indices(tile), attention.kernel_options)
            yield _ALL, kernel, TileCall(query, key, value, tile.mask is Mask.CAUSAL, scale)
            return
        for rows in self._row_slices(tile, query, key):
            keep, kernel = None, self.plain
            if self.seed is not None:
                keep = self.masks.keep(tile, rows, self.seed, attention.dropout_p)
            if self.needs_math:
                kernel = Math(keep, needs_bias_grad=attention.has_bias)
                self.maths[tile].append(kernel)
            bias, change = self.masks.bias(tile, rows), self.masks.change(tile, rows)
            is_causal = tile.mask is Mask.CAUSAL and bias is None
            part = query[:, :, rows] if rows != _ALL else query
            yield rows, kernel, TileCall(part, key, value, is_causal, scale, bias, change)

    def _row_slices(self, tile: Tile, query: Tensor, key: Tensor) -> Iterator[slice]:
        num_queries, num_keys = (size_hint(t.shape[SEQUENCE_DIM]) for t in (query, key))
        # On CUDA, Inductor repeats a mask for each head.
        width = size_hint(query.shape[0]) * len(tile.heads)
        row_bytes = width * num_keys * (4 if self.needs_math else query.dtype.itemsize)
        num_rows = max(1, MAX_SCORE_BYTES // max(1, row_bytes))
        for start in range(0, num_queries, num_rows):
            yield slice(start, start + num_rows) if num_rows < num_queries else _ALL

    # --- Results ------------------------------------------------------------------------------

    def bias_grad(self) -> Tensor:
        """Return the gradient of the bias: of each tile in its place, of the others 0."""
        parts = [
            (tile, torch.cat([math.bias_grad for math in of_tile], SEQUENCE_DIM))
            for tile, of_tile in self.maths.items()
        ]
        return self.masks.put_together(parts).to(self.masks.tables[-1].dtype)
