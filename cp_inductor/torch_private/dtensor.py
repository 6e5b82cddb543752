"""Register handlers in DTensor's dispatcher, and call it without them.

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from cp_inductor.torch_private.context_parallel import torchs_attention
from cp_inductor.torch_private.leaned_on import TORCHS_ATTENTION
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.shardings import remembered

_stand_ins: list[Callable[..., Any]] = []


def register_dtensor_handler(op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
    """Make DTensor call `handler(op, args, kwargs)` instead of dispatching `op`, uncompiled.

    `DTensor._op_dispatcher._custom_op_handlers` (torch.distributed.tensor._dispatch, 2.13-2.15).

    There may be two tables. While torch's own context parallelism is switched on, DTensor uses a
    copy of its first table, to which torch has added its own handlers (`custom_ops`). When it is
    switched off, DTensor uses the first table again (read in 2.13, and in one release before it).
    So the handler is added to both tables, but never replaces a handler of torch's.
    """
    run_uncompiled(handler)
    table = DTensor._op_dispatcher._custom_op_handlers
    first = _first_handlers()
    first[op] = handler
    if table is not first and op not in torchs_attention().custom_ops:
        table[op] = handler


def dtensor_handler(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return what DTensor calls for `op`: its handler, or else its own dispatch."""
    return _first_handlers().get(op, dispatch_as_dtensor)


def _first_handlers() -> dict[Any, Callable[..., Any]]:
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


def register_loss_handler(op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
    """Make DTensor call `handler(handler of loss_parallel or None, op, args, kwargs)` for a loss.

    On entry, `loss_parallel` replaces handlers by its own (`customized_loss_ops`,
    torch.distributed.tensor.parallel.loss, 2.13-2.15); on exit it removes them, and would remove
    ours. So its handler for `op` is taken out of `customized_loss_ops` and given to ours to call.
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
    """A handler of a loss that is passed the handler of `loss_parallel` while that is entered.

    Attributes:
        handler: to call with (handler of loss_parallel or None, op, args, kwargs).
        of_parallel: the handler that `loss_parallel` has for this op; None if it has none.
        sign, sign_handler: `loss_parallel` is entered if DTensor's handler of `sign` is this one.
    """

    handler: Callable[..., Any]
    of_parallel: Callable[..., Any] | None
    sign: torch._ops.OpOverload
    sign_handler: Callable[..., Any]

    def __call__(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Handle a call of `op`."""
        table = DTensor._op_dispatcher._custom_op_handlers
        is_parallel = table.get(self.sign) is self.sign_handler
        return self.handler(self.of_parallel if is_parallel else None, op, args, kwargs)


def dispatch_as_dtensor(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dispatch `op` as DTensor does if no handler is registered for it.

    The steps of `OpDispatcher` (torch.distributed.tensor._dispatch, 2.13-2.15): unwrap, propagate
    shardings, redistribute if the sharding rule needs it, run on the local tensors, wrap. A rank
    outside the mesh runs nothing.
    """
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)

    def choose() -> Any:
        dispatcher.sharding_propagator.propagate(info)
        return info.output_sharding

    sharding = info.output_sharding = remembered.recall(info.schema, choose)
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


def without_handler(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `op` as DTensor does if no handler is registered for it, its generator included."""
    table = DTensor._op_dispatcher._custom_op_handlers
    handler = table.pop(op, None)  # None: another thread is in here, and puts it back
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def ops_that_draw() -> tuple[torch._ops.OpOverload, ...]:
    """Return the ops for which DTensor has a generator of its own, where it has one.

    `DTensor._op_dispatcher._random_ops` (torch.distributed.tensor._dispatch, 2.13-2.15).
    """
    return tuple(DTensor._op_dispatcher._random_ops)


def has_generator_of_mesh(mesh: DeviceMesh) -> bool:
    """Whether DTensor draws in step on all ranks of a mesh: not on the CPU.

    `is_rng_supported_mesh` (torch.distributed.tensor._random, 2.13-2.15).
    """
    from torch.distributed.tensor._random import is_rng_supported_mesh

    return is_rng_supported_mesh(mesh)


def local_of(tensor: DTensor) -> Tensor:
    """Return what a rank holds of a DTensor, without autograd.

    `DTensor._local_tensor` (torch.distributed.tensor._api, 2.13-2.15).
    """
    return tensor._local_tensor


def are_plain_tensors_replicated() -> bool:
    """Whether plain tensors beside DTensors are taken as replicated: `implicit_replication`.

    `DTensor._op_dispatcher._allow_implicit_replication` (torch.distributed.tensor._dispatch,
    2.13-2.15).
    """
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor that every rank has whole, below autograd, with no op in between.

    `DTensorSpec`, `TensorMeta` (torch.distributed.tensor._dtensor_spec, 2.13-2.15).
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _nothing_of(spec: Any) -> Any:
    """Return the local result that DTensor gives to a rank outside the mesh: empty tensors."""
    if spec is None:
        return None
    if isinstance(spec, (tuple, list)):
        return [_nothing_of(one) for one in spec]
    dtype = spec.tensor_meta.dtype
    return torch.tensor([], dtype=dtype) if spec.tensor_meta.shape else torch.zeros((), dtype=dtype)


def flex_attention_op() -> Any:
    """Return the higher-order op that flex_attention calls, in eager code and in Dynamo's graphs.

    Its name is public, and so is the module that registers it (read in 2.13.0).
    """
    import_module("torch.nn.attention.flex_attention")
    return torch.ops.higher_order.flex_attention


def register_dtensor_flex_attention(rule: Callable[..., Any], *, is_stand_in: bool = False) -> None:
    """Make flex_attention on DTensors call `rule`, uncompiled, unless torch has a rule.

    `HigherOrderOperator.python_key_table` (torch._ops, 2.13-2.15), to which `py_impl` adds.

    Args:
        rule: takes the arguments of the op.
        is_stand_in: the next rule replaces this one, and this one replaces none.
    """
    op = flex_attention_op()
    if op.python_key_table.get(DTensor) in _stand_ins and not is_stand_in:
        del op.python_key_table[DTensor]
    if DTensor not in op.python_key_table:
        run_uncompiled(rule)
        op.py_impl(DTensor)(rule)
        if is_stand_in:
            _stand_ins.append(rule)


def read_memory_of(whole: Callable[[DTensor], Tensor | None]) -> None:
    """Let `tolist` and `numpy` of a DTensor, which torch (2.13-2.15) refuses, read another tensor.

    The array is a copy, and read-only: what is written to it would not reach the DTensor.

    Args:
        whole: the tensor to read; None has torch refuse.
    """

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

    of_dtensor: Any = DTensor
    of_dtensor.tolist, of_dtensor.numpy = tolist, numpy


def is_propagating_shapes(tensor: Tensor) -> bool:
    """Whether only shapes are wanted: the tensor is fake, and no graph is being traced.

    So it is when Dynamo propagates example values. `get_proxy_mode`
    (torch.fx.experimental.proxy_tensor, 2.13-2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) and get_proxy_mode() is None
