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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cp_inductor.mask.language import SCORE
from cp_inductor.mask.rule import Rule
from cp_inductor.plan import (
    Mask,
    Payload,
    Plan,
    Recipe,
    Shape,
    Span,
    Tile,
    Transfer,
    backward_plan,
    forward_plan,
)
from cp_inductor.plan.grid import join_spans
from cp_inductor.plan.transfers import message_order
from cp_inductor.run.messages import (
    Arriving,
    Groups,
    Piece,
    Store,
    records_received,
)
from cp_inductor.tiles.combine import (
    accumulation_dtype,
    combine,
    combine_stack,
    sum_grads,
    sum_stack,
)
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import KERNELS, get_kernel
from cp_inductor.tiles.kernels import AnyScale, Kernel, Partial, RuleKernel, TileCall
from cp_inductor.tiles.math_tiles import Math
from cp_inductor.tiles.stand_in import copy_statistic, make_stand_in, make_words
from cp_inductor.tiles.tile_masks import MAX_SCORE_BYTES, Extras, TileMasks
from cp_inductor.tiles.tokens import Tokens
from cp_inductor.torch_private.sizes import is_known, size_hint
from cp_inductor.torch_private.tracing import is_fake


@dataclass(frozen=True, slots=True)
class Attention:
    """Everything about one sequence-sharded attention but its tensors.

    Attributes:
        recipe: of its plan, resolved.
        rank: whose part of the plan: this process's position among the plan's ranks.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: a name in `cp_inductor.tiles.kernel_table.KERNELS`.
        group_name: c10d name of the process group behind the sequence axis.
        dropout_p: probability with which a probability is dropped.
        has_bias: the last table of the rule is a bias (B | 1, H | 1, S, T) with a gradient.
        kernel_options: for the templates of tiles under a mask on CUDA; see `FlexCUDA`.
    """

    recipe: Recipe
    rank: int
    scale: float | None
    kernel: str
    group_name: str
    dropout_p: float = 0.0
    has_bias: bool = False
    kernel_options: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.recipe.world_size, "the plan is for another number of ranks"

    @staticmethod
    def of(
        recipe: str,
        rank: int,
        scale: float | None,
        kernel: str,
        group_name: str,
        dropout_p: float = 0.0,
        has_bias: bool = False,
        kernel_options: str = "",
    ) -> Attention:
        """Return what the arguments of the op pair say."""
        how = (scale, kernel, group_name, dropout_p, has_bias, kernel_options)
        return Attention(Recipe.parse(recipe), rank, *how)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op pair that say this."""
        how = (self.scale, self.kernel, self.group_name, self.dropout_p, self.has_bias)
        options = (self.kernel_options,) if self.kernel_options else ()
        return self.recipe.format(), self.rank, *how, *options

    @property
    def rule(self) -> Rule:
        """Which pairs exist."""
        return Rule.parse(self.recipe.rule)

    @property
    def num_extras(self) -> int:
        """How many tensors are read beside query, key and value: see `Extras`, in its order."""
        return len(self.rule.tables) + (self.dropout_p > 0)

    def extras(self, tensors: Sequence[Tensor]) -> Extras:
        """Name them."""
        left = list(tensors)
        seed = left.pop() if self.dropout_p else None
        return Extras(tuple(left), seed)


def run_forward(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, *extras: Tensor
) -> list[Tensor]:
    """Attend to the keys of all ranks.

    Args:
        attention: what to compute and among whom.
        query: (B, H, S, D), this rank's shard, any strides.
        key, value: (B, G, T, D), this rank's shards.
        extras: see `Extras`; tables, seed.

    Returns:
        out (B, H, S, D) in the input dtype; lse (B, H, S) over the keys of all ranks; and the
        buffers of the exchanges that are kept for the backward.
    """
    plan = forward_plan(attention.recipe)
    rank = _Rank(plan, attention, query, key, value, extras)
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
    *rest: Tensor,
) -> tuple[Tensor, ...]:
    """Differentiate `run_forward`.

    Args:
        attention: as in the forward.
        grad_out, query, out: (B, H, S, D), this rank's shards.
        key, value: (B, G, T, D), this rank's shards. Of these and query nothing but the shape and
            dtype is read unless `reads_shard`.
        lse: (B, H, S), over the keys of all ranks.
        rest: the extras of the forward, and the buffers that it kept.

    Returns:
        Gradients of query, key and value in their shapes and dtypes, summed in float32; and of the
        bias, if there is one.
    """
    plan = backward_plan(attention.recipe)
    extras, kept = rest[: attention.num_extras], rest[attention.num_extras :]
    rank = _Rank(plan, attention, query, key, value, extras)
    if not reads_shard(attention):
        rank.store.drop(("query", "key", "value"))
    rank.add_own({"grad_out": grad_out, "out": out, "lse": lse})
    if rank.sends_grad_out:
        rank.add_own({"delta": make_words(out, grad_out)})
    forward = forward_plan(attention.recipe)
    exchanged = [
        _fetch_of(forward, rank.rank, index)
        for index, stage in enumerate(forward.stages[: plan.num_kept])
        if stage.fetch
    ]
    for buffer, transfers in zip(kept, exchanged, strict=True):
        rank.store.unpack(buffer, records_received(transfers, rank.rank, plan.grid))
    rank.run_stages(_differentiate_tile)
    (grad_query,) = rank.result(_QUERY_GRAD) or (torch.empty_like(query),)
    grad_key, grad_value = rank.result(_KEY_VALUE_GRAD) or map(torch.empty_like, (key, value))
    grads = (grad_query, grad_key, grad_value)
    return (*grads, rank.bias_grad()) if attention.has_bias else grads


def reads_shard(attention: Attention) -> bool:
    """Whether the backward of this rank reads its own shards of query, key and value.

    It does not where the forward kept all that the backward's tiles read, in messages that hold the
    rank's own part as well. Then the shards need not be saved.
    """
    rank, grid = attention.rank, attention.recipe.grid
    forward, backward = forward_plan(attention.recipe), backward_plan(attention.recipe)
    payloads = (Payload.QUERY, Payload.QUERY_GRAD_OUT, Payload.KEY_VALUE)
    for index, stage in enumerate(backward.program(rank)):
        fetch = _fetch_of(backward, rank, index)
        if any(t.source == rank and t.payload in payloads for t in fetch):
            return True
        for tile in stage.tiles:
            for of_keys, spans, heads in _sides(tile, forward.shape):
                kept = _kept_of_own(forward, rank, heads, of_keys=of_keys)
                for span in filter(None, (one.intersect(grid.own(rank)) for one in spans)):
                    is_kept = any(span.intersect(one) == span for one in kept)
                    if not is_kept and grid.num_tokens(span, of_keys=of_keys):
                        return True
    return False


def _kept_of_own(plan: Plan, rank: int, heads: Span, *, of_keys: bool) -> list[Span]:
    """Return a rank's own chunks that are in the messages which the forward keeps."""
    return [
        transfer.span
        for index in range(min(plan.num_kept, len(plan.stages)))
        for transfer in _fetch_of(plan, rank, index)
        if transfer.source == transfer.destination
        and transfer.heads == heads
        and transfer.payload.is_of_keys == of_keys
    ]


def _sides(tile: Tile, shape: Shape) -> tuple[tuple[bool, tuple[Span, ...], Span], ...]:
    """Return what a tile reads: whether it is of keys, spans and heads."""
    return (False, tile.queries, tile.heads), (True, tile.keys, shape.kv_heads(tile.heads))


def _empty_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query))


_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _Contribution:
    """Results of tiles over some chunks and heads: one tensor, or two that belong together.

    Attributes:
        span: chunks.
        groups: of heads.
        tensors: (B, size, t, D), and for a statistic (B, size, t). Of several groups, (B, count,
            size, t, ...).
        has_arrived: others computed it; the tensors are views of a message.
    """

    span: Span
    groups: Groups
    tensors: tuple[Tensor, ...]
    has_arrived: bool = False

    def covers(self, heads: Span) -> bool:
        """Whether one of the heads is among those of the groups."""
        of = self.groups
        starts = range(of.start, of.start + of.count * of.step, of.step)
        return any(Span(start, start + of.size).intersect(heads) for start in starts)


@dataclass(frozen=True, slots=True)
class _Result:
    """One of the results that tiles contribute to.

    Attributes:
        names: of its tensors, in the order of the payload.
        payload: in which contributions to other ranks' chunks go home.
        merge: several contributions to the same chunks and heads into one, in the dtype given.
        merge_stack: several that are one tensor, not rounded.
        nothing: what it is, given zeros (B, h, t, D), of tokens that no tile is about.
    """

    names: tuple[str, ...]
    payload: Payload
    merge: Callable[[list[tuple[Tensor, ...]], torch.dtype], tuple[Tensor, ...]]
    merge_stack: Callable[..., tuple[Tensor, ...]]
    nothing: Callable[[Tensor], tuple[Tensor, ...]]


def _combine(partials: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return combine([Partial(*partial) for partial in partials], dtype=dtype)


def _sum(grads: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(sum_grads(of_one, dtype=dtype) for of_one in zip(*grads, strict=True))


def _sum_stacks(*stacks: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(sum_stack, stacks))


def _blind(zeros: Tensor) -> tuple[Tensor, ...]:
    lse = zeros.new_full(zeros.shape[:-1], -float("inf"), dtype=accumulation_dtype(zeros))
    return zeros, lse


_PARTIAL = _Result(("out", "lse"), Payload.PARTIAL, _combine, combine_stack, _blind)
_QUERY_GRAD = _Result(
    ("grad_query",), Payload.QUERY_GRAD, _sum, _sum_stacks, lambda zeros: (zeros,)
)
_KEY_VALUE_GRAD = _Result(
    ("grad_key", "grad_value"),
    Payload.KEY_VALUE_GRAD,
    _sum,
    _sum_stacks,
    lambda zeros: (zeros, torch.zeros_like(zeros)),
)
_RESULTS = (_PARTIAL, _QUERY_GRAD, _KEY_VALUE_GRAD)


class _Rank:
    """One rank at work on a plan."""

    def __init__(
        self,
        plan: Plan,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extras: Sequence[Tensor],
    ) -> None:
        self.plan, self.attention, self.rank = plan, attention, attention.rank
        self.row, self.kernel = KERNELS[attention.kernel], get_kernel(attention.kernel)
        self.own = plan.grid.own(self.rank)
        self.program = plan.program(self.rank)
        tokens = Tokens(plan.grid, query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        self.store = Store(tokens, self.rank, attention.group_name, like=query)
        self.extras = attention.extras(extras)
        self.masks = TileMasks(attention.rule, tokens, self.own, self.extras, query)
        self.bias_grads: list[tuple[Tile, Tensor]] = []
        self.contributions: dict[Payload, list[_Contribution]] = {r.payload: [] for r in _RESULTS}
        self.fetches = [_fetch_of(plan, self.rank, index) for index in range(len(self.program))]
        self.homes = [_home_of(plan, self.rank, index) for index in range(len(self.program))]
        self.store.note_sent(self.fetches)
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
        """Whether this rank's queries are differentiated from a message, by whichever rank."""
        payloads = (Payload.QUERY_GRAD_OUT, Payload.GRAD_OUT)
        return any(
            transfer.payload in payloads and transfer.source == self.rank
            for fetch in self.fetches
            for transfer in fetch
        )

    def run_stages(self, compute: Callable[[_Rank, Tile], None]) -> list[Tensor]:
        """Run all stages; return the buffers of the exchanges that are to be kept."""
        kept: list[Tensor] = []
        homeward: Arriving | None = None
        self._wait_fetch(self._start_fetch(0), kept if self.plan.num_kept else [])
        for index, stage in enumerate(self.program):
            fetching = self._start_fetch(index + 1)
            self._put_together(stage.tiles)
            for tile in stage.tiles:
                compute(self, tile)
            # What the stage before sent home was in flight over this stage's tiles.
            self._wait_home(homeward)
            homeward = self._start_home(index)
            self.store.forget(self._spans_needed_after(index), self.own)
            self._wait_fetch(fetching, kept if index + 1 < self.plan.num_kept else [])
        self._wait_home(homeward)
        return kept

    def _put_together(self, tiles: Sequence[Tile]) -> None:
        """Put together the keys of tiles that lie apart, once for all tiles."""
        spans_of: dict[Span, list[tuple[Span, ...]]] = {}
        for tile in tiles:
            spans_of.setdefault(self.plan.shape.kv_heads(tile.heads), []).append(tile.keys)
        for heads, spans in spans_of.items():
            if len(set(spans)) > 1:
                self.store.put_together(spans, heads)

    def _start_fetch(self, index: int) -> Arriving | None:
        # Whether there is an exchange does not depend on the rank: one that takes no part hangs.
        if index == len(self.program) or not self.plan.stages[index].fetch:
            return None
        return self.store.start(self.fetches[index])

    def _wait_fetch(self, fetching: Arriving | None, kept: list[Tensor]) -> None:
        if fetching is None:
            return
        kept.append(self.store.wait(fetching))
        by_heads: dict[Span, list[Piece]] = {}
        for words in self.store.pop_arrived("delta"):
            by_heads.setdefault(words.heads, []).append(words)
        for of_heads in by_heads.values():
            self._stand_in(of_heads)

    def _stand_in(self, words: Sequence[Piece]) -> None:
        """Make what stands in for out in rows of others, in one kernel for all that arrived."""
        spans = tuple(span for piece in words for span in piece.spans)

        def put(name: str, tokens_first: Tensor) -> None:
            tensor = tokens_first.movedim(0, SEQUENCE_DIM)
            self.store.put(name, replace(words[0], spans=spans, tensor=tensor))

        grad_out = _tokens_first([self.store.beside("grad_out", piece) for piece in words])
        put("out", make_stand_in(_tokens_first(words), grad_out))
        if self.row.plain.has_lse_in_order:
            lse = _tokens_first([self.store.pop_beside("lse", piece) for piece in words])
            put("lse", copy_statistic(lse, grad_out))

    def _start_home(self, index: int) -> Arriving | None:
        if not self.plan.stages[index].home:
            return None
        home = self.homes[index]
        names: set[str] = set()
        leaving = [transfer for transfer in home if transfer.source == self.rank]
        for result in _RESULTS:
            for span, heads in _runs_of(leaving, result.payload):
                merged = self._merge(result, span, heads, of_tiles=True)
                for name, tensor in zip(result.names, merged, strict=True):
                    of_keys = result.payload.is_of_keys
                    self.store.add(name, span, heads, tensor, of_keys=of_keys)
                names |= set(result.names)
            of_payload = [t for t in leaving if t.payload is result.payload]
            self._withdraw(result.payload, [t for t in of_payload if t.destination == self.rank])
        started = self.store.start(home)
        self.store.drop(names)
        return started

    def _withdraw(self, payload: Payload, transfers: Sequence[Transfer]) -> None:
        """Let go of what this rank computed of its own chunks and sends itself."""
        gone = {transfer.heads for transfer in transfers}
        left = []
        for one in self.contributions[payload]:
            if one.has_arrived or one.groups.whole not in gone:
                left.append(one)
                continue
            around = Span(0, self.own.start), Span(self.own.stop, self.plan.grid.num_chunks)
            for part in filter(None, map(one.span.intersect, around)):
                left.append(self._cut(one, part, one.groups.whole, payload))
        self.contributions[payload] = left

    def _wait_home(self, homeward: Arriving | None) -> None:
        if homeward is None:
            return
        for stack in self.store.arrive(homeward):
            result = next(result for result in _RESULTS if result.payload is stack.payload)
            if stack.tensors[0].shape[0] == 1:
                tensors = tuple(tensor.squeeze(0) for tensor in stack.tensors)
            else:
                tensors = result.merge_stack(*stack.tensors)
            of = replace(stack.heads, repeat=1)
            self.contributions[result.payload].append(
                _Contribution(stack.span, of, tensors, has_arrived=True)
            )

    def contribute(
        self, result: _Result, spans: Sequence[Span], heads: Span, tensors: Sequence[Tensor]
    ) -> None:
        """Note what a tile computed over spans, concatenated, and heads."""
        of_keys = result.payload.is_of_keys
        lengths = [self.store.tokens.of(span, of_keys=of_keys) for span in spans]
        parts = [t.split(lengths, SEQUENCE_DIM) if len(spans) > 1 else [t] for t in tensors]
        groups = Groups(heads.start, len(heads), len(heads), 1)
        for span, *of_span in zip(spans, *parts, strict=True):
            one = _Contribution(span, groups, tuple(of_span))
            self.contributions[result.payload].append(one)

    def result(self, result: _Result) -> tuple[Tensor, ...] | None:
        """Return this rank's own part of a result; None if it holds no tokens."""
        shape, is_of_keys = self.plan.shape, result.payload.is_of_keys
        if self.store.tokens.of(self.own, of_keys=is_of_keys) == 0:
            return None
        heads = shape.kv_heads(shape.all_heads) if is_of_keys else shape.all_heads
        return self._merge(result, self.own, heads)

    @property
    def needs_math(self) -> bool:
        """Whether tiles are what no kernel does."""
        is_changed = self.masks.rule.score != SCORE
        of_scores = self.attention.has_bias or self.attention.dropout_p > 0
        return of_scores or (is_changed and self.under_rule is None)

    @property
    def under_rule(self) -> type[RuleKernel] | None:
        """What reads the rule itself; None if nothing does here."""
        like, kernel = self.store.like, self.row.under_rule
        serves = kernel.serves(self.masks.rule, like.shape[-1], is_traced=is_fake(like))
        return kernel if serves else None

    def has_mask(self, tile: Tile) -> bool:
        """Whether something happens to a tile's scores, be it that -inf is added."""
        rule = self.masks.rule
        return tile.mask is Mask.PARTIAL or bool(rule.bias) or rule.score != SCORE

    def skips_blocks(self, tile: Tile) -> bool:
        """Whether a tile's kernel reads the rule itself."""
        return self.under_rule is not None and self.has_mask(tile) and not self.needs_math

    def kernel_of(self, tile: Tile) -> Kernel:
        """Return what computes a tile, if it is not `Math`."""
        if self.under_rule is None or not self.skips_blocks(tile):
            return self.kernel
        indices, options = self.masks.indices(tile), self.attention.kernel_options
        return AnyScale(self.under_rule(self.masks.rule, indices, options))

    def parts_of(
        self, tile: Tile, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[slice, TileCall, Tensor | None]]:
        """Yield a tile in parts of its rows, each of no more scores than are made at once.

        With each part come its rows, and what is kept of its probabilities under dropout.
        """
        scale = self.attention.scale
        if not self.needs_math and (self.skips_blocks(tile) or not self.has_mask(tile)):
            yield _ALL, TileCall(query, key, value, tile.mask is Mask.CAUSAL, scale), None
            return
        for rows in self._row_slices(tile, query, key):
            keep = None
            if self.attention.dropout_p:
                keep = self.masks.keep(tile, rows, self.attention.dropout_p)
            bias = self.masks.bias(tile, rows)
            is_causal = tile.mask is Mask.CAUSAL and bias is None
            part = query[:, :, rows] if rows != _ALL else query
            change = self.masks.change(tile, rows)
            yield rows, TileCall(part, key, value, is_causal, scale, bias, change), keep

    def _row_slices(self, tile: Tile, query: Tensor, key: Tensor) -> Iterator[slice]:
        num_queries, num_keys = (size_hint(t.shape[SEQUENCE_DIM]) for t in (query, key))
        # On CUDA, Inductor repeats a mask for each head.
        width = size_hint(query.shape[0]) * len(tile.heads)
        row_bytes = width * num_keys * (4 if self.needs_math else query.dtype.itemsize)
        num_rows = max(1, MAX_SCORE_BYTES // max(1, row_bytes))
        for start in range(0, num_queries, num_rows):
            yield slice(start, start + num_rows) if num_rows < num_queries else _ALL

    def bias_grad(self) -> Tensor:
        """Return the gradient of the bias: of each tile in its place, of the others 0."""
        return self.masks.put_together(self.bias_grads).to(self.extras.tables[-1].dtype)

    def _merge(
        self, result: _Result, span: Span, heads: Span, *, of_tiles: bool = False
    ) -> tuple[Tensor, ...]:
        """Merge contributions to a span and heads, wherever their borders are.

        Args:
            result: which.
            span: chunks.
            heads: of the result.
            of_tiles: only what this rank computed with exactly these heads. What arrived, or was
                computed with others, is not to leave with it.
        """
        near = [
            one
            for one in self.contributions[result.payload]
            if one.span.intersect(span) and one.covers(heads)
        ]
        if of_tiles:
            near = [one for one in near if not one.has_arrived and one.groups.whole == heads]
        count, folded, all_heads = _fold(near, heads)
        is_grouped = count > 1
        of_cells = self._merge_rows(result, list(_cells(folded, span, all_heads)), count)
        if len(folded) == 1 and folded[0].has_arrived:
            # Results of ops own their memory.
            of_cells = tuple(_copy(tensor, is_grouped=is_grouped) for tensor in of_cells)
        return tuple(t.flatten(1, 2) for t in of_cells) if is_grouped else of_cells

    def _merge_rows(
        self, result: _Result, rows: Sequence[tuple[Span, list[_Cell]]], count: int
    ) -> tuple[Tensor, ...]:
        """Merge the cells of all heads, each with its heads, into one tensor of each name."""
        is_grouped, payload = count > 1, result.payload
        by_heads = []
        together = _alike(rows)
        if len(rows) > 1 and together is not None:
            # Heads of several stages, beside what was computed for all heads: one kernel for all.
            heads = Span(rows[0][0].start, rows[-1][0].stop)
            cells = []
            for part, columns in together:
                joined = []
                for column in columns:
                    if all(one is column[0] for one in column):
                        joined.append(self._cut(column[0], part, heads, payload))
                        continue
                    of_rows = [
                        self._cut(one, part, some_heads, payload).tensors
                        for one, (some_heads, _) in zip(column, rows, strict=True)
                    ]
                    tensors = _join(of_rows, HEADS_DIM, is_grouped=is_grouped)
                    groups = replace(column[0].groups, start=heads.start, size=len(heads))
                    joined.append(replace(column[0], span=part, groups=groups, tensors=tensors))
                cells.append((part, joined))
            rows = [(heads, cells)]
        for some_heads, cells in rows:
            merged = [self._merge_cell(result, part, some_heads, of, count) for part, of in cells]
            row = [cell for cell in merged if cell]
            by_heads.append(_join(row, SEQUENCE_DIM, is_grouped=is_grouped))
        return _join(by_heads, HEADS_DIM, is_grouped=is_grouped)

    def _merge_cell(
        self,
        result: _Result,
        span: Span,
        heads: Span,
        contributions: Sequence[_Contribution],
        count: int,
    ) -> tuple[Tensor, ...]:
        """Merge contributions that all cover a span and heads; () if that is no tokens."""
        cuts = [self._cut(one, span, heads, result.payload).tensors for one in contributions]
        if cuts:
            return result.merge(cuts, self.store.like.dtype)
        like, of_keys = self.store.like, result.payload.is_of_keys
        length = self.store.tokens.of(span, of_keys=of_keys)
        if is_known(length == 0):
            return ()
        groups = (count,) if count > 1 else ()
        shape = (like.shape[0], *groups, len(heads), length, like.shape[-1])
        return result.nothing(like.new_zeros(shape))

    def _cut(self, one: _Contribution, span: Span, heads: Span, payload: Payload) -> _Contribution:
        """Return a contribution to a part of its span, and of the heads of each of its groups."""
        before = self.store.tokens.of(Span(one.span.start, span.start), of_keys=payload.is_of_keys)
        length = self.store.tokens.of(span, of_keys=payload.is_of_keys)
        of, tensors = one.groups, one.tensors
        grouped = int(of.count > 1)
        if span != one.span:
            tensors = tuple(t.narrow(SEQUENCE_DIM + grouped, before, length) for t in tensors)
        if (heads.start, len(heads)) != (of.start, of.size):
            start = heads.start - of.start
            tensors = tuple(t.narrow(HEADS_DIM + grouped, start, len(heads)) for t in tensors)
            of = replace(of, start=heads.start, size=len(heads))
        return replace(one, span=span, groups=of, tensors=tensors)

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


def _tokens_first(pieces: Sequence[Piece]) -> Tensor:
    """Put pieces together as messages have them, (t, B, h, ...). Inductor makes it one kernel."""
    return _concatenate([[piece.tensor.movedim(SEQUENCE_DIM, 0)] for piece in pieces], 0)[0]


def _attend_tile(rank: _Rank, tile: Tile) -> None:
    kv_heads = rank.plan.shape.kv_heads(tile.heads)
    query = rank.store.take("query", tile.queries, tile.heads)
    key = rank.store.take("key", tile.keys, kv_heads)
    value = rank.store.take("value", tile.keys, kv_heads)
    kernel = rank.kernel_of(tile)
    partials = [
        Math().forward(call, keep) if rank.needs_math else kernel.forward(call)
        for _, call, keep in rank.parts_of(tile, query, key, value)
    ]
    rank.contribute(_PARTIAL, tile.queries, tile.heads, _concatenate(partials, SEQUENCE_DIM))


def _differentiate_tile(rank: _Rank, tile: Tile) -> None:
    kv_heads = rank.plan.shape.kv_heads(tile.heads)
    names = ("grad_out", "query", "out", "lse")
    of_queries = [rank.store.take(name, tile.queries, tile.heads) for name in names[:-1]]
    # What several tiles read in the order of its shape is copied once.
    is_in_order = rank.row.plain.has_lse_in_order
    lse = rank.store.take(names[-1], tile.queries, tile.heads, is_in_order=is_in_order)
    of_queries.append(lse)
    key = rank.store.take("key", tile.keys, kv_heads)
    value = rank.store.take("value", tile.keys, kv_heads)
    kernel = rank.kernel_of(tile)
    grads, bias_grads = list[Sequence[Tensor]](), list[Tensor]()
    for rows, call, keep in rank.parts_of(tile, of_queries[1], key, value):
        grad_out, _, out, lse = [t[:, :, rows] for t in of_queries] if rows != _ALL else of_queries
        if rank.needs_math:
            *of_tile, of_bias = Math().backward(
                call, grad_out, Partial(out, lse), keep, needs_bias_grad=rank.attention.has_bias
            )
            grads.append(of_tile)
            bias_grads += [of_bias] if of_bias is not None else []
        else:
            grads.append(kernel.backward(call, grad_out, Partial(out, lse)))
    dq, dk, dv = (list(of_one) for of_one in zip(*grads, strict=True))
    if bias_grads:
        rank.bias_grads.append((tile, torch.cat(bias_grads, SEQUENCE_DIM)))
    whole_dq = _concatenate([[part] for part in dq], SEQUENCE_DIM)
    rank.contribute(_QUERY_GRAD, tile.queries, tile.heads, whole_dq)
    # A sum of parts is rounded when it is added to what other tiles computed, and not before.
    dtype = accumulation_dtype(dk[0]) if len(dk) > 1 else None
    sums = [sum_grads(of_one, dtype=dtype) for of_one in (dk, dv)]
    rank.contribute(_KEY_VALUE_GRAD, tile.keys, kv_heads, sums)


def _runs_of(leaving: Sequence[Transfer], payload: Payload) -> list[tuple[Span, Span]]:
    """Return the (span, heads) of the transfers of a payload, those that adjoin as one.

    They adjoin if the same is sent beside them: what is packed by two concatenations is stored.
    """
    beside: dict[tuple[int, Span], list[tuple[Payload, Span]]] = {}
    for transfer in leaving:
        of_record = beside.setdefault(_end_of(transfer), [])
        of_record.append((transfer.payload, transfer.heads))
    of_payload = [transfer for transfer in leaving if transfer.payload is payload]
    runs: list[tuple[Span, Span]] = []
    before: list[tuple[Payload, Span]] = []
    for transfer in sorted(of_payload, key=lambda t: (t.heads, t.span)):
        heads, span, with_it = transfer.heads, transfer.span, beside[_end_of(transfer)]
        adjoins = runs and runs[-1][1] == heads and runs[-1][0].stop == span.start
        if adjoins and before == with_it:
            span = Span(runs.pop()[0].start, span.stop)
        runs.append((span, heads))
        before = with_it
    return runs


def _end_of(transfer: Transfer) -> tuple[int, Span]:
    return transfer.destination, transfer.span


def _fetch_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of a fetch, with what it sends itself.

    A tile over its own and fetched chunks reads them where they arrived, if they arrive together.
    """
    stage, grid = plan.program(rank)[index], plan.grid
    fetched = [transfer for transfer in stage.fetch if transfer.destination == rank]
    own: dict[Transfer, None] = {}
    for tile in (*stage.tiles, *stage.backward_tiles):
        for of_keys, spans, heads in _sides(tile, plan.shape):
            beside = [
                transfer
                for transfer in fetched
                if transfer.payload.is_of_keys == of_keys
                and transfer.heads == heads
                and any(transfer.span.intersect(span) for span in spans)
            ]
            inside = [span.intersect(grid.own(rank)) for span in spans] if beside else []
            for span in filter(None, inside):
                if grid.num_tokens(span, of_keys=of_keys):
                    own[Transfer(beside[0].payload, span, heads, rank, rank)] = None
    return tuple(sorted((*stage.fetch, *own), key=message_order)) if own else stage.fetch


def _home_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of results, with what it sends itself.

    Where ranks share the heads, those of all ranks arrive together.
    """
    program, grid = plan.program(rank), plan.grid
    home, own = program[index].home, grid.own(rank)
    itself: list[Transfer] = []
    for payload in dict.fromkeys(t.payload for t in home if t.source == rank):
        everything = _heads_of(plan.shape, plan.shape.all_heads, payload)
        for heads in sorted(_heads_leaving(home, rank, payload) - {everything}):
            spans: list[Span] = []
            last = 0
            for number, stage in enumerate(program):
                for tile in stage.tiles:
                    if _heads_of(plan.shape, tile.heads, payload) == heads:
                        sides = tile.keys if payload.is_of_keys else tile.queries
                        inside = [part for side in sides if (part := side.intersect(own))]
                        spans += inside
                        last = number if inside else last
            # Once, with the first results that leave when it is all there.
            is_now = not any(
                heads in _heads_leaving(stage.home, rank, payload) for stage in program[last:index]
            )
            if last <= index and is_now:
                itself += [
                    Transfer(payload, span, heads, rank, rank)
                    for span in join_spans(spans)
                    if grid.num_tokens(span, of_keys=payload.is_of_keys)
                ]
    return tuple(sorted((*home, *itself), key=message_order)) if itself else home


def _heads_of(shape: Shape, heads: Span, payload: Payload) -> Span:
    return shape.kv_heads(heads) if payload.is_of_keys else heads


def _heads_leaving(home: Sequence[Transfer], rank: int, payload: Payload) -> set[Span]:
    return {t.heads for t in home if t.payload is payload and t.source == rank}


def _fold(
    contributions: Sequence[_Contribution], heads: Span
) -> tuple[int, list[_Contribution], Span]:
    """Write heads as a number of groups, if contributions are to so many groups, or to all heads.

    Returns:
        How many groups, the contributions to the heads of each of them, and the heads of one.
    """
    grouped = next((one.groups for one in contributions if one.groups.count > 1), None)
    if grouped is None:
        return 1, list(contributions), heads
    count, step = grouped.count, grouped.step
    folded = []
    for one in contributions:
        of = one.groups
        if (of.count, of.step, of.whole) == (count, step, heads):
            start = of.start - heads.start
            folded.append(replace(one, groups=replace(of, start=start)))
        elif of.count == 1 and of.whole == heads and len(heads) == count * step:
            tensors = tuple(t.unflatten(HEADS_DIM, (count, step)) for t in one.tensors)
            folded.append(replace(one, groups=Groups(0, step, step, count), tensors=tensors))
        else:
            break
    else:
        return count, folded, Span(0, step)
    apart = [
        replace(
            one,
            groups=Groups(of.start + i * of.step, of.size, of.size, 1),
            tensors=tuple(tensor.select(1, i) for tensor in one.tensors)
            if of.count > 1
            else one.tensors,
        )
        for one in contributions
        for of in [one.groups]
        for i in range(of.count)
    ]
    return 1, [one for one in apart if one.covers(heads)], heads


# A part of a span, and what contributes to it.
_Cell = tuple[Span, list[_Contribution]]


def _alike(
    rows: Sequence[tuple[Span, list[_Cell]]],
) -> list[tuple[Span, list[list[_Contribution]]]] | None:
    """Return the cells of rows that are alike but for contributions to different heads.

    Rows are alike if they are cut at the same chunks, if as many contribute to each cell, and if
    one contribution at least, and all but one, is to all rows.

    Returns:
        For each part of the span its contributions, each as a list of one for each row.
    """
    found = []
    for cells in zip(*(cells for _, cells in rows), strict=False):
        part, first = cells[0]
        common = [one for one in first if all(any(one is o for o in of) for _, of in cells)]
        rest = [[one for one in of if not any(one is c for c in common)] for _, of in cells]
        is_alike = all(other == part for other, _ in cells) and all(len(of) == 1 for of in rest)
        if not common or not is_alike:
            return None
        found.append((part, [*([one] * len(rows) for one in common), [of[0] for of in rest]]))
    return found if all(len(cells) == len(found) for _, cells in rows) else None


def _cells(
    contributions: Sequence[_Contribution], span: Span, heads: Span
) -> Iterator[tuple[Span, list[_Cell]]]:
    """Cut a span and heads into cells that no contribution covers in part.

    Yields heads and, for each part of the span, the contributions that cover both.
    """
    of_groups = [Span(of.start, of.start + of.size) for of in (c.groups for c in contributions)]
    for some_heads in _between(of_groups, heads):
        row = [
            one
            for one, own_heads in zip(contributions, of_groups, strict=True)
            if own_heads.intersect(some_heads)
        ]
        yield (
            some_heads,
            [
                (part, [one for one in row if one.span.intersect(part)])
                for part in _between([one.span for one in row], span)
            ],
        )


def _between(spans: Sequence[Span], within: Span) -> list[Span]:
    """Cut `within` at all borders of the spans."""
    edges = {within.start, within.stop}
    for span in spans:
        edges |= {edge for edge in (span.start, span.stop) if within.start < edge < within.stop}
    ordered = sorted(edges)
    return [Span(a, b) for a, b in pairwise(ordered)]


def _concatenate(parts: Sequence[Sequence[Tensor]], dim: int) -> tuple[Tensor, ...]:
    if len(parts) == 1:
        return tuple(parts[0])
    return tuple(torch.cat(of_one, dim) for of_one in zip(*parts, strict=True))


def _join(parts: Sequence[Sequence[Tensor]], dim: int, *, is_grouped: bool) -> tuple[Tensor, ...]:
    """Concatenate results over spans or heads; rows of groups of heads token by token."""
    if not is_grouped or len(parts) == 1:
        return _concatenate(parts, dim)
    joined = []
    for of_one in zip(*parts, strict=True):
        if of_one[0].ndim == 4:
            joined.append(torch.cat(of_one, dim + 1))
            continue
        tokens_first = [tensor.movedim(SEQUENCE_DIM + 1, 1) for tensor in of_one]
        whole = torch.cat(tokens_first, 1 if dim == SEQUENCE_DIM else dim + 2)
        joined.append(whole.movedim(1, SEQUENCE_DIM + 1))
    return tuple(joined)


def _copy(tensor: Tensor, *, is_grouped: bool) -> Tensor:
    """Return a copy, rows of groups of heads token by token."""
    if not is_grouped or tensor.ndim == 4:
        return tensor.clone(memory_format=torch.contiguous_format)
    tokens_first = tensor.movedim(SEQUENCE_DIM + 1, 1)
    copy = tokens_first.clone(memory_format=torch.contiguous_format)
    return copy.movedim(1, SEQUENCE_DIM + 1)
