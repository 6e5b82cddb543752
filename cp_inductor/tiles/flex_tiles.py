"""A tile under a mask on CUDA: the templates of flex attention, which skip blocks without a pair.

    rule        (k - q <= 0) & Eq(t0(b, k), t0(b, q))
      =>
    mask_mod    positions_k[n] <= positions_q[m]  &  t0_k[b, n] == t0_q[b, m]
    score_mod   score
    block mask  of each row of blocks those that hold some pairs, and those that hold all

Inductor generates one kernel of the template, the mask and the score function. The block mask is
computed from bounds of the tables when the program runs, so it follows the batch. No tensor has a
value for every score, except what the model itself made, and KV heads are not repeated.

Only compiled code uses this: in eager, the op of flex attention makes all scores.

Shapes: B batch, H query heads of the tile, S its queries, T its keys.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import sympy
import torch
from sympy import Expr
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_inductor.mask.language import BATCH, INDICES, KEY, QUERY, SCORE, number_of, tables_of
from cp_inductor.mask.rule import Rule
from cp_inductor.tiles.block_tables import BLOCK, list_blocks
from cp_inductor.tiles.kernels import Gradients, Partial, RuleKernel, TileCall, with_whole_rows
from cp_inductor.tiles.stand_in import delta_of
from cp_inductor.tiles.tile_masks import Indices, bias_dtype
from cp_inductor.torch_private.flex import (
    FLEX_BACKWARD,
    FLEX_FORWARD,
    Flex,
    flex_backward,
    flex_forward,
)

# What `list_blocks` returns, as `BlockMask` takes it.
LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)

# The templates multiply matrices of at least so many columns.
MIN_HEAD_DIM = 16


class FlexCUDA(RuleKernel):
    """Flex attention: float32 and half types, G <= H, D of 16 or more, scores that change."""

    forward_op, backward_op = FLEX_FORWARD, FLEX_BACKWARD
    device, name, takes_delta, needs_graph = "cuda", "flex", True, True

    @classmethod
    def obstacle(cls, rule: Rule, head_dim: Any) -> str | None:
        """See `RuleKernel.obstacle`."""
        if head_dim >= MIN_HEAD_DIM:
            return None
        return f"head dim {head_dim} on CUDA, where flex attention wants {MIN_HEAD_DIM}"

    def __init__(
        self, rule: Rule, indices: Indices, options: str = "", is_computed: Tensor | None = None
    ) -> None:
        # If the rule changes the score, the bias is a part of the change.
        is_changed, dtype = rule.score != SCORE, bias_dtype(rule, indices.dtype)
        mask = _capture(rule.allowed, indices)
        scores = _capture(rule.score if is_changed else rule.bias, indices)

        def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor, *buffers: Tensor) -> Tensor:
            return _AtScore(indices, (b, h, m, n, *buffers), mask).evaluate(rule.allowed)

        def score_mod(s: Tensor, *at: Tensor) -> Tensor:
            if not is_changed and not rule.bias:
                return s
            here = _AtScore(indices, at, scores)
            if is_changed:
                return here.evaluate(rule.score, score=s).to(s.dtype)
            return s + here.as_tensor(here.evaluate(rule.bias)).to(dtype)

        def slope(s: Tensor, *at: Tensor) -> Tensor:
            here = _AtScore(indices, at, scores)
            return here.as_tensor(here.evaluate(rule.slope, score=s)).to(s.dtype)

        self.rule, self.indices, self.is_computed = rule, indices, is_computed
        self.options: dict[str, Any] = literal_eval(options) if options else {}
        self.mask_mod, self.score_mod = mask_mod, score_mod
        self.slope = slope if is_changed else None
        self.buffers = tuple(scores.values()), tuple(mask.values())

    def _attend(self, call: TileCall) -> Partial:
        query, key, value = with_whole_rows(*call.tensors)
        return Partial(*flex_forward(query, key, value, self._flex(call, has_columns=False)))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        # In the place of out it takes <out, grad_out>, (B, H, S).
        out_or_delta, lse = whole
        is_out = out_or_delta.ndim == grad_out.ndim
        delta = delta_of(out_or_delta, grad_out) if is_out else out_or_delta
        query, key, value, grad_out = with_whole_rows(*call.tensors, grad_out)
        flex = self._flex(call, has_columns=True)
        return flex_backward(query, key, value, grad_out, lse, delta, flex)

    def _flex(self, call: TileCall, *, has_columns: bool) -> Flex:
        block_mask = self.block_mask(has_columns=has_columns)
        functions = (self.score_mod, self.slope, call.factor, *self.buffers, self.options)
        return Flex(block_mask, *functions)

    def block_mask(self, *, has_columns: bool) -> BlockMask:
        """Return the blocks of each row that hold pairs; and of each column, if it has them."""
        indices = self.indices
        tile: Any = indices.geometry.encode(), indices.batch, indices.dtype
        of_rule = indices.tables, Rule(self.rule.allowed).format()
        lists = list_blocks(indices.of(QUERY), *of_rule, *tile, has_columns, self.is_computed)
        return BlockMask(
            (indices.geometry.num_queries, indices.geometry.num_keys),
            **dict(zip_longest(LISTS, lists)),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=self.mask_mod,
        )


def _capture(expression: Any, indices: Indices) -> dict[object, Tensor]:
    """Return the tensors that an expression of a rule reads, which templates take as buffers."""
    captured: dict[object, Tensor] = {}
    for symbol in sorted(expression.free_symbols & {QUERY, KEY}, key=str):
        if indices.geometry.run_of(symbol) is None:
            captured[symbol] = indices.of(symbol)
    for table in sorted(tables_of(expression), key=str):
        number, where = number_of(table), table.args
        if indices.is_cut(where):
            captured[number, where] = indices.part(number, where)
        else:
            captured[number] = indices.tables[number]
    return captured


class _AtScore(Indices):
    """The indices of one score, which are tensors without dims.

    Args:
        indices: of the tile.
        at: a batch entry, a head among the tile's, a query and a key; then buffers, which stand for
            the captured tensors.
        captured: see `_capture`.
    """

    def __init__(
        self, indices: Indices, at: Sequence[Tensor], captured: dict[object, Tensor]
    ) -> None:
        batch, dtype, device = indices.batch, indices.dtype, indices.device
        super().__init__(indices.geometry, indices.tables, batch, dtype, device)
        # Sums and differences of positions, and products of them, do not wrap.
        self.at = [index.to(torch.int64) for index in at[:4]]
        self.captured = dict(zip(captured, at[4:], strict=True))

    def of(self, symbol: sympy.Symbol) -> Tensor:
        """Return an index: of the whole attention along the sequence."""
        place = self.at[INDICES.index(symbol)]
        if symbol == BATCH:
            return place
        if symbol in self.captured:
            return self._at(self.captured[symbol])
        run = self.geometry.run_of(symbol)
        assert run is not None
        return place + run[0] if run[0] else place

    def boolean(self, value: bool) -> Tensor:
        """Return a condition that holds, or does not."""
        return torch.full((), value, dtype=torch.bool, device=self.device)

    def number(self, value: Expr) -> float:
        """Return a constant: what it meets here has no dims, and takes its dtype from a tensor."""
        return float(value)

    def _read(self, read: Expr, values: tuple[object, ...], place: Any) -> Tensor:
        number = number_of(read)
        if self.is_cut(read.args):
            value = self._at(self.captured[number, read.args])
        else:
            value = self.captured[number][tuple(self.as_tensor(value) for value in values)]
        return value if value.is_floating_point() else value.to(torch.int64)

    def _at(self, tensor: Tensor) -> Tensor:
        """Return the entry of a tensor (B | 1, H | 1, S | 1, T | 1)."""
        zero = self.at[0] * 0
        value: Tensor = tensor[
            tuple(zero if n == 1 else i for n, i in zip(tensor.shape, self.at, strict=True))
        ]
        return value
