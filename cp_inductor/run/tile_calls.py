"""One tile of a plan: views of what it reads, a call of its kernel, and what becomes of the result.

    tile q[0:2] x kv[2:6], heads 0:4, CAUSAL
      =>
    query = store.take("query", 0:2)   key, value = store.take(..., 2:6)
    out, lse = kernel.forward(TileCall(query, key, value, is_causal=True))
    results.add(PARTIAL, 0:2, heads 0:4, (out, lse))

A tile under a mask is computed by a kernel that reads the rule itself, if one serves; else in parts
of its rows, each under a bias, so that no more scores are made at once than memory has room for.

Shapes: B batch, H query heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cp_inductor.mask.language import SCORE
from cp_inductor.plan import Mask, Shape, Tile
from cp_inductor.run.attention import Attention
from cp_inductor.run.merge import (
    KEY_VALUE_GRAD,
    PARTIAL,
    QUERY_GRAD,
    Results,
    concatenate_all,
)
from cp_inductor.run.store import Store
from cp_inductor.tiles.combine import accumulation_dtype, sum_grads
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import KERNELS, get_kernel
from cp_inductor.tiles.kernels import AnyScale, Kernel, Partial, RuleKernel, TileCall
from cp_inductor.tiles.math_tiles import Math
from cp_inductor.tiles.tile_masks import MAX_SCORE_BYTES, TileMasks
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import is_fake

_ALL = slice(None)


class TileCalls:
    """Computes tiles of a rank.

    Args:
        attention: what is computed.
        shape: of the plan.
        store: what the rank has at hand.
        masks: of its tiles.
        results: to which tiles contribute.
    """

    def __init__(
        self,
        attention: Attention,
        shape: Shape,
        store: Store,
        masks: TileMasks,
        results: Results,
    ) -> None:
        self.attention, self.shape, self.store = attention, shape, store
        self.masks, self.results = masks, results
        self.row, self.kernel = KERNELS[attention.kernel], get_kernel(attention.kernel)
        self.bias_grads: list[tuple[Tile, Tensor]] = []

    def attend(self, tile: Tile) -> None:
        """Compute the partial result of a tile."""
        kv_heads = self.shape.kv_heads(tile.heads)
        query = self.store.take("query", tile.queries, tile.heads)
        key = self.store.take("key", tile.keys, kv_heads)
        value = self.store.take("value", tile.keys, kv_heads)
        kernel = self._kernel_of(tile)
        partials = [
            Math().forward(call, keep) if self.needs_math else kernel.forward(call)
            for _, call, keep in self._parts_of(tile, query, key, value)
        ]
        self.results.add(PARTIAL, tile.queries, tile.heads, concatenate_all(partials, SEQUENCE_DIM))

    def differentiate(self, tile: Tile) -> None:
        """Compute the gradients of a tile."""
        kv_heads = self.shape.kv_heads(tile.heads)
        names = ("grad_out", "query", "out", "lse")
        of_queries = [self.store.take(name, tile.queries, tile.heads) for name in names[:-1]]
        # What several tiles read in the order of its shape is copied once.
        is_in_order = self.row.plain.has_lse_in_order
        lse = self.store.take(names[-1], tile.queries, tile.heads, is_in_order=is_in_order)
        of_queries.append(lse)
        key = self.store.take("key", tile.keys, kv_heads)
        value = self.store.take("value", tile.keys, kv_heads)
        kernel = self._kernel_of(tile)
        grads, bias_grads = list[Sequence[Tensor]](), list[Tensor]()
        for rows, call, keep in self._parts_of(tile, of_queries[1], key, value):
            grad_out, _, out, lse = (
                [t[:, :, rows] for t in of_queries] if rows != _ALL else of_queries
            )
            if self.needs_math:
                *of_tile, of_bias = Math().backward(
                    call, grad_out, Partial(out, lse), keep, needs_bias_grad=self.attention.has_bias
                )
                grads.append(of_tile)
                bias_grads += [of_bias] if of_bias is not None else []
            else:
                grads.append(kernel.backward(call, grad_out, Partial(out, lse)))
        dq, dk, dv = (list(of_one) for of_one in zip(*grads, strict=True))
        if bias_grads:
            self.bias_grads.append((tile, torch.cat(bias_grads, SEQUENCE_DIM)))
        whole_dq = concatenate_all([[part] for part in dq], SEQUENCE_DIM)
        self.results.add(QUERY_GRAD, tile.queries, tile.heads, whole_dq)
        # A sum of parts is rounded when it is added to what other tiles computed, and not before.
        dtype = accumulation_dtype(dk[0]) if len(dk) > 1 else None
        sums = [sum_grads(of_one, dtype=dtype) for of_one in (dk, dv)]
        self.results.add(KEY_VALUE_GRAD, tile.keys, kv_heads, sums)

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

    def _has_mask(self, tile: Tile) -> bool:
        """Whether something happens to a tile's scores, be it that -inf is added."""
        rule = self.masks.rule
        return tile.mask is Mask.PARTIAL or bool(rule.bias) or rule.score != SCORE

    def _skips_blocks(self, tile: Tile) -> bool:
        """Whether a tile's kernel reads the rule itself."""
        return self.under_rule is not None and self._has_mask(tile) and not self.needs_math

    def _kernel_of(self, tile: Tile) -> Kernel:
        """Return what computes a tile, if it is not `Math`."""
        if self.under_rule is None or not self._skips_blocks(tile):
            return self.kernel
        indices, options = self.masks.indices(tile), self.attention.kernel_options
        return AnyScale(self.under_rule(self.masks.rule, indices, options))

    def _parts_of(
        self, tile: Tile, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[slice, TileCall, Tensor | None]]:
        """Yield a tile in parts of its rows, each of no more scores than are made at once.

        With each part come its rows, and what is kept of its probabilities under dropout.
        """
        scale = self.attention.scale
        if not self.needs_math and (self._skips_blocks(tile) or not self._has_mask(tile)):
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
        return self.masks.put_together(self.bias_grads).to(self.masks.extras.tables[-1].dtype)
