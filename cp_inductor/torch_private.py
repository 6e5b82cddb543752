"""Every private or moving corner of torch this package leans on, in one place.

Read in torch 2.11.0, 2.13.0 and 2.15.0; each function names what it stands on. What is common to
the three is used as it is; `tests/test_torch_private.py` fails loudly when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = [
    "as_backend_error",
    "dispatch_as_dtensor",
    "is_propagating_shapes",
    "pin_order",
    "rank_and_size",
    "register_dtensor_handler",
]


def rank_and_size(group_name: str) -> tuple[int, int]:
    """Return this process's rank in a process group named by c10d, and the group's size.

    `_resolve_process_group` (torch.distributed.distributed_c10d, 2.11-2.15) is what functional
    collectives use for the same name.
    """
    # From 2.13 names have a type of their own, a str to everybody but type checkers.
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    group = resolve(group_name)
    return dist.get_rank(group), dist.get_world_size(group)


def mesh_axis_ranks(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """Return the global ranks along one axis of a mesh, through this process, in mesh order.

    `unset_fake_temporarily` (torch._subclasses.fake_tensor, 2.11-2.15): the ranks of a mesh are a
    tensor, which must not become fake when this is asked during tracing.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    with unset_fake_temporarily():
        index = tuple(slice(None) if dim == axis else at for dim, at in enumerate(coordinate))
        return tuple(mesh.mesh[index].tolist())


def register_dtensor_handler(op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
    """Have DTensor call `handler(op, args, kwargs)` where it would dispatch `op`.

    `DTensor._op_dispatcher._custom_op_handlers` (torch.distributed.tensor._dispatch, 2.11-2.15);
    torch's own context parallelism registers the same way.
    """
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def has_dtensor_strategy(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor brings a sharding rule of its own for `op`.

    `ShardingPropagator.op_strategy_funcs` (torch.distributed.tensor._sharding_prop, 2.11-2.15).
    """
    return op in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def dispatch_as_dtensor(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what DTensor does with `op` when no handler is registered for it.

    The steps of `OpDispatcher` (torch.distributed.tensor._dispatch, 2.11-2.15): unwrap, propagate
    shardings, redistribute where they ask for it, run on the local tensors, wrap.
    """
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    assert sharding is not None
    if sharding.needs_redistribute:
        assert sharding.redistribute_schema is not None
        dispatcher.redistribute_local_args(
            info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    local_args = info.local_args
    if info.args_tree_spec is not None:
        local_args = pytree.tree_unflatten(list(local_args), info.args_tree_spec)
    return dispatcher.wrap(op(*local_args, **info.local_kwargs), sharding.output_spec)


def bind_arguments(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call by the schema of its op, defaults filled in.

    `OpOverload._schema` (torch._ops, 2.11-2.15).
    """
    arguments = op._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    return bound | dict(kwargs)


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value that a size has in the call being compiled, without a guard on it.

    `SymInt.node.hint` (torch.fx.experimental.sym_node, 2.11-2.15).
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


def is_propagating_shapes(tensor: Tensor) -> bool:
    """Whether nothing is computed or recorded: the tensor is fake, and no graph is being traced.

    True in Dynamo's propagation of example values. `get_proxy_mode`
    (torch.fx.experimental.proxy_tensor, 2.11-2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None


def pin_order(graph: fx.Graph, earlier_of: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor generate the code of each node after that of the nodes given for it.

    `preserve_node_ordering` (torch._inductor.fx_passes.control_dependencies, 2.11-2.15) wraps each
    node in a higher-order op whose lowering adds dependencies to the scheduler. Call it after the
    FX-graph cache has computed its key: the op is not cacheable. In 2.11 that lowering passes over
    nodes that return several tensors, so that one of the tensors stands for them here.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    stand_ins = {node: _one_tensor_of(node) for earlier in earlier_of.values() for node in earlier}
    preserve_node_ordering(
        graph,
        {
            node: OrderedSet(stand_ins[other] for other in earlier)
            for node, earlier in earlier_of.items()
            if earlier
        },
    )


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


def is_capturing_whole() -> bool:
    """Whether the model being compiled was given fullgraph=True; False if that cannot be told.

    `InstructionTranslator.current_tx().one_graph` (torch._dynamo.symbolic_convert, 2.11-2.15).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(getattr(InstructionTranslator.current_tx(), "one_graph", False))
    except AttributeError:
        return False


def as_backend_error(error: Exception) -> Exception:
    """Return an error that a backend can raise and torch.compile passes on unchanged.

    Dynamo wraps whatever a backend raises in BackendCompilerFailed, except a ShortenTraceback
    (torch._dynamo.exc, 2.11-2.15). The error returned is an instance of both classes, so that
    users catch the one they know.
    """
    from torch._dynamo.exc import ShortenTraceback

    cls = type(error)
    both: Any = type(cls.__name__, (cls, ShortenTraceback), {"__module__": cls.__module__})
    raised: Exception = both.__new__(both)
    raised.__dict__.update(error.__dict__, first_useful_frame=None)
    raised.args = error.args
    return raised


@contextmanager
def fake_mode_of(tensor: Tensor) -> Iterator[None]:
    """Compute under the fake mode that a fake tensor belongs to.

    `maybe_get_fake_mode` (torch._subclasses.fake_tensor, 2.11-2.15).
    """
    from torch._subclasses.fake_tensor import maybe_get_fake_mode

    mode = maybe_get_fake_mode(tensor)
    assert mode is not None
    with mode:
        yield


def trace_fake(
    function: Callable[..., Any], values: Sequence[Tensor], decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """Trace a function on the fake tensors of a graph, symbolic sizes kept.

    `make_fx` with `tracing_mode="real"` on fakes, under their mode and the Python dispatcher: what
    torch._inductor.pattern_matcher.fwd_only does (2.11-2.15).
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), enable_python_dispatcher(), fake_mode_of(values[0]):
        return make_fx(function, dict(decompositions), tracing_mode="real")(*values)


def trace_pre_dispatch(function: Callable[..., Any], values: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function on fake tensors as autograd would see it: composite ops stay whole.

    `make_fx` with `pre_dispatch=True` (torch.fx.experimental.proxy_tensor, 2.11-2.15), as
    torch.export traces.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), enable_python_dispatcher(), fake_mode_of(values[0]):
        return make_fx(function, tracing_mode="real", pre_dispatch=True)(*values)
