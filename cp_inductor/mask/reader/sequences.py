"""Read sequences: compute and fit constant ones; recognize counts of runs.

    cat([arange(5), arange(8)])                    d0 - 5*Step(d0, 5)
    (diff(x, prepend=...) != 1).cumsum(-1)         a table that counts the runs of x

A run is a part of a sequence in which every entry is the one before plus one.
"""

from __future__ import annotations

import numpy as np
import sympy
import torch
from sympy import Expr
from torch import Tensor

from cp_inductor.mask.canonical import compare
from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import Step
from cp_inductor.mask.reader.values import (
    DIMS,
    EXACT,
    INTEGERS,
    Unknown,
    Value,
    constant,
    index_of,
    substitute,
)
from cp_inductor.torch_private.modes import without_modes

# Longer constant sequences are not computed. With more steps than this they become tables.
MAX_COMPUTED = 1 << 24
MAX_STEPS = 256
# If the values of a sequence spread more than this, their differences might wrap in int64.
MAX_SPREAD = 1 << 62


def materialize(value: Value) -> Tensor:
    """Compute the tensor of a value.

    Raises:
        Unknown: the value reads a table, has several cases, is infinite or is too large.
    """
    value = value.exact()
    size = np.prod(value.shape, dtype=object)
    if value.tables() or size > MAX_COMPUTED or len(value.cases) > 1:
        raise Unknown
    ndim = len(value.shape)
    with without_modes():
        indices = {
            DIMS[dim]: torch.arange(n).view([-1 if d == dim else 1 for d in range(ndim)])
            for dim, n in enumerate(value.shape)
        }
        operations = Operations(
            read=lambda *_: None,
            floor_divide=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            choose=torch.where,
            as_integer=lambda condition: torch.as_tensor(condition).long(),
            boolean=torch.tensor,
        )
        expression = value.truth if value.truth is not None else value.cases[0][1]
        if expression.is_infinite:
            raise Unknown
        result = torch.as_tensor(evaluate(expression, indices, operations))
        return result.to(value.dtype).expand(value.shape).contiguous()


def fit(tensor: Tensor) -> Value:
    """Return a tensor that varies along one dim at most, as a line plus steps.

    Raises:
        Unknown: the tensor varies along several dims, or takes too many steps.
    """
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.numel() or len(shape) > len(DIMS) or tensor.numel() > MAX_COMPUTED:
        raise Unknown
    with without_modes():
        if bool((tensor == tensor.flatten()[0]).all()):
            return _of_dtype(constant(tensor.flatten()[0].item(), shape), dtype)
        if dtype not in {torch.bool, *INTEGERS, *EXACT}:
            raise Unknown
        if dtype in EXACT and not bool(
            (tensor == tensor.trunc()).all() & (tensor.abs() <= EXACT[dtype]).all()
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
    expression = _line_and_steps(flat, DIMS[varying[0]])
    if dtype == torch.bool:
        return Value(shape, dtype, truth=compare("ne", expression, sympy.Integer(0)))
    return Value(shape, dtype, cases=((sympy.true, expression),))


def _of_dtype(value: Value, dtype: torch.dtype) -> Value:
    if value.truth is None and dtype not in {*INTEGERS, *EXACT}:
        raise Unknown
    return Value(value.shape, dtype, value.truth, value.cases)


def _line_and_steps(flat: np.ndarray, at: Expr) -> Expr:
    differences, counts = np.unique(np.diff(flat), return_counts=True)
    slope = int(differences[counts.argmax()])
    jumps = np.diff(flat) - slope
    places = np.flatnonzero(jumps)
    if len(places) > MAX_STEPS:
        raise Unknown
    steps = (int(jumps[place]) * Step(at, sympy.Integer(int(place) + 1)) for place in places)
    return sympy.Integer(int(flat[0])) + slope * at + sum(steps)


def runs_of(counted: Value | None, dim: int) -> Expr | None:
    """Return x, if a bool tensor says from its second entry on where x does not go up by one.

    Summed up along the dim, it is the same for two indices if x goes up by one at every step from
    one to the other.
    """
    if counted is None or counted.truth is None or counted.shape[dim] < 2:
        return None
    index = index_of(counted.shape, dim)
    following = substitute(counted.truth, {index: index + 1})
    for entry in counted.tables():
        if index in entry.args and entry.is_integer:
            goes_on = compare("eq", entry.xreplace({index: index + 1}) - entry, sympy.Integer(1))
            if following == sympy.Not(goes_on):
                return entry
    return None
