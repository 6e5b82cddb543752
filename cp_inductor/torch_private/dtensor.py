"""DTensor's handlers, and torch's context parallelism. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import SymInt, Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.torch_private.leaned_on import TORCHS_ATTENTION
from cp_inductor.torch_private.modes import OpWatcher, run_uncompiled
from cp_inductor.torch_private.shardings import remembered

Handler = Callable[..., Any]  # (op, args, kwargs) -> the results

# Handlers of losses that `loss_parallel` has, and that ours call.
_of_loss_parallel: dict[Any, Handler] = {}
# The handlers of higher-order ops, which DTensor's table does not know.
_of_higher_order: dict[Any, Handler] = {}

# Whether DTensor draws in step on all ranks of a mesh: not on the CPU (2.13-2.15).
has_generator_of_mesh = is_rng_supported_mesh


def torchs_attention() -> Any:
    """Return the module of torch's context parallelism."""
    return import_module(TORCHS_ATTENTION)


@dataclass(frozen=True, slots=True)
class TorchsContextParallel:
    """The state of torch's own context parallelism in this process."""

    # The caller is within torch's `context_parallel`, which has sharded its buffers.
    is_around: bool
    has_shards: bool  # the latest API of torch that sharded something is `_context_parallel_shard`
    is_dispatching: bool  # DTensor computes attention on CUDA by torch's ring
    is_balanced: bool  # shards are permuted to balance the work under a causal mask


def torchs_context_parallel() -> TorchsContextParallel:
    """Return the state of torch's own context parallelism.

    In torch.distributed.tensor.experimental._context_parallel._attention (read in 2.13):
    `context_parallel` replaces scaled_dot_product_attention by a function in
    `_replaced_functions`; `_context_parallel_shard` sets `_dispatch_mode` to MODULE_WRAPPER; both
    set `_cp_options.enable_load_balance`, which the ring reads, too.
    """
    module = torchs_attention()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    table = DTensor._op_dispatcher._custom_op_handlers
    return TorchsContextParallel(
        is_around=F.scaled_dot_product_attention in module._replaced_functions,
        has_shards=module._dispatch_mode is module._DispatchMode.MODULE_WRAPPER,
        is_dispatching=table.get(op) is module.custom_ops[op],
        is_balanced=bool(module._cp_options.enable_load_balance),
    )


def torchs_load_balance(is_balanced: bool) -> AbstractContextManager[Any]:
    """Return a context that tells torch's `context_parallel_unshard` whether shards are permuted.

    Torch's own `context_parallel` sets and restores it in the same way (2.13).
    """
    return mock.patch.object(torchs_attention()._cp_options, "enable_load_balance", is_balanced)


def register_dtensor_handler(op: Any, handler: Handler, *, is_loss: bool = False) -> None:
    """Make DTensor call `handler(op, args, kwargs)` instead of dispatching `op`, uncompiled.

    `DTensor._op_dispatcher._custom_op_handlers` (torch.distributed.tensor._dispatch, 2.13-2.15).
    A higher-order op has a table of its own, `HigherOrderOperator.python_key_table` (torch._ops,
    2.13-2.15), to which `py_impl` adds. If torch has a rule there, it stays.

    There may be two tables. While torch's own context parallelism is switched on, DTensor uses a
    copy of its first table, to which torch has added its own handlers (`custom_ops`). When it is
    switched off, DTensor uses the first table again (read in 2.13, and in one release before it).
    So the handler is added to both tables, but never replaces a handler of torch's.

    On entry, `loss_parallel` adds handlers of its own (`customized_loss_ops`,
    torch.distributed.tensor.parallel.loss, 2.13-2.15); on exit it removes them, and would remove
    ours. So its handler of a loss is taken out: see `handler_of_loss_parallel`.

    Args:
        op: of DTensors.
        handler: takes the place of the last one.
        is_loss: whether `loss_parallel` may have a handler for the op.
    """
    run_uncompiled(handler)
    if isinstance(op, HigherOrderOperator):
        if DTensor not in op.python_key_table:
            op.py_impl(DTensor)(partial(_call_handler, op))
            _of_higher_order[op] = handler
        elif op in _of_higher_order:
            _of_higher_order[op] = handler
        return
    if is_loss:
        from torch.distributed.tensor.parallel.loss import customized_loss_ops

        if op in customized_loss_ops:
            _of_loss_parallel[op] = customized_loss_ops.pop(op)
    table = DTensor._op_dispatcher._custom_op_handlers
    first = _first_handlers()
    first[op] = handler
    if table is not first and op not in torchs_attention().custom_ops:
        table[op] = handler


def _call_handler(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    return _of_higher_order[op](op, args, kwargs)


run_uncompiled(_call_handler)


def handler_of_loss_parallel(op: OpOverload) -> Handler | None:
    """Return the handler that `loss_parallel` has for a loss, while it is entered.

    It is if DTensor's handler of `_log_softmax` is its own.
    """
    from torch.distributed.tensor.parallel.loss import customized_loss_ops

    softmax = torch.ops.aten._log_softmax.default
    own = DTensor._op_dispatcher._custom_op_handlers.get(softmax)
    return _of_loss_parallel.get(op) if own is customized_loss_ops[softmax] else None


def dtensor_handler(op: Any) -> Handler:
    """Return what DTensor calls for `op`: its handler, or else its own dispatch."""
    table = _of_higher_order if isinstance(op, HigherOrderOperator) else _first_handlers()
    return table.get(op, dispatch_as_dtensor)


def _first_handlers() -> dict[Any, Handler]:
    """Return DTensor's first table, wherever torch keeps it.

    While the copy is in use, torch keeps the first table in a module variable, whose name differs
    between releases. It is the dict with a handler for `is_same_size`, which every release has.
    """
    op = torch.ops.aten.is_same_size.default
    # Before its import, torch cannot have made a copy.
    module = sys.modules.get(TORCHS_ATTENTION)
    for value in () if module is None else vars(module).values():
        if isinstance(value, dict) and op in value:
            return value
    return DTensor._op_dispatcher._custom_op_handlers


def dispatch_as_dtensor(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch `op` as DTensor does if no handler is registered for it.

    The steps of `OpDispatcher` (torch.distributed.tensor._dispatch, 2.13-2.15): unwrap, propagate
    shardings, redistribute if the sharding rule needs it and run on the local tensors, wrap.
    """
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)

    def choose() -> Any:
        dispatcher.sharding_propagator.propagate(info)
        return info.output_sharding

    sharding = info.output_sharding = remembered.recall(info.schema, choose)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, sharding.output_spec)


def has_symbols_as_strides(value: Any) -> bool:
    """Whether a value is a DTensor that DTensor's dispatch in C++ cannot hash (2.13-2.15).

    Such as x[:, 0], of which tokens are symbols in the strides alone.
    """
    if not isinstance(value, DTensor) or any(isinstance(size, SymInt) for size in value.shape):
        return False
    return any(isinstance(stride, SymInt) for stride in value.stride())


def without_handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `op` as DTensor does if no handler is registered for it, its generator included."""
    leaves = pytree.tree_leaves((args, kwargs))
    if op not in ops_that_draw() and any(has_symbols_as_strides(leaf) for leaf in leaves):
        return dispatch_as_dtensor(op, args, kwargs)
    table = DTensor._op_dispatcher._custom_op_handlers
    handler = table.pop(op, None)  # None: another thread is in here, and puts it back
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def ops_that_draw() -> tuple[OpOverload, ...]:
    """Return the ops for which DTensor has a generator of its own, where it has one (2.13-2.15)."""
    return tuple(DTensor._op_dispatcher._random_ops)


def local_of(tensor: DTensor) -> Tensor:
    """Return what a rank holds of a DTensor, without autograd (2.13-2.15)."""
    return tensor._local_tensor


def are_plain_tensors_replicated() -> bool:
    """Whether `implicit_replication` takes plain tensors as replicated (2.13-2.15)."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor that every rank has whole, below autograd, without an op (2.13-2.15)."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def with_version_of(tensor: Tensor, dtensor: DTensor) -> DTensor:
    """Return a DTensor again, below autograd, with the version of another tensor (2.13-2.15).

    A write to one is then a write to the other: what `detach` returns shares the version of its
    argument, also if a mode has replaced it.
    """
    local, mode = dtensor._local_tensor, OpWatcher()
    again = DTensor(local, dtensor._spec, requires_grad=local.requires_grad)
    vars(mode)["call"] = lambda *_: again
    with mode:
        replaced: Any = tensor.detach()
    return replaced


def flex_attention_op() -> Any:
    """Return the higher-order op that flex_attention calls, in eager code and in Dynamo's graphs.

    Its name is public, and so is the module that registers it (read in 2.13.0).
    """
    import_module("torch.nn.attention.flex_attention")
    return torch.ops.higher_order.flex_attention


def varlen_op() -> Any:
    """Return the op that varlen_attn, which is public, calls (read in 2.13.0).

    None in releases where `torch_attn::_varlen_attn` has none of these arguments.
    """
    try:
        import_module("torch.nn.attention.varlen")
        op = torch.ops.torch_attn._varlen_attn.default
    except (ImportError, AttributeError):
        return None
    names = {argument.name for argument in op._schema.arguments}
    return op if {"cu_seq_q", "window_size", "seqused_k", "block_table"} <= names else None


# Called with a DTensor whose data is about to be replaced; they may refuse it.
checks_of_given_data: list[Callable[[DTensor], None]] = []


def follow_memory(whole: Callable[[DTensor], Tensor | None]) -> None:
    """Let DTensors follow what reads their memory, or replaces it, which torch does by no op.

    `tolist` and `numpy`, which torch (2.13-2.15) refuses, read another tensor. The array is a copy,
    and read-only: what is written to it would not reach the DTensor.

    ``tensor.data = other`` (`TensorBase.data`, 2.13-2.15) gives a DTensor the other's part and
    placements, too. It would have the other's shape, and go on to hold its own part.

    Args:
        whole: the tensor to read; None has torch refuse.
    """
    of_base: Any = torch._C.TensorBase.data

    def tolist(self: DTensor) -> Any:
        read = whole(self)
        return Tensor.tolist(self if read is None else read)

    def numpy(self: DTensor, *, force: bool = False) -> Any:
        read = whole(self)
        if read is None:
            return Tensor.numpy(self, force=force)
        array = read.numpy(force=force)
        array.flags.writeable = False
        return array

    def set_data(tensor: Any, other: Any) -> None:
        if not isinstance(other, DTensor):
            raise UnsupportedPlacement(
                site="x.data = ...",
                expected="a DTensor as the data of a DTensor",
                got=f"a plain tensor of shape {tuple(other.shape)}",
                remedy="distribute it: distribute_tensor(data, x.device_mesh, x.placements)",
            )
        for check in checks_of_given_data:
            check(tensor)
        of_base.__set__(tensor, other)
        tensor._local_tensor, tensor._spec = other._local_tensor, other._spec

    run_uncompiled(set_data)
    of_dtensor: Any = DTensor
    of_dtensor.tolist, of_dtensor.numpy = tolist, numpy
    of_dtensor.data = property(of_base.__get__, set_data)


def is_propagating_shapes(tensor: Tensor) -> bool:
    """Whether Dynamo propagates example values: shapes, with no graph being traced (2.13-2.15)."""
    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None
