"""Execute a rank's part of a plan that is known when a graph is compiled: tiles read views.

    stage 0     tile q[2:4] x kv[2:4]     reads the rank's shards
    stage 1     tile q[2:4] x kv[0:2]     reads a view of the message that stage 1 fetched
      =>
    each tile's result is a contribution; those to other ranks' tokens go home, the rest is merged

The plan is one rank's part, and so is a graph that traces this. All ranks emit the same collectives
in the same order: which there are is read from the whole plan. They are emitted as a start and a
wait, never through the functional-collective wrappers, which put the wait right behind its start
when traced.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_inductor.plan import Payload, Plan, Span, Tile, backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.merge import KEY_VALUE_GRAD, PARTIAL, QUERY_GRAD, RESULT_KINDS, Results
from cp_inductor.run.own_transfers import fetch_of, home_of, reads_shard, runs_leaving
from cp_inductor.run.receive import Arriving, Receiver
from cp_inductor.run.records import records_received
from cp_inductor.run.send import Sender
from cp_inductor.run.stages import run_stages
from cp_inductor.run.store import Piece, Store, concatenate
from cp_inductor.run.tile_calls import TileCalls
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.stand_in import copy_statistic, make_stand_in, make_words
from cp_inductor.tiles.tile_masks import TileMasks
from cp_inductor.tiles.tokens import Tokens


def attend(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor]
) -> list[Tensor]:
    """Attend by the plan of a recipe; see `cp_inductor.ops.attention.run_forward`."""
    plan = forward_plan(attention.recipe)
    executor = ViewExecutor(plan, attention, query, key, value, extras, TileCalls.attend)
    run_stages(executor)
    found = executor.results.of_shard(PARTIAL)
    out, lse = found or (query.new_empty(query.shape), _empty_lse(query))
    return [out, lse, *executor.kept]


def differentiate(
    attention: Attention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:
    """Differentiate by the plan of a recipe; see `cp_inductor.ops.attention.run_backward`."""
    plan = backward_plan(attention.recipe)
    executor = ViewExecutor(plan, attention, query, key, value, extras, TileCalls.differentiate)
    if not reads_shard(attention):
        executor.store.drop(("query", "key", "value"))
    executor.add_own({"grad_out": grad_out, "out": out, "lse": lse})
    if executor.sends_grad_out:
        executor.add_own({"delta": make_words(out, grad_out)})
    executor.unpack_kept(kept)
    run_stages(executor)
    results = executor.results
    (grad_query,) = results.of_shard(QUERY_GRAD) or (torch.empty_like(query),)
    of_keys = results.of_shard(KEY_VALUE_GRAD) or map(torch.empty_like, (key, value))
    grads = [grad_query, *of_keys]
    return [*grads, executor.tiles.bias_grad()] if attention.has_bias else grads


def _empty_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query))


class ViewExecutor:
    """What a rank does of each stage of a plan; see `cp_inductor.run.stages.StageWork`.

    Args:
        plan: of the direction.
        attention: what is computed.
        query, key, value: this rank's shards.
        extras: what its mask reads, and more.
        compute: a tile: `TileCalls.attend` or `TileCalls.differentiate`.
    """

    def __init__(
        self,
        plan: Plan,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extras: Sequence[Tensor],
        compute: Callable[[TileCalls, Tile], None],
    ) -> None:
        self.plan, self.attention, self.rank = plan, attention, attention.rank
        self.compute_tile = compute
        self.own, self.program = plan.grid.own(self.rank), plan.program(self.rank)
        tokens = Tokens(plan.grid, query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        self.store = Store(tokens, like=query)
        self.sender = Sender(self.store, self.rank, attention.group_name)
        self.receiver = Receiver(self.store)
        self.results = Results(plan, self.rank, self.store)
        masks = TileMasks(attention.rule, tokens, self.own, attention.extras(extras), query)
        self.tiles = TileCalls(attention, plan.shape, self.store, masks, self.results)
        self.fetches = [fetch_of(plan, self.rank, index) for index in range(len(self.program))]
        self.homes = [home_of(plan, self.rank, index) for index in range(len(self.program))]
        self.kept: list[Tensor] = []
        self.words: list[Piece] = []
        self.sender.note_sent(self.fetches)
        self.add_own({"query": query})
        self.add_own({"key": key, "value": value}, of_keys=True)

    def add_own(self, tensors: dict[str, Tensor], *, of_keys: bool = False) -> None:
        """Put this rank's shards at hand."""
        shape = self.plan.shape
        heads = shape.kv_heads(shape.all_heads) if of_keys else shape.all_heads
        for name, tensor in tensors.items():
            self.store.add(name, self.own, heads, tensor, of_keys=of_keys)

    def unpack_kept(self, buffers: Sequence[Tensor]) -> None:
        """Put at hand what the forward kept of its exchanges."""
        forward = forward_plan(self.attention.recipe)
        exchanged = [
            fetch_of(forward, self.rank, index)
            for index, stage in enumerate(forward.stages[: self.plan.num_kept])
            if stage.fetch
        ]
        for buffer, transfers in zip(buffers, exchanged, strict=True):
            records = records_received(transfers, self.rank, self.plan.grid)
            self.receiver.unpack(buffer, records)

    @property
    def sends_grad_out(self) -> bool:
        """Whether this rank's queries are differentiated from a message, by whichever rank."""
        payloads = (Payload.QUERY_GRAD_OUT, Payload.GRAD_OUT)
        return any(
            transfer.payload in payloads and transfer.source == self.rank
            for fetch in self.fetches
            for transfer in fetch
        )

    # --- The work of a stage ------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.program)

    def start_fetch(self, stage: int) -> Arriving | None:
        """Start what a stage fetches, if any rank fetches something."""
        # Whether there is an exchange does not depend on the rank: one that takes no part hangs.
        if stage == len(self.program) or not self.plan.stages[stage].fetch:
            return None
        return self.sender.start(self.fetches[stage])

    def end_fetch(self, stage: int, fetching: Arriving | None) -> None:
        """Wait for what a stage fetches, and put it at hand; what is not needed is let go."""
        if stage:
            self.store.forget(self._spans_needed_from(stage), self.own)
        if fetching is None:
            return
        buffer = self.receiver.wait(fetching)
        if stage < self.plan.num_kept:
            self.kept.append(buffer)
        seen, self.words = self.words, self.store.pop_arrived("delta")
        by_heads: dict[Span, list[Piece]] = {}
        for words in self.words:
            if not any(words is one for one in seen):
                by_heads.setdefault(words.heads, []).append(words)
        if self.plan.returns:  # they may be sent on
            for words in self.words:
                self.store.put("delta", words)
        for of_heads in by_heads.values():
            self._stand_in(of_heads)

    def compute(self, stage: int) -> None:
        """Compute the tiles of a stage; keys of several that lie apart are put together once."""
        tiles = self.program[stage].tiles
        spans_of: dict[Span, list[tuple[Span, ...]]] = {}
        for tile in tiles:
            spans_of.setdefault(self.plan.shape.kv_heads(tile.heads), []).append(tile.keys)
        for heads, spans in spans_of.items():
            if len(set(spans)) > 1:
                self.store.put_together(spans, heads)
        for tile in tiles:
            self.compute_tile(self.tiles, tile)

    def start_home(self, stage: int) -> Arriving | None:
        """Merge what this rank computed of other ranks' tokens, and start to send it home."""
        if not self.plan.stages[stage].home:
            return None
        home = self.homes[stage]
        names: set[str] = set()
        leaving = [transfer for transfer in home if transfer.source == self.rank]
        for kind in RESULT_KINDS:
            for span, heads in runs_leaving(leaving, kind.payload):
                merged = self.results.over(kind, span, heads, of_tiles=True)
                for name, tensor in zip(kind.payload.parts, merged, strict=True):
                    of_keys = kind.payload.is_of_keys
                    self.store.add(name, span, heads, tensor, of_keys=of_keys)
                names |= set(kind.payload.parts)
            of_payload = [t for t in leaving if t.payload is kind.payload]
            to_itself = [t for t in of_payload if t.destination == self.rank]
            self.results.withdraw(kind.payload, to_itself)
        started = self.sender.start(home)
        self.store.drop(names)
        return started

    def end_home(self, homeward: Arriving | None) -> None:
        """Wait for results of this rank's tokens that others computed."""
        if homeward is not None:
            for stack in self.receiver.arrive(homeward):
                self.results.add_arrived(stack)

    def _stand_in(self, words: Sequence[Piece]) -> None:
        """Make what stands in for out in rows of others, in one kernel for all that arrived."""
        spans = tuple(span for piece in words for span in piece.spans)

        def put(name: str, tokens_first: Tensor) -> None:
            tensor = tokens_first.movedim(0, SEQUENCE_DIM)
            self.store.put(name, replace(words[0], spans=spans, tensor=tensor))

        grad_out = _tokens_first([self.store.beside("grad_out", piece) for piece in words])
        put("out", make_stand_in(_tokens_first(words), grad_out))
        if self.tiles.row.plain.has_lse_in_order:
            lse = _tokens_first([self.store.pop_beside("lse", piece) for piece in words])
            put("lse", copy_statistic(lse, grad_out))

    def _spans_needed_from(self, stage: int) -> list[Span]:
        """Return chunks of which tiles are still computed, or which later stages send on."""
        tiles = [tile for later in self.program[stage:] for tile in later.tiles]
        sent = [
            transfer.span
            for later in self.program[stage + 1 :]
            for transfer in later.fetch
            if transfer.source == self.rank
        ]
        return [*(span for tile in tiles for span in (*tile.queries, *tile.keys)), *sent]


def _tokens_first(pieces: Sequence[Piece]) -> Tensor:
    """Put pieces together as messages have them, (t, B, h, ...). Inductor makes it one kernel."""
    return concatenate([piece.tensor.movedim(SEQUENCE_DIM, 0) for piece in pieces])
