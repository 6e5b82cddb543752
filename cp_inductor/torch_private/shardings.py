"""Remember within a compile which shardings DTensor chose for an op.

    layer 1, as Dynamo traces it     linear(x: (1, 2*s1, 32), w)  =>  Shard(1), (1, 2*s1, 48)
    layer 2; AOTAutograd's traces    the same op on the same      =>  as before

To choose, DTensor weighs what it costs to redistribute each input for each strategy, and runs the
op on fake tensors. Outside of compiles it remembers what it chose. While a compiler traces it does
not, because symbols cannot be hashed; with them, choosing is most of the time of a compile. Their
expressions can be hashed.

Assumes: what DTensor chooses depends on the op and its arguments alone, as DTensor itself assumes
where it remembers. What it learned of symbols on the way, the compile has as guards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from cp_inductor.torch_private.sizes import forget_fakes, size_expression

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Tracing(threading.local):
    """Whether Dynamo traces for our backends now, on this thread."""

    is_ours = False


TRACING = _Tracing()


def forget_shardings() -> None:
    """Let DTensor choose anew, after what it may choose has changed (2.13-2.15)."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports FSDP

    _clear_sharding_prop_cache()


class RememberedShardings:
    """What DTensor chose while Dynamo traces for us; torch shares it between calls, too (2.13)."""

    def __init__(self) -> None:
        self._chosen: dict[Hashable, Any] = {}
        self._traced = ExitStack()

    def end(self) -> None:
        """Forget all."""
        self._chosen.clear()
        self._traced.close()

    def recall(self, schema: Any, choose: Callable[[], Any]) -> Any:
        """Return what DTensor chooses for a call, or chose for an equal one."""
        if not TRACING.is_ours:
            return choose()
        asked = _Frozen()
        try:
            key = asked.of(schema)
        except _Unhashable:
            return choose()
        if asked.symbols:
            forget_fakes(self._traced)
        # Sizes that are computed where a graph is traced are nodes of that graph.
        here = (get_proxy_mode(), key)
        known = self._chosen.get(key) or self._chosen.get(here)
        if known is not None:
            return known
        choice = choose()
        chosen = _Frozen()
        try:
            chosen.of((choice.output_spec, choice.redistribute_schema))
        except _Unhashable:
            return choice
        if chosen.symbols <= asked.symbols:
            self._chosen[key if chosen.is_plain else here] = choice
        return choice


remembered = RememberedShardings()


class _Unhashable(Exception):
    pass


class _Frozen:
    """Makes keys of arguments, and takes note of their symbols.

    Attributes:
        symbols: that they have.
        is_plain: they are no more than multiples of symbols, which every graph can compute anew.
    """

    def __init__(self) -> None:
        self.symbols: set[Any] = set()
        self.is_plain = True

    def of(self, value: Any) -> Hashable:
        """Return what is equal for equal values alone; raise _Unhashable if there is nothing."""
        if isinstance(value, OpSchema):
            return (value.op, self.of(value.args_schema), self.of(value.kwargs_schema))
        if isinstance(value, DTensorSpec):
            return (DTensorSpec, *((name, self.of(vars(value)[name])) for name in _FIELDS))
        if isinstance(value, _SYMBOLIC):
            expression = size_expression(value)
            self.symbols |= expression.free_symbols
            self.is_plain &= expression.as_coeff_Mul()[1].is_Symbol
            return (type(value), value.node.shape_env, expression)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self.of, value))
        if isinstance(value, dict):
            return (dict, *((name, self.of(item)) for name, item in value.items()))
        if isinstance(value, float):
            return (float, repr(value))  # 0.0 == -0.0
        if isinstance(value, Tensor) or not isinstance(value, Hashable):
            raise _Unhashable
        return (type(value), value)


_FIELDS = tuple(field.name for field in fields(DTensorSpec))
