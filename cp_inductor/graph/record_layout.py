"""Where the numbers of one token stand in a message: side by side, in a record of one width.

    query (2, 64) and grad_out (2, 64) in bfloat16, lse (2,) and delta (2,) in float32
      =>
    | query 128 | grad_out 128 | lse 4 | delta 4 |      264 elements of bfloat16, 528 bytes

A message has one dtype. Numbers of a wider dtype, such as statistics in float32, are moved as bits,
each in several elements, and begin where they can be read as what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Field:
    """What a record holds of one tensor.

    Attributes:
        shape: of one token.
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the fields of a record are, in elements of the message.

    Attributes:
        starts: of the fields.
        stop: where the last field ends.
        width: of a record, of which the last elements may be zeros.
    """

    starts: tuple[int, ...]
    stop: int
    width: int


def lay_out(fields: Sequence[Field], dtype: torch.dtype, alignment: int = 1) -> RecordLayout:
    """Place the fields of a record one behind the other.

    Args:
        fields: in order.
        dtype: of the message, no wider than that of any field.
        alignment: of the width, in elements.
    """
    starts, stop = [], 0
    for field in fields:
        ratio = field.dtype.itemsize // dtype.itemsize
        starts.append(_round_up(stop, ratio))
        stop = starts[-1] + prod(field.shape) * ratio
    return RecordLayout(tuple(starts), stop, _round_up(stop, alignment))


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
