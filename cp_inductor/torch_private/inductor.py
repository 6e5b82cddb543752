"""Passes of Inductor, the order of its nodes, the strides it gives kernels.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass


def is_input_of_forward(node: fx.Node) -> bool:
    """Whether an input of a graph from AOTAutograd is one that the whole function was called with.

    Not one that the forward computed and saved, nor a gradient. AOTAutograd says so in
    `meta["desc"]`: an `AOTInput` (torch._functorch._aot_autograd.descriptors, 2.11-2.15).
    """
    from torch._functorch._aot_autograd.descriptors import AOTInput

    description = node.meta.get("desc")
    return isinstance(description, AOTInput) and not description.is_tangent()


def pin_order(graph: fx.Graph, earlier_of: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor generate the code of each node after that of the nodes given for it.

    `preserve_node_ordering` (torch._inductor.fx_passes.control_dependencies, 2.11-2.15) wraps each
    node in a higher-order op whose lowering adds dependencies to the scheduler. Call it after the
    FX-graph cache has computed its key: the op is not cacheable. In 2.11 that lowering passes over
    nodes that return several tensors, so that one of the tensors stands for them here.

    Inductor stores what several matrix multiplications read once, but does not see those in the
    higher-order op; `meta["inductor_realize_to_strides"]` (torch._inductor.graph, 2.11-2.15) says
    it for them.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    for source in {source for node in earlier_of for source in node.all_input_nodes}:
        if len(source.users) > 1 and isinstance(source.meta.get("val"), Tensor):
            source.meta["inductor_realize_to_strides"] = True
    stand_ins = {node: _one_tensor_of(node) for earlier in earlier_of.values() for node in earlier}
    preserve_node_ordering(
        graph,
        {
            node: OrderedSet(stand_ins[other] for other in earlier)
            for node, earlier in earlier_of.items()
            if earlier
        },
    )


def sort_topologically(graph: fx.Graph) -> None:
    """Put nodes behind what they read, and leave them where they are if they are.

    `stable_topological_sort` (torch._inductor.pattern_matcher, 2.11-2.15), which Inductor itself
    calls behind its post-grad passes: until then a graph may be out of order.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def _one_tensor_of(node: fx.Node) -> fx.Node:
    values = node.meta.get("val")
    if not isinstance(values, (tuple, list)):
        return node
    for user in node.users:
        if user.target is getitem and isinstance(user.meta.get("val"), Tensor):
            return user
    with node.graph.inserting_after(node):
        first = node.graph.call_function(getitem, (node, 0))
    first.meta["val"] = values[0]
    return first


def append_custom_pass(existing: Any, ours: CustomGraphPass) -> Any:
    """Return the value of a custom-pass setting of Inductor with one more pass at its end.

    2.13 and 2.15 take a list of passes (`get_custom_graph_passes` in
    torch._inductor.custom_graph_pass); 2.11 takes one, and gets a chain.
    """
    if existing is None:
        return ours
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return [*custom_graph_pass.get_custom_graph_passes(existing), ours]
    return _PassChain((existing, ours))


class _PassChain(CustomGraphPass):
    """Several passes as one, cached only if each of them can be."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> object | None:
        uuids = [getattr(one, "uuid", lambda: None)() for one in self.passes]
        return None if None in uuids else tuple(uuids)


@contextmanager
def last_strides_kept(
    arguments_of: Mapping[torch._ops.OpOverload, Sequence[int]],
) -> Iterator[None]:
    """Have Inductor give some arguments of ops a last dim whose stride is 1, copied if need be.

    For kernels of attention, `_maybe_layout_constraints` (torch._inductor.lowering, 2.11-2.15)
    asks for the order of the strides alone. Where Inductor lays a tensor out otherwise than the
    graph says, as it does with convolutions, the stride of what is innermost may be another.

    Args:
        arguments_of: ops that have a constraint, and the places of their arguments.
    """
    from torch._inductor import lowering

    table = lowering._maybe_layout_constraints
    kept = {op: _KeepLastStrides(table.get(op), places) for op, places in arguments_of.items()}
    with mock.patch.dict(table, kept):
        yield


class _KeepLastStrides:
    """A layout constraint: another one, and then the last strides."""

    def __init__(self, constrain: Callable[..., Any] | None, places: Sequence[int]) -> None:
        self.constrain, self.places = constrain, places

    def __call__(self, node: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.constrain is not None:
            args, kwargs = self.constrain(node, *args, **kwargs)
        given = list(args)
        for place in self.places:
            given[place] = _with_last_stride_1(given[place])
        return tuple(given), kwargs


def _with_last_stride_1(value: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    strides = value.maybe_get_stride()
    if strides is not None and V.graph.sizevars.statically_known_equals(strides[-1], 1):
        return value
    return ir.ExternKernel.require_contiguous(value)


# In the meta of a concatenation: it is to be one kernel.
ONE_KERNEL_KEY = "cp_inductor_one_kernel"

# Beyond so many inputs, that each element asks of all inputs whether it is theirs takes too long.
MAX_INPUTS_OF_KERNEL = 64


@contextmanager
def cats_in_one_kernel() -> Iterator[None]:
    """Have Inductor generate one kernel on a GPU for each concatenation whose meta asks for it.

    `cat` (torch._inductor.lowering, 2.11-2.15) otherwise copies each input by a kernel of its own
    if there are more than eight, if one of them was reduced, or if an op of aten reads the result.
    `config.force_pointwise_cat` (2.11-2.15) says what it is to do.
    """
    from torch._inductor import config, lowering
    from torch._inductor.virtualized import V

    cat = torch.ops.aten.cat.default
    lower = lowering.lowerings[cat]

    def lower_cat(inputs: Sequence[Any], dim: int = 0) -> Any:
        is_asked_for = V.current_node.meta.get(ONE_KERNEL_KEY, False)
        is_on_cpu = inputs[0].get_device().type == "cpu"
        if not is_asked_for or is_on_cpu or len(inputs) > MAX_INPUTS_OF_KERNEL:
            return lower(inputs, dim)
        with config.patch(force_pointwise_cat=True):
            return lower(inputs, dim)

    with mock.patch.dict(lowering.lowerings, {cat: lower_cat}):
        yield


def cache_folder() -> str:
    """Return where Inductor caches (`cache_dir`, torch._inductor.runtime.cache_dir_utils)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor will call (`get_cpp_compiler`, cpp_builder)."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None
