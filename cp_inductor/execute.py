"""The one description of a rank's part of a plan: run it, or trace it and inline what it did.

    forward     fetch 0 . [start fetch i+1 . tiles i . start home i . wait fetch i+1] . combine
    backward    the same; what goes home are gradients

The eager kernels of the op pair call these functions on tensors; `lower_attention` calls them on
fakes and inlines the trace. Collectives are emitted as a start and a wait, never through the
functional-collective wrappers, which put the wait right behind its start when traced. All ranks
emit the same ones in the same order: which there are is read from the whole plan, not from the
rank's part.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cp_inductor.combine import (
    accumulation_dtype,
    combine,
    combine_stack,
    row_projection,
    sum_grads,
    sum_stack,
)
from cp_inductor.exchange import Arriving, Piece, Store, Tokens, records_received
from cp_inductor.kernels import Partial, get_kernel
from cp_inductor.plan import (
    Mask,
    Payload,
    Plan,
    Recipe,
    Span,
    Tile,
    Transfer,
    backward_plan,
    forward_plan,
)
from cp_inductor.torch_private import rank_and_size

__all__ = ["Attention", "run_backward", "run_forward"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Everything about one sequence-sharded attention but its tensors.

    Attributes:
        recipe: of its plan, resolved.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: name for `kernels.get_kernel`.
        group_name: c10d name of the process group behind the sequence axis.
    """

    recipe: Recipe
    scale: float | None
    kernel: str
    group_name: str

    @staticmethod
    def of(recipe: str, scale: float | None, kernel: str, group_name: str) -> Attention:
        """Return what the arguments of the op pair say."""
        return Attention(Recipe.parse(recipe), scale, kernel, group_name)

    @property
    def arguments(self) -> tuple[str, float | None, str, str]:
        """The arguments of the op pair that say this."""
        return self.recipe.format(), self.scale, self.kernel, self.group_name

    @property
    def rank(self) -> int:
        """This process's position among the ranks of the plan."""
        rank, world_size = rank_and_size(self.group_name)
        assert world_size == self.recipe.world_size, "the plan is for another number of ranks"
        return rank


def run_forward(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Attend to the keys of all ranks.

    Args:
        attention: what to compute and among whom.
        query: (B, H, S, D), this rank's shard, any strides.
        key, value: (B, G, T, D), this rank's shards.

    Returns:
        out (B, H, S, D) in the input dtype; lse (B, H, S) over the keys of all ranks; and the
        buffers of the exchanges that are kept for the backward.
    """
    plan = forward_plan(attention.recipe)
    rank = _Rank(plan, attention, query, key, value)
    kept = rank.run_stages(_attend_tile)
    out, lse = rank.result(_PARTIAL) or (query.new_empty(query.shape), _empty_lse(query))
    return [out, lse, *kept]


def run_backward(
    attention: Attention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `run_forward`.

    Args:
        attention: as in the forward.
        grad_out, query, out: (B, H, S, D), this rank's shards.
        key, value: (B, G, T, D), this rank's shards.
        lse: (B, H, S), over the keys of all ranks.
        kept: buffers that the forward kept.

    Returns:
        Gradients of query, key and value in their shapes and dtypes, summed in float32.
    """
    plan = backward_plan(attention.recipe)
    rank = _Rank(plan, attention, query, key, value)
    rank.add_own({"grad_out": grad_out, "out": out, "lse": lse})
    if rank.sends_grad_out:
        rank.add_own({"projection": row_projection(out, grad_out)})
    forward = forward_plan(attention.recipe)
    exchanged = [stage.fetch for stage in forward.stages[: plan.num_kept] if stage.fetch]
    for buffer, transfers in zip(kept, exchanged, strict=True):
        rank.store.unpack(buffer, records_received(transfers, rank.rank, plan.grid))
    rank.run_stages(_differentiate_tile)
    (grad_query,) = rank.result(_QUERY_GRAD) or (torch.empty_like(query),)
    grad_key, grad_value = rank.result(_KEY_VALUE_GRAD) or map(torch.empty_like, (key, value))
    return grad_query, grad_key, grad_value


def _empty_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query))


# Results of tiles over some chunks and heads: one tensor, or two that belong together.
Contribution = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    """One of the results that tiles contribute to.

    Attributes:
        names: of its tensors, in the order of the payload.
        payload: in which contributions to other ranks' chunks go home.
        merge: several contributions to the same chunks and heads into one, in the dtype given.
        merge_stack: several that are one tensor, not rounded.
    """

    names: tuple[str, ...]
    payload: Payload
    merge: Callable[[list[tuple[Tensor, ...]], torch.dtype], tuple[Tensor, ...]]
    merge_stack: Callable[..., tuple[Tensor, ...]]


def _combine(partials: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return combine([Partial(*partial) for partial in partials], dtype=dtype)


def _sum(grads: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(sum_grads(of_one, dtype=dtype) for of_one in zip(*grads, strict=True))


def _sum_stacks(*stacks: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(sum_stack, stacks))


_PARTIAL = _Result(("out", "lse"), Payload.PARTIAL, _combine, combine_stack)
_QUERY_GRAD = _Result(("grad_query",), Payload.QUERY_GRAD, _sum, _sum_stacks)
_KEY_VALUE_GRAD = _Result(("grad_key", "grad_value"), Payload.KEY_VALUE_GRAD, _sum, _sum_stacks)
_RESULTS = (_PARTIAL, _QUERY_GRAD, _KEY_VALUE_GRAD)


class _Rank:
    """One rank at work on a plan."""

    def __init__(
        self, plan: Plan, attention: Attention, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        self.plan, self.attention, self.rank = plan, attention, attention.rank
        self.kernel = get_kernel(attention.kernel)
        self.own = plan.grid.own(self.rank)
        self.program = plan.program(self.rank)
        tokens = Tokens(plan.grid, query.shape[2], key.shape[2])
        self.store = Store(tokens, self.rank, attention.group_name, like=query)
        self.contributions: dict[Payload, list[Contribution]] = {r.payload: [] for r in _RESULTS}
        self.add_own({"query": query})
        self.add_own({"key": key, "value": value}, of_keys=True)

    def add_own(self, tensors: dict[str, Tensor], *, of_keys: bool = False) -> None:
        """Put this rank's shards at hand."""
        shape = self.plan.shape
        heads = shape.kv_heads(shape.all_heads) if of_keys else shape.all_heads
        for name, tensor in tensors.items():
            self.store.add(name, self.own, heads, tensor, of_keys=of_keys)

    @property
    def sends_grad_out(self) -> bool:
        """Whether another rank differentiates tiles of this one's queries."""
        payloads = (Payload.QUERY_GRAD_OUT, Payload.GRAD_OUT)
        return any(
            transfer.payload in payloads and transfer.source == self.rank
            for stage in self.program
            for transfer in stage.fetch
        )

    def run_stages(self, compute: Callable[[_Rank, Tile], None]) -> list[Tensor]:
        """Run all stages; return the buffers of the exchanges that are to be kept."""
        kept: list[Tensor] = []
        homeward: Arriving | None = None
        self._wait_fetch(self._start_fetch(0), kept if self.plan.num_kept else [])
        for index, stage in enumerate(self.program):
            fetching = self._start_fetch(index + 1)
            for tile in stage.tiles:
                compute(self, tile)
            # What the stage before sent home was in flight over this stage's tiles.
            self._wait_home(homeward)
            homeward = self._start_home(index)
            self.store.forget(self._spans_needed_after(index), self.own)
            self._wait_fetch(fetching, kept if index + 1 < self.plan.num_kept else [])
        self._wait_home(homeward)
        return kept

    def _start_fetch(self, index: int) -> Arriving | None:
        # Whether there is an exchange does not depend on the rank: one that takes no part hangs.
        if index == len(self.program) or not self.plan.stages[index].fetch:
            return None
        return self.store.start(self.program[index].fetch)

    def _wait_fetch(self, fetching: Arriving | None, kept: list[Tensor]) -> None:
        if fetching is None:
            return
        kept.append(self.store.wait(fetching))
        for piece in self.store.pop("projection", but=self.own):
            (grad_out,) = self.store.matching("grad_out", piece)
            projection = self.store.cut(piece, piece.span, piece.heads).unsqueeze(-1)
            out = (grad_out.to(projection.dtype) * projection).to(grad_out.dtype)
            self.store.add("out", piece.span, piece.heads, out, of_keys=False)

    def _start_home(self, index: int) -> Arriving | None:
        if not self.plan.stages[index].home:
            return None
        home = self.program[index].home
        for result in _RESULTS:
            leaving = [t for t in home if t.payload is result.payload and t.source == self.rank]
            for span, heads in _runs_of(leaving):
                merged = self._merge(result, span, heads)
                for name, tensor in zip(result.names, merged, strict=True):
                    of_keys = result.payload.is_of_keys
                    self.store.add(name, span, heads, tensor, of_keys=of_keys)
        return self.store.start(home)

    def _wait_home(self, homeward: Arriving | None) -> None:
        if homeward is None:
            return
        for stack in self.store.arrive(homeward):
            result = next(result for result in _RESULTS if result.payload is stack.payload)
            if stack.tensors[0].shape[0] == 1:
                tensors = tuple(tensor.squeeze(0) for tensor in stack.tensors)
            else:
                tensors = result.merge_stack(*stack.tensors)
            pieces = (tensor.flatten(1, 2) for tensor in tensors)  # (B, ranks, heads, ...)
            of_keys = result.payload.is_of_keys
            self.contributions[result.payload].append(
                tuple(Piece(stack.span, stack.heads, of_keys, piece) for piece in pieces)
            )

    def contribute(
        self, result: _Result, spans: Sequence[Span], heads: Span, tensors: Sequence[Tensor]
    ) -> None:
        """Note what a tile computed over spans, concatenated, and heads."""
        of_keys = result.payload.is_of_keys
        lengths = [self.store.tokens.of(span, of_keys=of_keys) for span in spans]
        parts = [t.split(lengths, 2) if len(spans) > 1 else [t] for t in tensors]
        for span, *of_span in zip(spans, *parts, strict=True):
            pieces = tuple(Piece(span, heads, of_keys, tensor) for tensor in of_span)
            self.contributions[result.payload].append(pieces)

    def result(self, result: _Result) -> tuple[Tensor, ...] | None:
        """Return this rank's own part of a result; None if it holds no tokens."""
        shape, is_of_keys = self.plan.shape, result.payload.is_of_keys
        if self.store.tokens.of(self.own, of_keys=is_of_keys) == 0:
            return None
        heads = shape.kv_heads(shape.all_heads) if is_of_keys else shape.all_heads
        return self._merge(result, self.own, heads)

    def _merge(self, result: _Result, span: Span, heads: Span) -> tuple[Tensor, ...]:
        """Merge all contributions to a span and heads, wherever their borders are."""
        near = [
            pieces
            for pieces in self.contributions[result.payload]
            if pieces[0].span.intersect(span) and pieces[0].heads.intersect(heads)
        ]
        by_heads = []
        for some_heads in _between([pieces[0].heads for pieces in near], heads):
            with_heads = [p for p in near if p[0].heads.intersect(some_heads)]
            by_span = []
            for part in _between([pieces[0].span for pieces in with_heads], span):
                cuts = [
                    tuple(self.store.cut(piece, part, some_heads) for piece in pieces)
                    for pieces in with_heads
                    if pieces[0].span.intersect(part)
                ]
                if cuts:  # chunks without tokens get no contributions
                    by_span.append(result.merge(cuts, self.store.like.dtype))
            by_heads.append(_concatenate(by_span, 2))
        return _concatenate(by_heads, 1)

    def _spans_needed_after(self, index: int) -> list[Span]:
        """Return chunks of which later stages compute tiles, or which they send on."""
        tiles = [tile for stage in self.program[index + 1 :] for tile in stage.tiles]
        sent = [
            transfer.span
            for stage in self.program[index + 2 :]
            for transfer in stage.fetch
            if transfer.source == self.rank
        ]
        return [*(span for tile in tiles for span in (*tile.queries, *tile.keys)), *sent]


def _attend_tile(rank: _Rank, tile: Tile) -> None:
    store, kv_heads = rank.store, rank.plan.shape.kv_heads(tile.heads)
    partial = rank.kernel.forward(
        store.take("query", tile.queries, tile.heads),
        store.take("key", tile.keys, kv_heads),
        store.take("value", tile.keys, kv_heads),
        is_causal=tile.mask is Mask.CAUSAL,
        scale=rank.attention.scale,
    )
    rank.contribute(_PARTIAL, tile.queries, tile.heads, partial)


def _differentiate_tile(rank: _Rank, tile: Tile) -> None:
    store, kv_heads = rank.store, rank.plan.shape.kv_heads(tile.heads)
    dq, dk, dv = rank.kernel.backward(
        store.take("grad_out", tile.queries, tile.heads),
        store.take("query", tile.queries, tile.heads),
        store.take("key", tile.keys, kv_heads),
        store.take("value", tile.keys, kv_heads),
        store.take("out", tile.queries, tile.heads),
        store.take("lse", tile.queries, tile.heads),
        is_causal=tile.mask is Mask.CAUSAL,
        scale=rank.attention.scale,
    )
    rank.contribute(_QUERY_GRAD, tile.queries, tile.heads, (dq,))
    rank.contribute(_KEY_VALUE_GRAD, tile.keys, kv_heads, (dk, dv))


def _runs_of(transfers: Sequence[Transfer]) -> list[tuple[Span, Span]]:
    """Return the (span, heads) of transfers, those that adjoin as one."""
    runs: list[tuple[Span, Span]] = []
    for heads, span in sorted((t.heads, t.span) for t in transfers):
        if runs and runs[-1][1] == heads and runs[-1][0].stop == span.start:
            span = Span(runs.pop()[0].start, span.stop)
        runs.append((span, heads))
    return runs


def _between(spans: Sequence[Span], within: Span) -> list[Span]:
    """Cut `within` at all borders of the spans."""
    edges = {within.start, within.stop}
    for span in spans:
        edges |= {edge for edge in (span.start, span.stop) if within.start < edge < within.stop}
    ordered = sorted(edges)
    return [Span(a, b) for a, b in pairwise(ordered)]


def _concatenate(parts: Sequence[tuple[Tensor, ...]], dim: int) -> tuple[Tensor, ...]:
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(of_one, dim) for of_one in zip(*parts, strict=True))
