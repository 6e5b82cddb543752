"""Let compilers trace DTensors whose lengths are symbols, where torch's own dispatch cannot.

    mask & documents              a plain mask (s0, s0) beside a DTensor: taken as replicated
    states[:, :, None]            whole slices of a sharded dim of s0: the tensor itself

Read in torch 2.13.0 and 2.15.0. In all of them:

- DTensor's C++ dispatch asks how many elements a plain tensor has that comes first, which a tensor
  of symbolic sizes does not answer: "Cannot call numel() on tensor with symbolic sizes".
- It hashes a DTensor with numbers as sizes and symbols as strides: "unhashable type".
- A slice of a sharded dim is gathered unless it is known to be the whole dim. That is not known of
  a symbolic dim, so the slice, its gradient, and all that follows are whole on every rank.
- make_fx takes the last value that equals a symbol for the symbol itself, which may be one that is
  computed from it: it then asks for its own result, until Python's stack ends.
- make_fx (2.13) cannot trace a square of a symbol that DTensor computed, as a mask's stride.

So, for such calls, DTensor calls the functions below while Dynamo traces for our backends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import sympy
import torch
import torch.utils._pytree as pytree
from torch import SymInt, Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import (
    Handler,
    are_plain_tensors_replicated,
    dispatch_as_dtensor,
    replicated,
    without_handler,
)
from cp_inductor.torch_private.shardings import TRACING

SLICE_BACKWARD = torch.ops.aten.slice_backward.default
# What Python's `x[:]` has for an end.
NO_END = (1 << 63) - 1


class SymbolicLengths:
    """Handlers in DTensor's table, while Dynamo traces for us.

    `DTensor._op_dispatcher._custom_op_handlers`, `_random_ops` (torch.distributed.tensor._dispatch)
    and `op_strategy_funcs`, `op_to_rules` of its `sharding_propagator`; later releases have
    `op_single_dim_strategy_funcs` besides (2.13-2.15).
    """

    def __init__(self) -> None:
        self._table: dict[Any, Handler] = {}
        self._added: set[Any] = set()

    def start(self) -> None:
        """Add the handlers, beside those that are there."""
        dispatcher: Any = DTensor._op_dispatcher
        self._table = dispatcher._custom_op_handlers
        names = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
        tables = [getattr(dispatcher.sharding_propagator, name, {}) for name in names]
        for op in dict.fromkeys(chain(*tables)):
            is_taken = op in self._table or op in dispatcher._random_ops
            is_pure = isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable
            if is_pure and not is_taken:
                self._table[op] = self._handle
                self._added.add(op)

    def end(self) -> None:
        """Remove them."""
        for op in self._added:
            self._table.pop(op, None)
        self._added.clear()

    def _handle(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not TRACING.is_ours:
            return dispatch_as_dtensor(op, args, kwargs)  # what another thread computes
        if op is SLICE_BACKWARD:
            bound = bind_arguments(op, args, kwargs)
            if is_whole_slice(bound, bound["input_sizes"]):
                return torch.ops.aten.alias.default(bound["grad_output"])
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not any(_is_plain_symbolic(leaf) for leaf in leaves):
            return without_handler(op, args, kwargs)
        meshes = [leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)]
        # Where plain tensors are not taken as replicated, torch's error says so.
        if are_plain_tensors_replicated():
            leaves = [replicated(x, meshes[0]) if _is_plain_symbolic(x) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return dispatch_as_dtensor(op, args, kwargs)


def _is_plain_symbolic(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return is_plain and any(isinstance(size, SymInt) for size in value.shape)


def is_whole_slice(bound: Mapping[str, Any], sizes: Sequence[int | SymInt]) -> bool:
    """Whether a slice, or its backward, with these arguments is known to be all of a symbolic dim.

    DTensor gathers the dim otherwise. The sizes are those of the whole tensor.
    """
    size, start, end = sizes[bound["dim"]], bound["start"], bound["end"]
    is_other = not isinstance(size, SymInt) or bound["step"] != 1
    if is_other or not (start is None or statically_known_true(start == 0)):
        return False
    if end is None or (isinstance(end, int) and end == NO_END):
        return True
    return statically_known_true(end >= size)


@contextmanager
def first_symbols_kept() -> Iterator[None]:
    """Within this context, make_fx takes the first value that equals a symbol for the symbol.

    And it multiplies symbols by themselves. `set_proxy_slot`, `_sympy_handlers`, and
    `sympy_expr_tracker` of a tracer (torch.fx.experimental.proxy_tensor, 2.13-2.15). The first is
    an input of the graph, from which all others are computed.
    """
    original = proxy_tensor.set_proxy_slot

    def set_slot(value: Any, tracer: Any, proxy: Any) -> None:
        expression = value.node.expr if isinstance(value, proxy_tensor.py_sym_types) else None
        is_symbol = isinstance(expression, sympy.Symbol)
        known = tracer.sympy_expr_tracker.get(expression) if is_symbol else None
        original(value, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expression] = known

    powers = mock.patch.dict(proxy_tensor._sympy_handlers(), {sympy.Pow: operator.pow})
    with mock.patch.object(proxy_tensor, "set_proxy_slot", set_slot), powers:
        yield
