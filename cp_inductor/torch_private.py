"""The private and moving corners of torch that this package leans on.

Read in torch 2.11.0, 2.13.0 and 2.15.0; each function names what it stands on. What torch's
compilers offer their backends is imported where it is used (tests/test_layout.py says what, and
where); `LEANED_ON` lists both by name for ``python -m cp_inductor doctor`` and
`tests/test_torch_private.py`, which fail loudly when one of them moves.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import getitem
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    group = group_of(group_name)
    return dist.get_rank(group), dist.get_world_size(group)


def group_with_store(
    group_name: str,
) -> tuple[dist.ProcessGroup, Callable[[], tuple[dist.Store, float]]]:
    """Return a process group named by c10d, and what returns its store and its timeout in seconds.

    `_resolve_process_group` (torch.distributed.distributed_c10d, 2.11-2.15), as above;
    `ProcessGroup.get_group_store`, which is public; `ProcessGroup._device_types`, `._get_backend`
    and `.options._timeout` of its backends (torch._C._distributed_c10d, 2.11-2.15). The store's own
    timeout is not the group's.
    """
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    group = resolve(group_name)

    def ask() -> tuple[dist.Store, float]:
        store: Any = group.get_group_store()
        backends = [group._get_backend(device) for device in group._device_types]
        timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
        return store, min(timeouts, default=store.timeout).total_seconds()

    return group, ask


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


def local_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Any]
) -> tuple[int, ...]:
    """Return the shape of this rank's piece of a distributed tensor.

    `compute_local_shape_and_global_offset` (torch.distributed.tensor._utils, 2.11-2.15).
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[0])


def register_dtensor_handler(op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
    """Have DTensor call `handler(op, args, kwargs)` where it would dispatch `op`.

    `DTensor._op_dispatcher._custom_op_handlers` (torch.distributed.tensor._dispatch, 2.11-2.15).
    While torch's own context parallelism is switched on, DTensor looks into a copy of that table
    with handlers of torch's in it (`custom_ops`), and switched off into the first one again, which
    torch keeps in a variable whose name differs between releases (read in 2.13, and in one before
    it). So a handler goes into the first table, and into a copy that there is, where it takes no
    place of torch's.
    """
    table = DTensor._op_dispatcher._custom_op_handlers
    first = _first_handlers()
    first[op] = handler
    if table is not first and op not in _torchs_attention().custom_ops:
        table[op] = handler


def _first_handlers() -> dict[Any, Callable[..., Any]]:
    # What every table has from the start.
    op = torch.ops.aten.is_same_size.default
    for value in vars(_torchs_attention()).values():
        if isinstance(value, dict) and op in value:
            return value
    return DTensor._op_dispatcher._custom_op_handlers


_TORCHS_ATTENTION = "torch.distributed.tensor.experimental._context_parallel._attention"


def _torchs_attention() -> Any:
    return import_module(_TORCHS_ATTENTION)


@dataclass(frozen=True, slots=True)
class TorchsContextParallel:
    """What torch's own context parallelism is doing in this process.

    Attributes:
        is_around: its `context_parallel` has been entered, and has cut the buffers.
        has_shards: `_context_parallel_shard` was the last to cut something, at some time.
        is_dispatching: DTensor's attention on CUDA is its ring.
        is_balanced: what it has cut, and cuts, is permuted.
    """

    is_around: bool
    has_shards: bool
    is_dispatching: bool
    is_balanced: bool


def torchs_context_parallel() -> TorchsContextParallel:
    """Look what torch's own context parallelism is doing.

    All in torch.distributed.tensor.experimental._context_parallel._attention (read in 2.13):
    `context_parallel` puts a function of `_replaced_functions` in the place of
    scaled_dot_product_attention, `_context_parallel_shard` sets `_dispatch_mode` to MODULE_WRAPPER,
    and both set `_cp_options.enable_load_balance`, which says of the ring, too, what it computes.
    """
    module = _torchs_attention()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    table = DTensor._op_dispatcher._custom_op_handlers
    return TorchsContextParallel(
        is_around=F.scaled_dot_product_attention in module._replaced_functions,
        has_shards=module._dispatch_mode is module._DispatchMode.MODULE_WRAPPER,
        is_dispatching=table.get(op) is module.custom_ops[op],
        is_balanced=bool(module._cp_options.enable_load_balance),
    )


@contextmanager
def torchs_load_balance(is_balanced: bool) -> Iterator[None]:
    """Tell torch's `context_parallel_unshard` what it is given inside: permuted shards, or not.

    `_cp_options.enable_load_balance` (torch.distributed.tensor.experimental._context_parallel, read
    in 2.13), which torch's own `context_parallel` sets, and sets back, in the same way.
    """
    options = _torchs_attention()._cp_options
    before = options.enable_load_balance
    options.enable_load_balance = is_balanced
    try:
        yield
    finally:
        options.enable_load_balance = before


def order_of_balancer(load_balancer: Any) -> Tensor | None:
    """Return where each token of a sequence is among the shards that a balancer has permuted.

    `_LoadBalancer._generate_indices` (torch.distributed.tensor.experimental._context_parallel, read
    in 2.13): (1, S), or (B, S) where the entries of a batch differ; None where none has moved.
    """
    indices: Tensor | None = load_balancer._generate_indices(restore=True)
    return indices


def let_modes_see(function: Callable[..., Any]) -> None:
    """Have Dynamo ask the modes that it traces under about a function of torch.

    It asks about those in a set (`get_overridable_functions`, torch._dynamo.variables.torch, read
    in 2.13) that it makes once per process of what is in torch's namespaces then: if that is
    under torch's `context_parallel`, which replaces scaled_dot_product_attention there, it never
    asks about the function itself again.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(function)


def has_dtensor_strategy(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor brings a sharding rule of its own for `op`.

    `ShardingPropagator.op_strategy_funcs` (torch.distributed.tensor._sharding_prop, 2.11-2.15).
    """
    return op in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def register_loss_handler(op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
    """Have DTensor call `handler(loss_parallel's own or None, op, args, kwargs)` for a loss.

    `loss_parallel` puts handlers of its own (`customized_loss_ops`, torch.distributed.tensor.
    parallel.loss, 2.11-2.15) in the place of any other when it is entered, and leaves the place
    empty when it is left. So the one for `op` is taken from it, to be called by ours: while the
    others, of which it is told by the one for _log_softmax, are in their place.
    """
    from torch.distributed.tensor.parallel.loss import customized_loss_ops

    softmax = torch.ops.aten._log_softmax.default
    registered = _first_handlers().get(op)
    if not isinstance(registered, LossHandler):
        of_parallel = customized_loss_ops.pop(op, None)
        registered = LossHandler(handler, of_parallel, softmax, customized_loss_ops[softmax])
    register_dtensor_handler(op, registered)


@dataclass(frozen=True)
class LossHandler:
    handler: Callable[..., Any]
    of_parallel: Callable[..., Any] | None
    sign: torch._ops.OpOverload
    sign_handler: Callable[..., Any]

    def __call__(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        table = DTensor._op_dispatcher._custom_op_handlers
        is_parallel = table.get(self.sign) is self.sign_handler
        return self.handler(self.of_parallel if is_parallel else None, op, args, kwargs)


def group_of(group_name: str) -> dist.ProcessGroup:
    """Return the process group that has a name now (`_resolve_process_group`, 2.11-2.15)."""
    # From 2.13 names have a type of their own, a str to everybody but type checkers.
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return resolve(group_name)


def backend_compiled_for() -> Any:
    """Return the backend for which Dynamo is tracing, or which it has called; None if none.

    `InstructionTranslator.current_tx().output.compiler_fn` (torch._dynamo.symbolic_convert),
    wrapped as `_torchdynamo_orig_backend` (torch._dynamo.eval_frame) and in
    `torch._TorchCompileWrapper` say (read in 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif isinstance(backend, torch._TorchCompileWrapper):
            backend = backend.compiler_fn
        else:
            return backend


def without_modes() -> Any:
    """Return a context in which tensors are what they say: no fake tensors, no other mode.

    `torch.utils._python_dispatch._disable_current_modes`, 2.11-2.15.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def dispatch_as_dtensor(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what DTensor does with `op` when no handler is registered for it.

    The steps of `OpDispatcher` (torch.distributed.tensor._dispatch, 2.11-2.15): unwrap, propagate
    shardings, redistribute where they ask for it, run on the local tensors, wrap. A rank that the
    mesh does not hold runs nothing.
    """
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    assert sharding is not None
    if info.compute_mesh.get_coordinate() is None:
        return dispatcher.wrap(_nothing_of(sharding.output_spec), sharding.output_spec)
    if sharding.needs_redistribute:
        assert sharding.redistribute_schema is not None
        dispatcher.redistribute_local_args(
            info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    local_args = info.local_args
    if info.args_tree_spec is not None:
        local_args = pytree.tree_unflatten(list(local_args), info.args_tree_spec)
    return dispatcher.wrap(op(*local_args, **info.local_kwargs), sharding.output_spec)


def sdpa_backends_at(node: fx.Node) -> list[SDPBackend] | None:
    """Return what an `sdpa_kernel` in a Dynamo graph enables where a node is; None without one.

    Dynamo enters and leaves it by calls of `_sdpa_kernel` (torch.nn.attention, 2.11-2.15), which
    are run with the graph. To the passes the switches are what they are around the model.
    """
    while node.op != "root":
        if node.op == "call_function" and node.target is torch.nn.attention._sdpa_kernel:
            names: Any = node.args[0]
            return [name.target(*name.args) for name in names]
        node = node.prev
    return None


def _nothing_of(spec: Any) -> Any:
    """Return what DTensor has for a result on a rank that its mesh does not hold."""
    if spec is None:
        return None
    if isinstance(spec, (tuple, list)):
        return [_nothing_of(one) for one in spec]
    dtype = spec.tensor_meta.dtype
    return torch.tensor([], dtype=dtype) if spec.tensor_meta.shape else torch.zeros((), dtype=dtype)


def flex_attention_op() -> Any:
    """Return the higher-order op that flex_attention calls, in eager and in Dynamo's graphs.

    `torch.ops.higher_order.flex_attention`, which importing torch._higher_order_ops (2.11-2.15)
    registers.
    """
    return import_module("torch._higher_order_ops.flex_attention").flex_attention


def register_dtensor_flex_attention(rule: Callable[..., Any]) -> None:
    """Have flex_attention on DTensors call `rule`, unless torch has one; process-wide.

    `HigherOrderOperator.python_key_table` (torch._ops, 2.11-2.15) is what `py_impl` fills.
    """
    op = flex_attention_op()
    if DTensor not in op.python_key_table:
        op.py_impl(DTensor)(rule)


def run_uncompiled(function: Callable[..., Any]) -> None:
    """Have Dynamo leave a function, and what it calls, alone when they run in eager.

    Where a graph breaks, Dynamo compiles every function that eager code calls, `__torch_function__`
    and handlers of DTensor among them. There it takes one property of a tensor for another: of the
    getters that a mode is called with, its guards (torch 2.13) do not know one from the other.
    What it meets while it traces it still traces.

    `torch._C._dynamo.eval_frame.set_code_exec_strategy`, 2.11-2.15.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def function_modes() -> list[Any]:
    """Return the modes for torch functions that this thread is in, the innermost last.

    `torch.overrides._get_current_function_mode_stack`, 2.11-2.15.
    """
    from torch.overrides import _get_current_function_mode_stack

    return _get_current_function_mode_stack()


def rerun_within(context: AbstractContextManager[Any]) -> None:
    """Have every checkpoint that this is called under run its function in `context` again, too.

    `torch.utils.checkpoint` (2.11-2.15) runs a function again in the backward, when the modes that
    it ran under may be gone; of these it brings back dispatch modes of its own, autocast and the
    default device. What it is about to run again, it holds while it runs it for the first time:
    reentrant checkpoints as `ctx.run_function` in `CheckpointFunction.forward`; others in a
    `_CheckpointFrame`, of which `checkpoint` holds the generator that made it, and which the hook
    for saved tensors closes over (`torch.distributed._composable.checkpoint` leaves no more).
    """
    for holder, name in (*_checkpoints_on_stack(), *_checkpoint_of_hooks()):
        function = getattr(holder, name)
        if context not in getattr(function, "contexts", ()):
            setattr(holder, name, _Within(function, context))


def _checkpoints_on_stack() -> Iterator[tuple[Any, str]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(torch.utils.checkpoint):
            if frame.f_code is torch.utils.checkpoint.CheckpointFunction.forward.__code__:
                yield frame.f_locals["ctx"], "run_function"
            elif "gen" in frame.f_locals:
                yield frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"
        frame = frame.f_back


def _checkpoint_of_hooks() -> Iterator[tuple[Any, str]]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        for cell in getattr(hooks[0], "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.utils.checkpoint._CheckpointFrame):
                yield cell.cell_contents, "recompute_fn"


class _Within:
    """A function that runs in a context."""

    def __init__(self, function: Callable[..., Any], context: AbstractContextManager[Any]) -> None:
        self.function = function
        self.context = context
        self.contexts = (context, *getattr(function, "contexts", ()))

    def __call__(self, *args: Any) -> Any:
        with self.context:
            return self.function(*args)


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


def is_input_of_forward(node: fx.Node) -> bool:
    """Whether an input of a graph from AOTAutograd is one that the whole function was called with.

    Not one that the forward computed and saved, nor a gradient. AOTAutograd says so in
    `meta["desc"]`: an `AOTInput` (torch._functorch._aot_autograd.descriptors, 2.11-2.15).
    """
    from torch._functorch._aot_autograd.descriptors import AOTInput

    description = node.meta.get("desc")
    return isinstance(description, AOTInput) and not description.is_tangent()


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value that a size has in the call being compiled, without a guard on it.

    `SymInt.node.hint` (torch.fx.experimental.sym_node, 2.11-2.15).
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size in terms of symbols, as far as they are known by now.

    `SymInt.node.expr` (torch.fx.experimental.sym_node, 2.11-2.15).
    """
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes or strides holds whatever they turn out to be; adds no guard.

    `statically_known_true` (torch.fx.experimental.symbolic_shapes, 2.11-2.15).
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return condition if isinstance(condition, bool) else statically_known_true(condition)


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


def is_capturing_whole() -> bool:
    """Whether the model being compiled was given fullgraph=True; False if that cannot be told.

    `InstructionTranslator.current_tx().one_graph` (torch._dynamo.symbolic_convert, 2.11-2.15).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(getattr(InstructionTranslator.current_tx(), "one_graph", False))
    except AttributeError:
        return False


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, Any]]:
    """Yield each input of a graph from Dynamo, its name in the model, and its value.

    `GraphArg` (torch._dynamo.variables.builder, 2.11-2.15), in the "grapharg" of a placeholder's
    meta, knows where a value came from: ``L['self']._modules['head']._parameters['weight']``. Of
    graphs that Dynamo did not make there is nothing to yield.
    """
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None:
            continue
        source = getattr(argument, "source", None)
        # A method before 2.13.
        name = getattr(source, "name", "")
        name = str(name() if callable(name) else name)
        path = re.findall(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", name)
        yield node, ".".join(path) or name or node.name, argument.example


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether somebody hooked into the gradient of a tensor.

    `_backward_hooks`, `_post_accumulate_grad_hooks` of a tensor (2.11-2.15): dicts, None as long as
    there are none.
    """
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(tensor, name, None) for name in names)


def is_splitting_for_ddp() -> bool:
    """Whether a model in DistributedDataParallel is compiled, whose graph Dynamo cuts into buckets.

    `DistributedDataParallel._get_active_ddp_module` (torch.nn.parallel, 2.11-2.15).
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


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


@contextmanager
def unbacked_ignored(tensor: Tensor) -> Iterator[None]:
    """Let sizes that depend on data go again which are made under the fake mode of a tensor.

    `ShapeEnv.ignore_fresh_unbacked_symbols` (torch.fx.experimental.symbolic_shapes, 2.11-2.15).
    """
    from torch._subclasses.fake_tensor import maybe_get_fake_mode

    mode = maybe_get_fake_mode(tensor)
    if mode is None or mode.shape_env is None:
        yield
        return
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def trace_fake(
    function: Callable[..., Any],
    values: Sequence[Any],
    decompositions: Mapping[Any, Any],
    *,
    like: Tensor | None = None,
) -> fx.GraphModule:
    """Trace a function on the fake tensors of a graph, symbolic sizes kept.

    Under the fake mode of `like`, or of the first value.

    `make_fx` with `tracing_mode="real"` on fakes, under their mode and the Python dispatcher: what
    torch._inductor.pattern_matcher.fwd_only does (2.11-2.15).
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    like = values[0] if like is None else like
    with torch.no_grad(), enable_python_dispatcher(), fake_mode_of(like):
        return make_fx(function, dict(decompositions), tracing_mode="real")(*values)


@cache
def core_decompositions() -> Mapping[Any, Any]:
    """Return what makes core aten ops of others (torch._decomp, 2.11-2.15)."""
    from torch._decomp import core_aten_decompositions

    decompositions: Mapping[Any, Any] = core_aten_decompositions()
    return decompositions


def fakes_of_shapes(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Return fake tensors of the CPU, each in a storage of its own.

    `FakeTensorMode` (torch._subclasses.fake_tensor, 2.11-2.15): a new one, without symbolic sizes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return [torch.empty(tuple(s), dtype=dtype, device="cpu") for s, dtype in shapes]


def trace_of_shapes(
    function: Callable[..., Any],
    shapes: Sequence[tuple[Sequence[int], torch.dtype]],
    decompositions: Mapping[Any, Any],
) -> fx.GraphModule:
    """Trace a function of tensors of which shapes and dtypes are given, all of them on the CPU.

    What `torch.fx.traceback.annotate` says within the function is kept in the meta of the nodes:
    `preserve_node_meta` (torch.fx.traceback, 2.11-2.15).
    """
    from torch.fx.traceback import preserve_node_meta

    like, *values = fakes_of_shapes([((), torch.bool), *shapes])
    with preserve_node_meta():
        return trace_fake(function, values, decompositions, like=like)


def tensors_written(function: Callable[[], Any], like: Tensor) -> list[Tensor]:
    """Return the tensors that are written to in place when a function is called on fake tensors.

    An op tells by its schema: `OpOverload._schema` (torch._ops), `TorchDispatchMode`
    (torch.utils._python_dispatch), 2.11-2.15.

    Args:
        like: a fake tensor, or one of fake tensors, whose mode the others have.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    written: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            bound = bind_arguments(func, args, kwargs or {})
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    values = pytree.tree_leaves(bound[argument.name])
                    written.extend(value for value in values if isinstance(value, Tensor))
            return func(*args, **(kwargs or {}))

    local = like.to_local() if isinstance(like, DTensor) else like
    with torch.no_grad(), fake_mode_of(local), Watch():
        function()
    return written


def trace_pre_dispatch(function: Callable[..., Any], values: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function on fake tensors as autograd would see it: composite ops stay whole.

    `make_fx` with `pre_dispatch=True` (torch.fx.experimental.proxy_tensor, 2.11-2.15), as
    torch.export traces.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), enable_python_dispatcher(), fake_mode_of(values[0]):
        return make_fx(function, tracing_mode="real", pre_dispatch=True)(*values)


def retrace(
    run: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """Trace an interpreter's run over a graph, each node keeping the meta of its origin.

    `preserve_node_meta` (torch.fx.traceback, 2.11-2.15): what AOTAutograd and the partitioner left
    in `meta` (tags, recomputation, stack traces) is copied to the nodes traced for a node.
    `_AutoDispatchBelowAutograd` (torch._C, 2.11-2.15): above it, a torch without kernels of the
    device decomposes composite ops that have such kernels (silu_backward), by its own means.
    """
    from torch.fx.traceback import preserve_node_meta

    tensors = [value for value in values if isinstance(value, Tensor)]
    with preserve_node_meta(), torch._C._AutoDispatchBelowAutograd():
        return trace_fake(run, values, decompositions, like=tensors[0])


def fake_on(value: Any, device: torch.device) -> Any:
    """Return a fake tensor as it would be on a device that need not exist; others unchanged.

    `FakeTensor` (torch._subclasses.fake_tensor, 2.11-2.15) wraps a meta tensor and a device.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor):
        return value
    size, stride = value.shape, value.stride()
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, device)


def fake_copy(value: Tensor) -> Tensor:
    """Return another fake tensor like a tensor, under the fake mode that is on.

    Of a DTensor, a plain tensor as large as the whole: to compute with DTensors has effects, on
    masks that their placements share for one. `FakeTensor` as in `fake_on`.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor) and isinstance(local, FakeTensor):
        with torch._C._DisableTorchDispatch():
            size, stride = value.shape, value.stride()
            meta = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
        return FakeTensor(local.fake_mode, meta, local.device)
    if isinstance(value, FakeTensor):
        copy: Tensor = fake_on(value, value.device)
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def is_in_backward() -> bool:
    """Whether autograd runs on this thread: a backward, a hook, a checkpoint that runs again.

    `torch._C._current_graph_task_id`, 2.11-2.15.
    """
    return torch._C._current_graph_task_id() != -1


class OpWatcher(TorchDispatchMode):
    """Calls `meet(op, args, kwargs, out)` behind every op that tensors go through inside.

    `TorchDispatchMode` (torch.utils._python_dispatch, 2.11-2.15).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            self.meet(func, args, kwargs, out)
        return out

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Note an op."""
        raise NotImplementedError


@contextmanager
def autocast_restored() -> Iterator[list[Any]]:
    """Leave the autocasts that a graph is in where its run ends, in a list that it keeps.

    `_enter_autocast` and `_exit_autocast` (torch.amp, 2.11-2.15).
    """
    entered: list[Any] = []
    try:
        yield entered
    finally:
        for mode in reversed(entered):
            torch.amp._exit_autocast(mode)


@contextmanager
def fakes_without_devices() -> Iterator[None]:
    """Let fake tensors of devices that are not there be indexed, inverted, copied to and from.

    Some methods of tensors enter their device before they dispatch (THPVariable_getitem, and those
    with an OptionalDeviceGuard in torch/csrc/autograd/python_variable_methods.cpp, 2.11-2.15); no
    op does. Inside, fakes have methods that call the ops.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    aten = torch.ops.aten
    methods = {
        "contiguous": _contiguous,
        "copy_": lambda tensor, source, non_blocking=False: aten.copy_(
            tensor, source, non_blocking
        ),
        "__invert__": lambda tensor: aten.bitwise_not(tensor),
        "__getitem__": _index,
    }
    with ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method))
        yield


@contextmanager
def constants_folded_on_cpu() -> Iterator[None]:
    """Have Inductor compute the constants of a joint graph on the CPU, wherever they are to be.

    `UniformValueConstantFolder` (torch._inductor.fx_passes.joint_graph, 2.11-2.15) runs what makes
    uniform tensors, with one element of each, on the device that the graph names.
    """
    from torch._inductor.fx_passes import joint_graph

    class OnCPU(joint_graph.UniformValueConstantFolder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _DevicesReplaced(torch.device("cpu")):
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with _DevicesReplaced(torch.device("cpu")):
                return super().run(*args, **kwargs)

    with mock.patch.object(joint_graph, "UniformValueConstantFolder", OnCPU):
        yield


class _DevicesReplaced(TorchFunctionMode):
    """Calls functions and ops with another device than they are given."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda _: self.device, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _contiguous(tensor: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    result: Tensor = torch.ops.aten.contiguous(tensor, memory_format=memory_format)
    return result


def _index(tensor: Tensor, index: Any) -> Tensor:
    """Index as Python does: integers, slices, None, ... and tensors."""
    aten = torch.ops.aten
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    used += sum(part.ndim - 1 for part in parts if _is_mask(part))
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    at = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[at : at + 1] = [slice(None)] * (tensor.ndim - used)
    dim, tensors = 0, {}
    for part in parts:
        if part is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            tensors[dim] = part
            dim += part.ndim - 1 if _is_mask(part) else 0
        elif isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool):
            tensor = aten.select(tensor, dim, part)
            continue
        else:
            raise NotImplementedError(f"indexing a fake tensor by {part!r}")
        dim += 1
    if not tensors:
        return tensor
    result: Tensor = aten.index(tensor, [tensors.get(place) for place in range(max(tensors) + 1)])
    return result


def _is_mask(part: object) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


_C10D_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("tags_to_pg", "pg_to_tag", "pg_coalesce_state"),
    "pg_flight_recorder_hooks",  # in 2.15
)


@contextmanager
def stashed_process_groups() -> Iterator[None]:
    """Have a world without process groups inside; put those of before back at the end.

    Groups of the same names can then be made inside: names are part of generated code. The tables
    of `torch.distributed.distributed_c10d._world` and the C++ registry by name
    (`_register_process_group`; 2.11-2.15) are emptied and filled again; the groups themselves
    live on. `init_process_group` also hooks `sys.excepthook`, to say the rank.
    """
    import sys

    c10d = dist.distributed_c10d
    world = c10d._world
    tables = [getattr(world, name) for name in _C10D_TABLES if hasattr(world, name)]
    saved = [dict(table) for table in tables]
    registered = dict(world.pg_names)
    default, count = world.default_pg, world.group_count
    method, hook = c10d._default_pg_init_method, sys.excepthook

    def swap(contents: Sequence[Mapping[Any, Any]]) -> None:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)

    for name in registered.values():
        c10d._unregister_process_group(name)
    swap([{}] * len(tables))
    c10d._update_default_pg(None)
    world.group_count = 0
    _clear_sharding_caches()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        swap(saved)
        for group, name in registered.items():
            c10d._register_process_group(name, group)
        c10d._update_default_pg(default)
        world.group_count, c10d._default_pg_init_method = count, method
        sys.excepthook = hook
        _clear_sharding_caches()


def _clear_sharding_caches() -> None:
    """Forget what DTensor has worked out: it depends on the rank, its keys do not.

    `_clear_sharding_prop_cache` (torch.distributed.tensor.debug, 2.11-2.15).
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


@contextmanager
def code_only(sink: Callable[[str], None]) -> Iterator[None]:
    """Have Inductor hand over the code it generates, and compile and load none of it.

    `GraphLowering.compile_to_module` (torch._inductor.graph, 2.11-2.15) generates, then loads.
    """
    from torch._inductor.graph import GraphLowering

    def generate(self: GraphLowering) -> SimpleNamespace:
        code, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        sink(code.value)
        return SimpleNamespace(call=_call_nothing, runner=None, __file__="never_loaded.py")

    with mock.patch.object(GraphLowering, "compile_to_module", generate):
        yield


def _call_nothing(*args: Any) -> None:
    raise AssertionError("code that was only generated cannot be called")


# Where Inductor's questions about devices and Triton are answered once per process.
_DEVICE_CACHES = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.runtime.hints:DeviceProperties",
    "torch._inductor.codecache:CacheBase",
)


def _clear_device_caches() -> None:
    for place in _DEVICE_CACHES:
        module, _, name = place.partition(":")
        try:
            owner: Any = import_module(module)
        except ImportError:  # cuda_env is not in all three
            continue
        for value in list(vars(getattr(owner, name) if name else owner).values()):
            function = getattr(value, "__func__", value)
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@contextmanager
def pretend_gpu(properties: Any) -> Iterator[None]:
    """Have Inductor and Triton generate code for a GPU that is not there.

    Inductor asks a `DeviceInterface` (torch._dynamo.device_interface, 2.11-2.15), in places
    torch.cuda itself, and Triton's active driver (triton.runtime.driver, 3.6-3.9) what it
    generates for. Nothing may run: there are answers, not a device.

    Args:
        properties: an object with the attributes of `torch.cuda.get_device_properties`.
    """
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    capability = (properties.major, properties.minor)
    arch = 10 * properties.major + properties.minor
    target = GPUTarget("cuda", arch, properties.warp_size)
    pretended = _device_interface(properties)
    dict(device_interface.get_registered_device_interfaces())  # lets torch register its own first
    interfaces = {"cuda": pretended, "cuda:0": pretended}
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    compiler = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    with ExitStack() as stack:
        stack.callback(_clear_device_caches)
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        stack.enter_context(mock.patch.object(driver, "_active", compiler))
        # Generated kernels activate the driver of the GPU they find.
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        _clear_device_caches()
        yield


def _device_interface(properties: Any) -> type:
    from torch._dynamo.device_interface import DeviceInterface

    class Pretended(DeviceInterface):
        class Worker(DeviceInterface.Worker):
            @staticmethod
            def set_device(device: int) -> None:
                pass

            @staticmethod
            def current_device() -> int:
                return 0

            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return properties

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def get_raw_stream(device_idx: int) -> int:
            return 0

        @staticmethod
        def get_compute_capability(device: Any = None) -> int:
            return 10 * int(properties.major) + int(properties.minor)

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return bool(properties.major >= 8)

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return True

    return Pretended


@contextmanager
def compile_state_kept() -> Iterator[None]:
    """Count nothing, cache nothing and follow no stance of the caller's in the compiles inside.

    `torch._dynamo.utils.counters`; `AOT_COUNTER` (torch._functorch.aot_autograd), which numbers
    generated code; the caches' switches in torch._inductor.config and torch._functorch.config
    (2.11-2.15).
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters
    from torch._functorch import aot_autograd

    before = {name: dict(counter) for name, counter in counters.items()}
    try:
        with (
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
            mock.patch.object(aot_autograd, "AOT_COUNTER", itertools.count()),
            torch._functorch.config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            ),
            torch.compiler.set_stance("default"),
        ):
            yield
    finally:
        counters.clear()
        for name, counter in before.items():
            counters[name].update(counter)


def graph_break_reason(error: Exception) -> str | None:
    """Say in a line why Dynamo did not capture a function whole; None if the error is another's.

    `TorchDynamoException` (torch._dynamo.exc, 2.11-2.15), whose text has an "Explanation:".
    """
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines[1:] if line.startswith("Explanation:")]
    reason = ". ".join([*lines[:1], *explained[:1]])
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


MAX_REASON = 400


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a Dynamo graph enters autocast (`_enter_autocast`, torch.amp, 2.11-2.15)."""
    return any(node.target is torch.amp._enter_autocast for node in graph.nodes)


# As each release's CUDA build requires it. Read in the wheels' metadata; 2.13 from its source tree.
_TRITON_OF_TORCH = {
    "2.11": "3.6.0",
    "2.12": "3.7.0",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}


def triton_for_this_torch() -> str:
    """Return the version of triton that belongs to the installed torch; "any" if unknown."""
    return _TRITON_OF_TORCH.get(".".join(torch.__version__.split(".")[:2]), "any")


def compile_triton_kernel(autotuner: Any) -> Iterator[tuple[str, Any]]:
    """Compile a kernel of Inductor's in every configuration it would try; yield text and binary.

    `CachingAutotuner.configs` and `._precompile_config` (torch._inductor.runtime.triton_heuristics,
    2.11-2.15), which its compile workers call, under `pretend_gpu`.
    """
    import torch._inductor.config

    # A kernel compiled for a static launcher hands over a loader of machine code, not the code.
    with torch._inductor.config.patch(use_static_triton_launcher=False):
        for config in autotuner.configs:
            yield str(config).replace(",", ""), autotuner._precompile_config(config).kernel


def cuobjdump_path() -> str:
    """Return where the tool that reads machine code lies.

    `triton.knobs.nvidia.cuobjdump` (triton 3.6-3.9).
    """
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)


_TORCHS_NAMES = (
    "custom_ops",
    "_replaced_functions",
    "_dispatch_mode",
    "_DispatchMode.MODULE_WRAPPER",
    "_cp_options.enable_load_balance",
)

# Everything above that a torch release can move, as module:name, with the parameters it must at
# least take by these names. `doctor` and tests/test_torch_private.py look each of them up.
LEANED_ON: Mapping[str, tuple[str, ...]] = {
    # Imported where it is used: what torch's compilers offer their backends, and small tools.
    "torch._dynamo.backends.common:aot_autograd": (),
    "torch._functorch.aot_autograd:make_boxed_func": (),
    "torch._functorch.partitioners:min_cut_rematerialization_partition": (),
    "torch._inductor:config": (),
    "torch._inductor:list_mode_options": (),
    "torch._logging:trace_structured": (),
    "torch.utils:_pytree": (),
    "torch.utils._config_module:Config": (),
    "torch.utils._config_module:install_config_module": (),
    "torch.distributed.distributed_c10d:_resolve_process_group": (),
    "torch.distributed.distributed_c10d:_register_process_group": (),
    "torch.distributed:ProcessGroup.get_group_store": (),
    "torch.distributed:ProcessGroup._device_types": (),
    "torch.distributed:ProcessGroup._get_backend": (),
    "torch._C._distributed_c10d:ProcessGroupGloo.options": (),
    "torch._C._distributed_c10d:Backend.Options._timeout": (),
    "torch.distributed.distributed_c10d:_unregister_process_group": (),
    "torch.distributed.distributed_c10d:_update_default_pg": ("pg",),
    "torch.distributed.distributed_c10d:_default_pg_init_method": (),
    **{f"torch.distributed.distributed_c10d:_world.{name}": () for name in _C10D_TABLES[:-1]},
    "torch.distributed.distributed_c10d:_world.group_count": (),
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers": (),
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs": (),
    "torch.distributed.tensor:DTensor._op_dispatcher.unwrap_to_op_info": (),
    "torch.distributed.tensor:DTensor._op_dispatcher.redistribute_local_args": (),
    "torch.distributed.tensor:DTensor._op_dispatcher.wrap": (),
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache": (),
    "torch.distributed.tensor.parallel.loss:customized_loss_ops": (),
    "torch._ops:HigherOrderOperator.py_impl": ("k",),
    "torch.ops:higher_order.flex_attention.python_key_table": (),
    "torch.nn.attention:_sdpa_kernel": ("backends",),
    **{f"{_TORCHS_ATTENTION}:{name}": () for name in _TORCHS_NAMES},
    "torch._dynamo.variables.torch:get_overridable_functions": (),
    "torch.utils._python_dispatch:_disable_current_modes": (),
    "torch.utils._python_dispatch:TorchDispatchMode": (),
    "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module": (),
    "torch.overrides:_get_current_function_mode_stack": (),
    "torch._C._dynamo.eval_frame:set_code_exec_strategy": (),
    "torch._C._dynamo.eval_frame:_FrameExecStrategy": (),
    "torch.utils.checkpoint:CheckpointFunction.forward": ("run_function",),
    "torch.utils.checkpoint:_CheckpointFrame.__init__": ("recompute_fn",),
    "torch.utils.checkpoint:_CachingTorchDispatchMode.__init__": ("policy_fn",),
    "torch.utils.checkpoint:_CachedTorchDispatchMode.__init__": ("policy_fn",),
    "torch._C._autograd:_top_saved_tensors_default_hooks": (),
    "torch._inductor.pattern_matcher:stable_topological_sort": ("graph",),
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": (
        "global_shape",
        "mesh",
        "placements",
    ),
    "torch._subclasses.fake_tensor:unset_fake_temporarily": (),
    "torch._subclasses.fake_tensor:maybe_get_fake_mode": (),
    "torch._subclasses.fake_tensor:FakeTensor": (),
    "torch.fx.experimental.symbolic_shapes:statically_known_true": ("x",),
    "torch._subclasses.fake_tensor:FakeTensorMode": (),
    "torch._decomp:core_aten_decompositions": (),
    "torch.fx.experimental.proxy_tensor:get_proxy_mode": (),
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.ignore_fresh_unbacked_symbols": (),
    "torch.fx.experimental.proxy_tensor:make_fx": ("f", "tracing_mode", "pre_dispatch"),
    "torch.fx.traceback:preserve_node_meta": (),
    "torch._dispatch.python:enable_python_dispatcher": (),
    "torch._inductor.fx_passes.control_dependencies:preserve_node_ordering": (
        "graph",
        "additional_deps_map",
    ),
    "torch._inductor.custom_graph_pass:CustomGraphPass": (),
    "torch._inductor.config:post_grad_custom_post_pass": (),
    "torch._inductor.config:joint_custom_pre_pass": (),
    "torch._inductor.config:unsafe_marked_cacheable_functions": (),
    "torch._inductor.compile_fx:compile_fx": ("inner_compile", "config_patches", "decompositions"),
    "torch._inductor.compile_fx:compile_fx_inner": (),
    "torch._inductor.decomposition:select_decomp_table": (),
    "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder.run": (),
    "torch._inductor.graph:GraphLowering.compile_to_module": (),
    "torch._inductor.graph:GraphLowering.codegen": (),
    "torch._inductor.lowering:_maybe_layout_constraints": (),
    "torch._inductor.ir:ExternKernel.require_contiguous": ("x",),
    "torch._inductor.virtualized:V": (),
    "torch._inductor.runtime.hints:DeviceProperties.create": (),
    "torch._inductor.codecache:CacheBase.get_system": (),
    "torch._dynamo.device_interface:device_interfaces": (),
    "torch._dynamo.device_interface:DeviceInterface": (),
    "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx": (),
    "torch._dynamo.variables.builder:GraphArg.example": (),
    "torch:Tensor._backward_hooks": (),
    "torch:Tensor._post_accumulate_grad_hooks": (),
    "torch:_TorchCompileWrapper": (),
    "torch._dynamo.exc:ShortenTraceback": (),
    "torch._dynamo.exc:TorchDynamoException": (),
    "torch._dynamo.utils:counters": (),
    "torch._dynamo.config:automatic_dynamic_local_pgo": (),
    "torch._functorch.config:force_non_lazy_backward_lowering": (),
    "torch._functorch.config:enable_autograd_cache": (),
    "torch._functorch.aot_autograd:AOT_COUNTER": (),
    "torch._functorch._aot_autograd.descriptors:AOTInput.is_tangent": (),
    "torch._C:_AutoDispatchBelowAutograd": (),
    "torch.amp:_enter_autocast": (),
    "torch.amp:_exit_autocast": (),
    "torch.testing._internal.distributed.fake_pg:FakeStore": (),
}

# The same of triton and of what imports it, where it is installed.
LEANED_ON_WITH_TRITON: Mapping[str, tuple[str, ...]] = {
    "triton.runtime.driver:driver._active": (),
    "triton.backends.compiler:GPUTarget": ("backend", "arch", "warp_size"),
    "triton:knobs.nvidia.cuobjdump.path": (),
    "torch._inductor.runtime.triton_helpers:set_driver_to_gpu": (),
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner._precompile_config": ("cfg",),
}


def what_moved(place: str, parameters: Sequence[str]) -> str | None:
    """Say what is not as it was read about an entry of `LEANED_ON`; None if all is."""
    import inspect

    module, _, path = place.partition(":")
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        return f"it is gone: {error}"
    if parameters:
        taken = inspect.signature(value).parameters
        missing = [name for name in parameters if name not in taken]
        if missing:
            return f"it no longer takes {', '.join(missing)}, but {', '.join(taken)}"
    return None


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
