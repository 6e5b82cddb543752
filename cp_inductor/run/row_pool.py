"""Rows that a rank has, from which tiles of a plan per batch gather theirs.

    row 0        zeros
    rows 1...    the rank's own tokens, group of heads by group of heads
    behind       what each stage fetched

Shapes: n rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_inductor.torch_private.sizes import is_known


class Pool:
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
            self.together = [cat_behind(parts) for parts in zip(*self.parts, strict=True)]
        return [tensor.index_select(0, rows) for tensor in self.together]


def _only(tensor: Tensor, is_row: Tensor) -> Tensor:
    """Put zeros in all rows but some."""
    return torch.where(is_row.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


def cat_behind(parts: Sequence[Tensor], first: float = 0.0) -> Tensor:
    """Return a row of one number, and the parts behind it, in their widest dtype."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    row = parts[0].new_full((1, *parts[0].shape[1:]), first, dtype=dtype)
    return torch.cat([row, *(part.to(dtype) for part in parts)])
