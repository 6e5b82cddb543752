"""Trace the part of a Dynamo graph that computes a mask, or changes scores, into core aten ops.

    mask = torch.triu(x, diagonal=1)        => arange, unsqueeze, sub, ge, where ... of aten, and
                                               which of them are nodes of the Dynamo graph

Every node is run on fake tensors that have the shape of the whole tensor, also for DTensors. These
nodes become inputs of the trace instead: an op without a fake kernel, an op whose result depends on
data, a higher-order op, an op that writes in place, and a tensor that is written to. A method that
writes in place to a new tensor that nothing else reads, as in `zeros_like(x).masked_fill_(x, -oo)`
of nn.MultiheadAttention, is traced as the one that returns its result.

Lengths are traced as numbers. Symbols of Dynamo's may stand for some without becoming them:

    mask (s0, s0), within lengths_as({s0: 512})     traced as one of (512, 512); s0 stays a symbol

What is read of the trace holds for these numbers only. Other symbols become numbers of the graph.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.node import map_aggregate, map_arg
from torch.fx.traceback import annotate

from cp_inductor.mask.reader.writes import Writes, is_in_place, storages_of
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.torch_private.tracing import core_decompositions, tensors_in, trace_of_shapes

# Trace at most this many nodes: a mask may depend on all that a model computes before it.
MAX_NODES = 400
# Retry at most this many times after finding nodes that cannot be run.
MAX_CUTS = 32

_ORIGIN = "cp_inductor_origin"


@dataclass(frozen=True, slots=True)
class Trace:
    """The nodes that a mask depends on, in core aten ops."""

    gm: fx.GraphModule  # the traced graph
    result: fx.Node  # the node of `gm` that is the mask
    # Node of `gm` => the node of the Dynamo graph with the same tensor, if there is one.
    origins: dict[fx.Node, fx.Node]
    # The nodes of the Dynamo graph whose tensors some other node writes to.
    written: frozenset[fx.Node]
    # All nodes of the Dynamo graph that were traced, in order, and whether they are inputs of the
    # trace. The others do nothing but compute.
    nodes: dict[fx.Node, bool]
    # The node of `gm` that stands for the scores (B, H, S, T), in a trace of scores.
    score: fx.Node | None = None

    @property
    def computed(self) -> frozenset[fx.Node]:
        """The nodes of the Dynamo graph that are no inputs of the trace."""
        return frozenset(node for node, is_input in self.nodes.items() if not is_input)


class _Cut(Exception):
    """Some nodes, its arguments, cannot be traced and must be inputs of the trace."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A change of scores (B, H, S, T): from them and tensors by node to what takes their place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    function: Callable[[Tensor, Mapping[fx.Node, Any]], Tensor]


def trace_nodes(ends: Sequence[fx.Node], graph: fx.Graph, scores: Scores | None = None) -> Trace:
    """Trace the nodes of a Dynamo graph that some depend on, back to those that cannot run.

    These are a mask, or all whose tensors a change of scores takes, which is traced behind them. In
    the worst case they themselves are the only inputs of the trace. The graph holds them, or is
    around theirs. What the function of `scores` raises is raised.
    """
    writes, leaves = Writes(graph), set[fx.Node]()
    for _ in range(MAX_CUTS):
        try:
            return _trace(ends, leaves, writes.has, scores)
        except _Cut as cut:
            leaves.update(cut.args)
    return _trace(ends, set(ends), writes.has, scores)


def trace_copy(mask: fx.Node, written: frozenset[fx.Node]) -> Trace | None:
    """Trace a mask again, of a copy of its nodes; None if one cannot run, or has another shape.

    Args:
        mask: of the copy.
        written: the nodes of the copy whose tensors some other node of the Dynamo graph writes to.
    """
    try:
        return _trace([mask], (), lambda node, _: node in written, None)
    except _Cut:
        return None


def _trace(
    ends: Sequence[fx.Node],
    leaves: Collection[fx.Node],
    is_written: Callable[[fx.Node, Collection[fx.Node]], bool],
    scores: Scores | None,
) -> Trace:
    nodes = _slice(ends, leaves)
    inputs = [node for node, is_leaf in nodes.items() if is_leaf]
    calls = [node for node, is_leaf in nodes.items() if not is_leaf]

    def run(*values: Tensor) -> list[Tensor]:
        known: dict[fx.Node, Any] = dict(zip(inputs, values, strict=False))
        for place, node in enumerate(calls):
            with annotate({_ORIGIN: place}):
                known[node] = _run(node, known)
        results = [known[node] for node in nodes if isinstance(known[node], Tensor)]
        return results if scores is None else [*results, scores.function(values[-1], known)]

    examples = (node.meta["example_value"] for node in inputs)
    shapes = [(shape_of(example), example.dtype) for example in examples]
    if scores is not None:
        shapes.append((scores.shape, scores.dtype))
    gm = trace_of_shapes(run, shapes, core_decompositions())
    origins_of = {step: step.meta.get("custom", {}).get(_ORIGIN) for step in gm.graph.nodes}
    impure = {calls[of] for step, of in origins_of.items() if of is not None and step.is_impure()}
    if impure:
        raise _Cut(*impure)
    written = frozenset(node for node in nodes if is_written(node, calls))
    if not written.issubset(inputs):
        raise _Cut(*written)
    results: Any = gm.graph.output_node().args[0]
    # Several Dynamo nodes may be one tensor in the trace, which ignores moves between devices. The
    # last of them is on the device of the mask.
    origins = dict(zip(results, filter(_is_tensor, nodes), strict=scores is None))
    score = None
    if scores is not None:
        *_, score = gm.graph.find_nodes(op="placeholder")
    return Trace(gm, results[-1], origins, written, nodes, score)


def _slice(ends: Sequence[fx.Node], leaves: Collection[fx.Node]) -> dict[fx.Node, bool]:
    """Return the nodes that some nodes depend on, in graph order, and which are inputs."""

    def is_leaf(node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method")
        is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
        return node in leaves or not is_call or is_higher_order

    visited: dict[fx.Node, bool] = {}
    queue = list(ends)
    for node in queue:
        if node in visited:
            continue
        examples = ((source, source.meta.get("example_value")) for source in node.all_input_nodes)
        sources = [source for source, example in examples if tensors_in(example)]
        # An input must be one tensor. If a node that returns several cannot be run, each node that
        # takes a tensor out of it becomes an input.
        is_taken = any(is_leaf(source) and not _is_tensor(source) for source in sources)
        is_far = len(visited) >= MAX_NODES and _is_tensor(node)
        visited[node] = is_leaf(node) or is_taken or is_far
        if not visited[node]:
            queue += sources
    graphs = dict.fromkeys(node.graph for node in visited)
    return {node: visited[node] for graph in graphs for node in graph.nodes if node in visited}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _run(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    def value_of(source: fx.Node) -> Any:
        if source in known:
            return known[source]
        return map_aggregate(source.meta["example_value"], as_number)

    try:
        inputs: Any = map_aggregate(map_arg((node.args, node.kwargs), value_of), _on_cpu)
        args, kwargs = inputs
        target: Any = _whole if node.target is DTensor.from_local else node.target
        if node.op == "call_method":
            name = target.removesuffix("_") if _is_first_write(node) else target
            is_move = getattr(Tensor, name, None) in (Tensor.cuda, Tensor.cpu)
            tensor, *args = args
            target = (lambda *_, **__: tensor) if is_move else getattr(tensor, name)
        result = target(*args, **kwargs)
    except Exception as error:  # a model may call anything, which may raise anything
        raise _Cut(node) from error
    if not _is_alike(result, node.meta["example_value"]):
        raise _Cut(node)
    return result


def _is_first_write(node: fx.Node) -> bool:
    """Whether a method writes in place to a tensor that was made for it: nothing else reads it."""
    source = node.args[0]
    if not is_in_place(node) or not isinstance(source, fx.Node) or len(source.users) > 1:
        return False
    if source.op not in ("call_function", "call_method"):
        return False
    made = storages_of(source)
    return all(made.isdisjoint(storages_of(before)) for before in source.all_input_nodes)


def _on_cpu(value: Any) -> Any:
    """Replace devices by the CPU, on which every trace runs, and symbols by numbers."""
    if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) else as_number(value)


def _whole(local: Tensor, mesh: Any, placements: Sequence[Any], **_: Any) -> Tensor:
    """Stand in for DTensor.from_local: return a mask that every rank holds whole."""
    if not all(isinstance(placement, Replicate) for placement in placements):
        raise ValueError
    return local


def _is_alike(result: Any, example: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return len(result) == len(example) and all(map(_is_alike, result, example))
    if not isinstance(result, Tensor):
        return not isinstance(example, Tensor)
    return result.dtype == example.dtype and tuple(result.shape) == shape_of(example)


# --- Lengths ----------------------------------------------------------------------------------

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
    kind: Any = KINDS.get(type(value))
    if kind is None:
        return value
    known = number_at(size_expression(value), _numbers.get() or {})
    return kind(value if known is None else known)


KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def number_at(expression: sympy.Expr, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """Return an expression as a number or truth of sympy; None if these symbols do not fix it."""
    value = sympy.sympify(expression.xreplace(dict(numbers)))
    return value if value.is_number or value in (sympy.true, sympy.false) else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in numbers."""
    return tuple(as_number(size) for size in tensor.shape)
