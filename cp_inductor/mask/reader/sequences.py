"""Compute and fit constant sequences.

cat([arange(5), arange(8)])                    d0 - 5*Step(d0, 5)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import sympy
import torch
from sympy import Expr
from torch import Tensor

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import Step
from cp_inductor.mask.reader.values import DIMS, READABLE, WHOLE_UP_TO, Unknown, Value, constant
from cp_inductor.torch_private.modes import without_modes

# Constant tensors of more numbers are not computed: 128 MiB in int64.
MAX_COMPUTED = 1 << 24
# A sequence of more steps becomes a table.
MAX_STEPS = 256
# If the values of a sequence spread this far, their differences might wrap in int64.
MAX_SPREAD = 1 << 62


def materialize(value: Value) -> Tensor:
    """Compute the tensor of a value.

    Raises:
        Unknown: the value reads a table, has several cases, is infinite or is too large.
    """
    value = value.exact()
    size = np.prod(value.shape, dtype=object)
    expression = value.expression()
    if value.tables() or size > MAX_COMPUTED or expression.is_infinite:
        raise Unknown
    indices = dict(zip(DIMS, np.ogrid[tuple(map(slice, value.shape))], strict=False))
    result = np.asarray(evaluate(expression, Operations(indices.__getitem__)))
    with without_modes():
        tensor = torch.from_numpy(np.broadcast_to(result, value.shape).copy())
        return tensor.to(value.dtype)


def fit(tensor: Tensor) -> Value:
    """Return a tensor that varies along one dim at most, as a line plus steps.

    Raises:
        Unknown: the tensor varies along several dims, or takes too many steps.
    """
    shape, dtype, size = tuple(tensor.shape), tensor.dtype, tensor.numel()
    if not 0 < size <= MAX_COMPUTED or len(shape) > len(DIMS) or dtype not in READABLE:
        raise Unknown
    with without_modes():
        if bool((tensor == tensor.flatten()[0]).all()):
            return replace(constant(tensor.flatten()[0].item(), shape), dtype=dtype)
        if dtype in WHOLE_UP_TO and not bool(
            (tensor == tensor.trunc()).all() & (tensor.abs() <= WHOLE_UP_TO[dtype]).all()
        ):
            raise Unknown
        whole = tensor.long()
        if int(whole.max()) - int(whole.min()) >= MAX_SPREAD:
            raise Unknown
        varying = [
            dim
            for dim, n in enumerate(shape)
            if n > 1 and bool((whole != whole.narrow(dim, 0, 1)).any())
        ]
        if len(varying) > 1:
            raise Unknown
        flat = whole.numpy()[tuple(slice(None) if d in varying else 0 for d in range(len(shape)))]
    return Value.of(shape, dtype, _line_and_steps(flat, DIMS[varying[0]]))


def _line_and_steps(flat: np.ndarray, at: Expr) -> Expr:
    differences, counts = np.unique(np.diff(flat), return_counts=True)
    slope = int(differences[counts.argmax()])
    jumps = np.diff(flat) - slope
    places = np.flatnonzero(jumps)
    if len(places) > MAX_STEPS:
        raise Unknown
    steps = (int(jumps[place]) * Step(at, sympy.Integer(int(place) + 1)) for place in places)
    return sympy.Integer(int(flat[0])) + slope * at + sum(steps)
