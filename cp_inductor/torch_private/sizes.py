"""Get numbers and expressions for symbolic sizes.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import optimization_hint, statically_known_true


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value of a size in the call being compiled, without adding a guard.

    `optimization_hint` (torch.fx.experimental.symbolic_shapes, public).
    """
    return optimization_hint(size)


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size as an expression of Dynamo's symbols.

    `SymInt.node.expr` (torch.fx.experimental.sym_node, 2.11-2.15).
    """
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes or strides is known to hold for all sizes; adds no guard.

    `statically_known_true` (torch.fx.experimental.symbolic_shapes, public).
    """
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def note_hint(size: int | torch.SymInt, hint: int) -> None:
    """Note what a size, a multiple of one that only data says, is likely to be; no guard is added.

    `ShapeEnv.var_to_hint_override` (torch.fx.experimental.symbolic_shapes, 2.13-2.15), which
    `mark_unbacked(hint_override=)` writes. Where it is missing, sizes keep torch's default hint.
    """
    if not isinstance(size, torch.SymInt):
        return
    expression = size_expression(size)
    hints = getattr(size.node.shape_env, "var_to_hint_override", None)
    factor, rest = expression.as_coeff_Mul()
    if hints is not None and rest.is_Symbol:
        hints[rest] = max(1, hint // int(factor))
