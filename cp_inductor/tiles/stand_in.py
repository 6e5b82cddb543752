"""What stands in for out where a rank differentiates tiles of another's queries.

    rank 1                                   rank 0
    words = make_words(out, grad_out)   =>   out = make_stand_in(words, grad_out)

All that the backward of flash attention wants of out is delta = <out, grad_out>, a number per row
(Dao 2023, arXiv 2307.08691, section 2.3.2): it makes dS = P (dP - delta). But its kernels take out,
in the dtype of the inputs, and compute delta themselves, in float32. As a rank that does not own
the queries has their gradient, it is sent delta, and makes up an out that has this inner product.

Delta must be right to all bits of float32: where a row attends to one key, as to an attention
sink, dP - delta cancels to nothing, and what is left of it is the gradient. Anything near
delta grad_out / |grad_out|^2, rounded to bfloat16, is off by 2^-9. Here three coordinates, where
the gradient is largest, take delta one after the other, each what the rounding of the one before it
left; the others are 0:

    half a unit in the 8th bit of bfloat16, in the 11th of float16: three leave 2^-24 of delta

In float16, where one number for all of delta could overflow, the others share most of it first.
What has no three coordinates to take it is sent as it is: of gradients with one or two, the word is
not delta but the two numbers of out that count.

Shapes: B batch, H query heads, S queries, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Coordinates that take delta. Of bfloat16, two would leave 2^-16 of it.
NUM_PLACES = 3

# The bits that a half type leaves 0 in float32, where the number of a coordinate stands.
COLUMN_BITS = 13


def delta_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """Return <out, grad_out> of each row, (B, H, S), in float32 (float64 for float64)."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * grad_out.to(dtype)).sum(-1)


def make_words(out: Tensor, grad_out: Tensor) -> Tensor:
    """Return what another rank needs of out to differentiate its rows: a word per row.

    Args:
        out, grad_out: (B, H, S, D) of one dtype.

    Returns:
        (B, H, S), float32 (float64 for float64): delta, or bits of half types that are no number.
    """
    grad_out = _as_sent(grad_out)
    delta = delta_of(out, grad_out)
    if out.dtype.itemsize > 2:
        return delta
    keys, largest = _rank(grad_out)
    # Times the sign of the gradient, by which the other rank multiplies.
    bits = (out * grad_out.sign()).view(torch.int16)
    first, last = (_at(keys == key, bits) for key in largest[:2])
    packed = (last.to(torch.int32) << 16) | (first.to(torch.int32) & 0xFFFF)
    # NaN stays so, also where it is out at a coordinate that does not count: as the last of the two
    # numbers, the upper half of its bits is NaN in both half types.
    is_packed = _is_packed(largest).squeeze(-1) & ~delta.isnan()
    # Bits are chosen as integers: a float that is not a number need not keep its bits.
    return torch.where(is_packed, packed, delta.view(torch.int32)).view(delta.dtype)


def make_stand_in(words: Tensor, grad_out: Tensor) -> Tensor:
    """Return a tensor whose inner products with the gradient are those of out.

    Args:
        words: (B, H, S) of `make_words`.
        grad_out: (B, H, S, D).

    Returns:
        (B, H, S, D) in the dtype of grad_out. Not finite in rows where delta was not.
    """
    if grad_out.dtype.itemsize > 2:
        return _spread(words, grad_out)
    bits = words.view(torch.int32).unsqueeze(-1)
    return _fill(words, grad_out, [bits << 16 >> 16, bits >> 16])


def fold_lse_gradient(out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an out and a gradient under which the backward differentiates lse as well.

    The gradient of lse is subtracted from delta: dS = P (dP - delta + grad_lse). Of rows whose
    gradient is 0 at all coordinates but a few, the others become too small to matter: an out with
    some inner product needs a gradient.

    Args:
        out, grad_out: (B, H, S, D) of one dtype.
        grad_lse: (B, H, S).
    """
    grad_out = _as_sent(grad_out)
    info, delta = torch.finfo(out.dtype), delta_of(out, grad_out)
    delta = delta - grad_lse.to(delta.dtype)
    largest = grad_out.abs().amax(-1, keepdim=True)
    count = (grad_out != 0).sum(-1, keepdim=True)
    # Multiplied with a value, far below what rounding leaves of delta or of the gradient.
    fine = (largest * info.eps**3).clamp(min=max(info.tiny, 2.0**-60))
    grad_out = torch.where((count < NUM_PLACES) & (grad_out == 0), fine, grad_out)
    is_seen = delta.isfinite()
    make = _fill if out.dtype.itemsize == 2 else _spread
    stand_in = make(torch.where(is_seen, delta, 0.0), grad_out)
    return torch.where(is_seen.unsqueeze(-1), stand_in, out), grad_out


def store_beside(tensor: Tensor, grad_out: Tensor) -> Tensor:
    """Copy what a message has of rows, once for all tiles, in the kernel that makes the stand-in.

    What asks for the largest coordinate of the gradient, as the stand-in does, Inductor computes
    beside it; a plain copy it does not. By `as_strided` it stores the copy; else each tile would
    compute its part again.

    Args:
        tensor: (t, B, H), or (t, B, H, D).
        grad_out: (t, B, H, D).
    """
    largest = grad_out.abs().amax(-1, keepdim=tensor.ndim == grad_out.ndim)
    copied = torch.where(largest < 0, 0, tensor).contiguous()
    return copied.as_strided(copied.shape, copied.stride())


def _spread(delta: Tensor, grad_out: Tensor) -> Tensor:
    """Return what has the inner products delta (B, H, S) with the gradient (B, H, S, D).

    It is one number, with the signs of the gradient: a mean of out under the weights |grad_out|.
    """
    total = grad_out.abs().sum(-1)
    return (delta / total.masked_fill(total == 0, 1.0)).unsqueeze(-1) * grad_out.sign()


def _fill(delta: Tensor, grad_out: Tensor, packed: Sequence[Tensor] = ()) -> Tensor:
    """Return what has the inner products delta with a gradient of a half type.

    Args:
        delta: (B, H, S).
        grad_out: (B, H, S, D).
        packed: bits of the first two numbers, (B, H, S, 1), of rows whose gradient has no third.
    """
    dtype, limit = grad_out.dtype, torch.finfo(grad_out.dtype).max
    keys, largest = _rank(grad_out)
    sizes = [(key >> COLUMN_BITS << COLUMN_BITS).view(delta.dtype) for key in largest]
    is_packed, zero = _is_packed(largest), grad_out.new_zeros(())
    left, out = delta.unsqueeze(-1), zero
    if dtype is torch.float16:
        total = grad_out.abs().sum(-1, keepdim=True, dtype=delta.dtype)
        out = _round(left / total.masked_fill(total == 0, 1.0), dtype)
        left = left - out.to(delta.dtype) * (total - sizes[0] - sizes[1] - sizes[2])
        out = torch.where(is_packed, zero, out) if packed else out
    values: list[Tensor] = []
    for size in sizes:
        value = left / size
        # In bfloat16 the first is at most D times the largest of out. It is not limited, so that
        # what is not finite stays so.
        if values or dtype is torch.float16:
            value = value.clamp(-limit, limit)
        values.append(_round(value, dtype))
        left = left - values[-1].to(delta.dtype) * size
    if packed:
        halves = [bits.to(torch.int16).view(dtype) for bits in packed]
        values = [torch.where(is_packed, *two) for two in zip([*halves, zero], values, strict=True)]
    for key, value in zip(largest, values, strict=True):
        out = torch.where(keys == key, value, out)
    return out * grad_out.sign()


def _rank(grad_out: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a number per coordinate, which grows with its size, and the three largest of a row.

    It has the bits of the size in float32, and, so that no two are one, the coordinate below.
    """
    column = torch.arange(grad_out.shape[-1], device=grad_out.device, dtype=torch.int32)
    keys = grad_out.abs().to(torch.float32).view(torch.int32) | column
    largest = [keys.amax(-1, keepdim=True)]
    while len(largest) < NUM_PLACES:
        largest.append(torch.where(keys < largest[-1], keys, 0).amax(-1, keepdim=True))
    return keys, largest


def _is_packed(largest: Sequence[Tensor]) -> Tensor:
    """Whether rows have no third coordinate that is not 0."""
    return largest[-1] < 1 << COLUMN_BITS


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest that a half type has.

    By way of its bits, and through an operation on them: Inductor takes a cast there and back for
    none at all, and no correction is left of a rounding that did not happen.
    """
    return (value.to(dtype).view(torch.int16) ^ 0).view(dtype)


def _as_sent(grad_out: Tensor) -> Tensor:
    """Return a gradient as its dtype holds it, also in a kernel that has just computed it wider."""
    return _round(grad_out, grad_out.dtype) if grad_out.dtype.itemsize == 2 else grad_out


def _at(place: Tensor, tensor: Tensor) -> Tensor:
    """Return what a tensor is at one place of each row, or 0 if there is none."""
    return torch.where(place, tensor, 0).sum(-1, dtype=tensor.dtype)
