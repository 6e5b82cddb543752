"""Functions of tensors as data: calls of torch, of methods of tensors and of operators, in order.

    documents = (diff(position_ids) != 1).cumsum(-1)
      =>
    values: 0 is position_ids
            1 is torch.diff(0)        2 is operator.ne(1, 1)        3 is .cumsum(2, -1)

A program can be written as JSON, so that it can go to other processes. Running one evaluates no
text: it names only functions that compute tensors, and public methods of tensors.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Symbol
from torch import Tensor, fx
from torch.overrides import get_overridable_functions, resolve_name

from cp_inductor.kept import cache
from cp_inductor.torch_private.modes import OnlyComputes
from cp_inductor.torch_private.sizes import Multiple

OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "lshift", "rshift"),
    *("invert", "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge", "getitem"),
)

# These take no tensors, so torch does not list them among what subclasses of tensors can override.
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")

# The name of what is called, and its arguments by place and by keyword. The name of a method begins
# with a point.
WrittenCall = tuple[str, Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A function of tensors. Its values are numbered: the inputs, then what each call returns.

    Attributes:
        calls: see `write_call`.
        results: the numbers of the values that are returned.
    """

    calls: Sequence[WrittenCall]
    results: Sequence[int]

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Compute on the CPU, without a gradient, on copies: calls may write to them."""
        values: list[Any] = [one.detach().to("cpu", copy=True) for one in inputs]
        with torch.no_grad(), OnlyComputes():
            for name, args, kwargs in self.calls:
                given = [from_json(arg, values) for arg in args]
                named = {key: from_json(arg, values) for key, arg in kwargs.items()}
                values.append(_function(name)(*given, **named))
        return [values[number] for number in self.results]


def write_call(node: fx.Node, numbers: Mapping[fx.Node, int]) -> WrittenCall | None:
    """Return what a node calls; None if a program cannot call that.

    Args:
        node: of a graph from Dynamo.
        numbers: of the values that it may read.
    """
    name = f".{node.target}" if node.op == "call_method" else _names().get(node.target)
    try:
        args = [to_json(arg, numbers) for arg in node.args]
        kwargs = {key: to_json(arg, numbers) for key, arg in node.kwargs.items()}
    except (TypeError, KeyError):
        return None
    return None if name is None else (name, args, kwargs)


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    found = {f"operator.{name}": getattr(operator, name) for name in OPERATORS}
    found |= {f"torch.{name}": getattr(torch, name) for name in FACTORIES}
    for owner, functions in get_overridable_functions().items():
        if owner is not Tensor:
            found |= {str(resolve_name(function)): function for function in functions}
    return found


@cache
def _names() -> Mapping[Any, str]:
    return {function: name for name, function in _functions().items()}


def _function(name: str) -> Callable[..., Any]:
    is_method = name.startswith(".") and not name.startswith("._")
    return getattr(Tensor, name[1:]) if is_method else _functions()[name]


# --- Values as JSON ---------------------------------------------------------------------------


def to_json(value: Any, numbers: Mapping[fx.Node, int] | None = None) -> Any:
    """Write numbers, texts, tuples, dtypes, sizes and programs as JSON, for `from_json`.

    Args:
        value: to be written.
        numbers: of the nodes in the value.

    Raises:
        KeyError, TypeError: the value holds something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind, (cls, parts_of, _) in _KINDS.items():
        if isinstance(value, cls):
            return {kind: [to_json(part, numbers) for part in parts_of(value)]}
    return {"value": [(numbers or {})[value]]}


def from_json(data: Any, values: Sequence[Any] = ()) -> Any:
    """Return what `to_json` wrote, with values for the numbers of nodes."""
    if not isinstance(data, dict):
        return data
    ((kind, parts),) = data.items()
    if kind == "value":
        return values[parts[0]]
    return _KINDS[kind][2](*(from_json(part, values) for part in parts))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


# By name in JSON: a class, a function that takes one of its objects apart, and one that makes it.
_KINDS: dict[str, tuple[type, Callable[[Any], Sequence[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, tuple, lambda *parts: parts),
    "list": (list, list, lambda *parts: list(parts)),
    "slice": (slice, lambda one: (one.start, one.stop, one.step), slice),
    "ellipsis": (type(...), lambda one: (), lambda: ...),
    "dtype": (torch.dtype, lambda one: [str(one).removeprefix("torch.")], _dtype),
    # Programs compute on the CPU.
    "device": (torch.device, lambda one: (), lambda: torch.device("cpu")),
    "multiple": (
        Multiple,
        lambda one: (one.factor, one.symbol.name),
        lambda factor, name: Multiple(factor, Symbol(name)),
    ),
    "program": (
        Program,
        lambda one: [json.dumps((one.calls, one.results))],
        lambda text: Program(*json.loads(text)),
    ),
}
