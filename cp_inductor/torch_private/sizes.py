"""Numbers and expressions for symbolic sizes. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._library.fake_impl import allocate_size
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.fx.experimental.symbolic_shapes import optimization_hint, statically_known_true


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value of a size in the call being compiled, without adding a guard."""
    return optimization_hint(size)


def size_expression(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """Return a size, or what sizes make, as an expression of Dynamo's symbols (2.13-2.15)."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def is_number(size: int | torch.SymInt) -> bool:
    """Whether a size is a number, in all calls."""
    return bool(size_expression(size).is_Integer)


def has_hint(size: torch.SymInt) -> bool:
    """Whether a size is known when a call is compiled, not only when data is (2.13-2.15)."""
    return bool(size.node.has_hint())


def is_zero(size: int | torch.SymInt) -> bool:
    """Whether a size is 0 in the call being compiled; adds no guard."""
    is_known = isinstance(size, int) or has_hint(size)
    return is_known and size_hint(size) == 0


def is_demanded(size: torch.SymInt) -> bool:
    """Whether the user demands that a size be a symbol, so that it must not become a number.

    That is what `torch._dynamo.mark_dynamic` does; `maybe_mark_dynamic`, and what Dynamo does by
    itself with sizes that change, leave it open. `ShapeEnv.tracked_fakes`, whose `symbolic_context`
    has `constraint_sizes` (torch.fx.experimental.symbolic_shapes, 2.13-2.15). Where they are
    missing, torch's own error says it of a size that has become a number.
    """
    symbols = size_expression(size).free_symbols
    for tracked in getattr(size.node.shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        # Those of symbols alone, which are graph inputs as well, have no sizes.
        lengths = getattr(tracked.fake, "shape", ())
        for length, constraint in zip(lengths, constraints, strict=False):
            is_strict = constraint is not None and not constraint.warn_only
            if is_strict and not symbols.isdisjoint(size_expression(length).free_symbols):
                return True
    return False


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes or strides is known to hold for all sizes; adds no guard."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def note_hint(size: int | torch.SymInt, hint: int) -> None:
    """Note what a size, a multiple of one that only data says, is likely to be; no guard is added.

    `ShapeEnv.var_to_hint_override` (torch.fx.experimental.symbolic_shapes, 2.13-2.15), which
    `mark_unbacked(hint_override=)` writes.
    """
    if not isinstance(size, torch.SymInt):
        return
    factor, rest = size_expression(size).as_coeff_Mul()
    hints = getattr(size.node.shape_env, "var_to_hint_override", None)
    if hints is not None and rest.is_Symbol:
        hints[rest] = max(1, hint // int(factor))


def forget_fakes(until: ExitStack) -> None:
    """Let the fake tensors of this compile run each op, until a stack of contexts is closed.

    To make and to use an entry of their cache takes longer than to run the op, where sizes are
    symbols (2.13-2.15).
    """
    mode = detect_fake_mode()
    if mode is not None and mode.cache_enabled:
        until.enter_context(disable_fake_tensor_cache(mode))


def new_size(least: int) -> torch.SymInt:
    """Return a size that only data says, `least` at least, in the fake of an op.

    `torch.library.get_ctx().new_dynamic_size` refuses where graphs may break, because Dynamo would
    break them there. The ops of this library are not in the program that Dynamo reads (2.13-2.15).
    """
    shape_env = torch.library.get_ctx()._shape_env
    assert shape_env is not None, "traced without symbolic sizes"
    return allocate_size(shape_env, least)


@dataclass(frozen=True, slots=True)
class Multiple:
    """A size as so many times a symbol of Dynamo's: a whole sequence of 2 ranks, 2 * s1."""

    factor: int
    symbol: sympy.Symbol

    @staticmethod
    def of(size: int | torch.SymInt) -> Multiple | None:
        """Return a size as a multiple; None if it is a number, or anything else."""
        if isinstance(size, int) or not has_hint(size):
            return None
        factor, symbol = size_expression(size).as_coeff_Mul()
        if not symbol.is_Symbol or not factor.is_Integer or factor < 1:
            return None
        return Multiple(int(factor), symbol)


def solve(sizes: Sequence[Multiple | int], values: Sequence[int]) -> dict[sympy.Symbol, int] | None:
    """Return what symbols are if sizes have these numbers; None if they cannot have them."""
    solution: dict[sympy.Symbol, int] = {}
    for size, number in zip(sizes, values, strict=True):
        if not isinstance(size, int):
            solution.setdefault(size.symbol, number // size.factor)
        if number_of(size, solution) != number:
            return None
    return solution


def number_of(size: Multiple | int, numbers: Mapping[sympy.Symbol, int]) -> int:
    """Return what a size is if symbols have these numbers."""
    return size if isinstance(size, int) else size.factor * numbers[size.symbol]
