"""Read a mask at lengths that are symbols of Dynamo's: at some numbers, without fixing them.

    mask (s0, s0), within lengths_as({s0: 512})     read as one of (512, 512); s0 stays a symbol

What is read so holds for these numbers. Who uses it for others has to read it again for them: see
`cp_inductor.run.rules_of_lengths`. Symbols that are not named become numbers of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch

from cp_inductor.torch_private.sizes import size_expression

_numbers: ContextVar[Mapping[sympy.Symbol, int] | None] = ContextVar("numbers", default=None)
_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=True)


class UnknownLength(Exception):
    """A symbol has no number, and there is no compile any more that could fix it."""


@contextmanager
def lengths_as(numbers: Mapping[sympy.Symbol, int], *, is_compiling: bool = True) -> Iterator[None]:
    """Within this context, symbols of sizes stand for numbers.

    Args:
        numbers: by symbol.
        is_compiling: the compile of the graph still runs, so that other symbols can become numbers.
    """
    tokens = _numbers.set(numbers), _is_compiling.set(is_compiling)
    try:
        yield
    finally:
        _numbers.reset(tokens[0])
        _is_compiling.reset(tokens[1])


def as_number(value: Any) -> Any:
    """Return the number that a symbolic size, truth or float stands for; other values as they are.

    Raises:
        UnknownLength: the compile is over, and a symbol has no number.
    """
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    if type(value) not in kinds:
        return value
    kind: Any = kinds[type(value)]
    numbers = _numbers.get()
    expression = size_expression(value)
    if numbers and not expression.free_symbols.isdisjoint(numbers):
        found = sympy.sympify(expression.xreplace(dict(numbers)))
        if found.is_number or found in (sympy.true, sympy.false):
            return kind(found)
    elif expression.is_number or expression in (sympy.true, sympy.false):
        return kind(expression)
    if not _is_compiling.get():
        raise UnknownLength(str(expression))
    return kind(value)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in numbers."""
    return numbers_of(tensor.shape)


def numbers_of(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """Return sizes in numbers."""
    return tuple(as_number(size) for size in sizes)
