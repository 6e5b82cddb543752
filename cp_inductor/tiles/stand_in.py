"""What stands in for out where a rank differentiates tiles of another's queries.

    rank 1                                   rank 0
    words = make_words(out, grad_out)   =>   out = make_stand_in(words, grad_out)

All that the backward of flash attention wants of out is delta = <out, grad_out>, a number per row
(Dao 2023, arXiv 2307.08691, section 2.3.2): it makes dS = P (dP - delta). But its kernels take out,
in the dtype of the inputs, and compute delta themselves, in float32. As a rank that does not own
the queries has their gradient, it is sent delta, and makes up an out that has this inner product.

Delta must be right to all bits of float32: where a row attends to one key, as to an attention
sink, dP - delta cancels to nothing, and what is left of it is the gradient. Anything near
delta grad_out / |grad_out|^2, rounded to bfloat16, is off by 2^-9. Here all coordinates but a few
are one number, rounded once, with the signs of the gradient; and those few, where the gradient is
largest, take what is missing one after the other, each what the rounding of the one before it left:

    half a unit in the 8th bit of bfloat16, in the 11th of float16: three leave 2^-24 of delta

No coordinate is much larger than those of out were, so that nothing overflows which did not. What
has no three coordinates to take it is sent as it is: of gradients with one or two, the word is not
delta but the two numbers of out that count.

Shapes: B batch, H query heads, S queries, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Coordinates that take what rounding leaves. Of bfloat16, two would leave 2^-16 of delta.
NUM_PLACES = 3

# Gradients with no more coordinates than this have their part of out in one word.
MAX_PACKED = 2


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
    delta = delta_of(out, grad_out)
    if out.dtype.itemsize > 2:
        return delta
    first, last = (_at(place, out.view(torch.int16)) for place in _ends(grad_out))
    packed = (last.to(torch.int32) << 16) | (first.to(torch.int32) & 0xFFFF)
    # NaN stays so, also where it is out at a coordinate that does not count: as the last of the two
    # numbers, the upper half of its bits is NaN in both half types.
    is_packed = _is_packed(grad_out) & ~delta.isnan()
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
    out = _spread(words, grad_out)
    if grad_out.dtype.itemsize > 2:
        return out
    bits = words.view(torch.int32).unsqueeze(-1)
    first, last = (half.to(torch.int16).view(out.dtype) for half in (bits << 16 >> 16, bits >> 16))
    at_first, at_last = _ends(grad_out)
    # If it is one coordinate, it is the first and the last.
    packed = torch.where(at_last, last, torch.where(at_first, first, 0.0))
    return torch.where(_is_packed(grad_out).unsqueeze(-1), packed, out)


def fold_lse_gradient(out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an out and a gradient under which the backward differentiates lse as well.

    The gradient of lse is subtracted from delta: dS = P (dP - delta + grad_lse). Of rows whose
    gradient is 0 at all coordinates but a few, the others become too small to matter: an out with
    some inner product needs a gradient.

    Args:
        out, grad_out: (B, H, S, D) of one dtype.
        grad_lse: (B, H, S).
    """
    info, delta = torch.finfo(out.dtype), delta_of(out, grad_out)
    delta = delta - grad_lse.to(delta.dtype)
    largest = grad_out.abs().amax(-1, keepdim=True)
    count = (grad_out != 0).sum(-1, keepdim=True)
    # Multiplied with a value, far below what rounding leaves of delta or of the gradient.
    fine = (largest * info.eps**3).clamp(min=max(info.tiny, 2.0**-60))
    grad_out = torch.where((count <= MAX_PACKED) & (grad_out == 0), fine, grad_out)
    is_seen = delta.isfinite()
    stand_in = _spread(torch.where(is_seen, delta, 0.0), grad_out)
    return torch.where(is_seen.unsqueeze(-1), stand_in, out), grad_out


def copy_statistic(statistic: Tensor, grad_out: Tensor) -> Tensor:
    """Copy a number per row out of a message, in the kernel that makes the stand-in.

    A kernel of CUDA wants them one behind the other. What asks for the largest coordinate of the
    gradient, as the stand-in does, Inductor computes beside it; a plain copy it does not.

    Args:
        statistic: (B, H, S).
        grad_out: (B, H, S, D).
    """
    place = _columns(grad_out) == grad_out.abs().argmax(-1, keepdim=True)
    return _at(place, statistic.unsqueeze(-1))


def _spread(delta: Tensor, grad_out: Tensor) -> Tensor:
    """Return what has the inner products delta (B, H, S) with the gradient (B, H, S, D)."""
    dtype, limit = grad_out.dtype, torch.finfo(grad_out.dtype).max
    delta = delta.unsqueeze(-1)
    grad, column = grad_out.to(delta.dtype), _columns(grad_out)
    # What stays from one step to the next is in the dtype of the inputs, which holds it exactly.
    size, places = grad_out.abs(), []
    for _ in range(min(NUM_PLACES, grad.shape[-1])):
        places.append(column == size.argmax(-1, keepdim=True))
        size = size.masked_fill(places[-1], -1.0)
    # No larger than the largest of out, as a mean of it under the weights |grad|.
    total = grad.abs().sum(-1, keepdim=True)
    even = _round(delta / total.masked_fill(total == 0, 1.0), dtype)
    out = torch.where(size < 0, 0.0, even.to(dtype) * grad_out.sign())
    left = delta - (out.to(delta.dtype) * grad).sum(-1, keepdim=True)
    for place in places:
        at = _at(place, grad).unsqueeze(-1)
        value = (left / at.masked_fill(at == 0, 1.0)).clamp(-limit, limit)
        value = _round(value.masked_fill(at == 0, 0.0), dtype)
        left = left - value * at
        out = torch.where(place, value.to(dtype), out)
    return torch.where(delta.isfinite(), out, delta.to(dtype))


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest that a dtype has, in the dtype of the value.

    By way of its bits, and through an operation on them: Inductor takes a cast there and back for
    none at all, and no correction is left of a rounding that did not happen.
    """
    if dtype.itemsize > 2:
        return value
    bits = value.to(dtype).view(torch.int16) ^ 0
    return bits.view(dtype).to(value.dtype)


def _ends(grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the first and the last coordinate are that count, (B, H, S, D)."""
    column, counts = _columns(grad_out), grad_out != 0
    first = torch.where(counts, column, grad_out.shape[-1]).amin(-1, keepdim=True)
    last = torch.where(counts, column, -1).amax(-1, keepdim=True)
    return column == first, column == last


def _is_packed(grad_out: Tensor) -> Tensor:
    count = (grad_out != 0).sum(-1)
    return (count > 0) & (count <= MAX_PACKED)


def _columns(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[-1], device=tensor.device)


def _at(place: Tensor, tensor: Tensor) -> Tensor:
    """Return what a tensor is at one place of each row, or 0 if there is none."""
    return torch.where(place, tensor, 0).sum(-1, dtype=tensor.dtype)
