"""Read a mask whose lengths are symbols of Dynamo's, at some numbers and without fixing them.

    mask (s0, s0), within lengths_as({s0: 512})     read as one of (512, 512); s0 stays a symbol

The rule that is read holds for these numbers only. Other numbers need another reading: see
`cp_inductor.ops.plan_batch`. Other symbols become numbers of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from cp_inductor.torch_private.sizes import size_expression

_numbers: ContextVar[Mapping[sympy.Symbol, int] | None] = ContextVar("numbers", default=None)


@contextmanager
def lengths_as(numbers: Mapping[sympy.Symbol, int]) -> Iterator[None]:
    """Within this context, these symbols of sizes stand for numbers."""
    token = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(token)


def as_number(value: Any) -> Any:
    """Return the number that a symbolic size, truth or float stands for; other values unchanged."""
    kind: Any = _KINDS.get(type(value))
    if kind is None:
        return value
    known = _at(size_expression(value), _numbers.get() or {})
    return kind(value if known is None else known)


_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _at(expression: sympy.Expr, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """Return an expression as a number or truth of sympy; None if these symbols do not fix it."""
    found = sympy.sympify(expression.xreplace(dict(numbers)))
    return found if found.is_number or found in (sympy.true, sympy.false) else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in numbers."""
    return tuple(as_number(size) for size in tensor.shape)


@dataclass(frozen=True, slots=True)
class Frozen:
    """A value of a Dynamo graph as it was when it was compiled.

    A copy is needed because Dynamo may change what it knows of symbols after the compile.

    Attributes:
        sizes: of a tensor, or a symbolic number as the only one.
        kind: the dtype of a tensor, or the type of the number.
    """

    sizes: tuple[sympy.Expr, ...]
    kind: Any

    def at(self, numbers: Mapping[sympy.Symbol, int]) -> Any:
        """Return the value for some numbers of its symbols; a tensor is on the meta device.

        Raises:
            UnknownLength: the numbers leave a length open.
        """
        found = [_at(size, numbers) for size in self.sizes]
        if None in found or isinstance(self.kind, torch.layout):
            raise UnknownLength(str(self))
        if isinstance(self.kind, torch.dtype):
            return torch.empty(tuple(map(int, found)), dtype=self.kind, device="meta")
        return self.kind(found[0])

    def said(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
        """Return the value as text, with other names for its symbols."""
        return f"{self.kind}{[str(size.xreplace(dict(names))) for size in self.sizes]}"


def freeze(value: Any) -> Any:
    """Freeze a tensor or a symbolic number; other values unchanged."""
    if type(value) in _KINDS:
        return Frozen((size_expression(value),), _KINDS[type(value)])
    if isinstance(value, torch.Tensor):
        kind = value.layout if value.layout != torch.strided else value.dtype
        return Frozen(tuple(map(size_expression, value.shape)), kind)
    return value


class UnknownLength(Exception):
    """The numbers of symbols do not say how long a tensor is."""
