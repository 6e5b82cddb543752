"""Come in where DTensor's dispatch gives up, or is about to go wrong.

    masked_scatter(DTensor, DTensor, Tensor)     no sharding rule   =>  `compute(op, args, kwargs)`
    cross_entropy_loss under inference_mode      made of other ops  =>  these
    amax(x, 1)                                   a partial          =>  `compute_whole(op, ...)`
    flatten(0, 1) of a graph's input or output   its placement, _StridedShard, is read back
    flatten(0, 1) beside what is whole           gathered, also by compilers
    conj()[:, 2:5]                               conjugated before it is gathered

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing

from cp_inductor.torch_private.modes import run_uncompiled, without_modes
from cp_inductor.torch_private.shardings import forget_shardings, remembered
from cp_inductor.torch_private.sizes import has_hint

Compute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
IsMisjudged = Callable[[Any, tuple[Any, ...]], bool]
MakesParts = Callable[[Any, tuple[Any, ...], Any], bool]

# What C++ calls for a call whose sharding it does not remember: (op, args, kwargs, info,
# whether to remember). What is returned, if it is no OutputSharding, is the result of the call.
CHOOSE = "_propagate_op_sharding_dispatch_slow_path"

# (op, args, kwargs, made) -> what an op that returns a view made, as autograd needs it (2.13-2.15).
as_view = return_and_correct_aliasing


def on_failed_sharding(
    compute: Compute, is_misjudged: IsMisjudged, makes_parts: MakesParts, compute_whole: Compute
) -> None:
    """Let functions compute calls that DTensor has no right sharding for, or makes partials of.

    A second call changes nothing. Under inference_mode torch does not take ops apart that are made
    of others, and DTensor, where it has a rule for one, asks no handler of those it is made of.

    `DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path`
    (torch.distributed.tensor._dispatch, 2.13-2.15), which is called below autograd, in eager code
    and while compilers trace.

    Args:
        compute: (op, args, kwargs) -> the result. It is called within the handler of torch's error,
            which it may raise again.
        is_misjudged: (op, args) -> whether DTensor's rule is wrong for the call.
        makes_parts: (op, args, spec of the results) -> whether these are partials that must not be.
        compute_whole: (op, args, kwargs) -> the results, whole.
    """
    dispatcher: Any = DTensor._op_dispatcher
    if CHOOSE in vars(dispatcher):
        return

    @wraps(getattr(dispatcher, CHOOSE))
    def choose(op: Any, args: Any, kwargs: Any, info: Any, *rest: Any) -> Any:
        if is_composite(op):
            return op.decompose(*args, **kwargs)
        if is_misjudged(op, args):
            return compute(op, args, kwargs)
        try:
            ask = partial(getattr(type(dispatcher), CHOOSE), dispatcher, op, args, kwargs, info)
            chosen = remembered.recall(info.schema, partial(ask, *rest))
        except Exception:
            return compute(op, args, kwargs)
        if _moves_written(op, args, chosen):
            return compute(op, args, kwargs)
        if op._schema.is_mutable or not makes_parts(op, args, chosen.output_spec):
            return chosen
        return compute_whole(op, args, kwargs)

    redistribute = dispatcher.redistribute_local_args

    @wraps(redistribute)
    def redistribute_values(info: Any, *rest: Any) -> None:
        """Redistribute values: collectives send memory, which `conj` and `_neg_view` do not change.

        Ranks that pad their parts sent values, where others raised, or sent positives (2.13-2.15).
        """
        resolve = partial(pytree.tree_map_only, Tensor, lambda t: t.resolve_conj().resolve_neg())
        info.local_args = resolve(info.local_args)
        redistribute(info, *rest)

    # Dynamo must not compile these: C++ notes next what was chosen, in a table that the end of a
    # compile clears (2.13-2.15).
    for function in (choose, redistribute_values, dispatcher.unwrap_to_op_info):
        run_uncompiled(function)
    setattr(dispatcher, CHOOSE, choose)
    dispatcher.redistribute_local_args = redistribute_values
    forget_shardings()  # that C++ remembers, and would not ask for again
    _let_compilers_take_strided_shards()


def _moves_written(op: Any, args: Any, chosen: Any) -> bool:
    """Whether DTensor would write to a redistributed copy, and call the tensor placed like that.

    It fails where the tensor is plain (`_dispatch_fast_path_python_tail`, an AssertionError).
    """
    spec: Any = getattr(chosen, "output_spec", None)
    if not args or not op._schema.arguments[0].is_write or not isinstance(args[0], Tensor):
        return False
    written = args[0]
    return not isinstance(written, DTensor) or (
        isinstance(spec, DTensorSpec) and written.placements != spec.placements
    )


def become(tensor: DTensor, view: DTensor, op: Any, args: Any, kwargs: Any) -> Any:
    """Give a DTensor the shape, strides and part of a view of it, as `squeeze_` (2.13-2.15)."""
    changed: Any = tensor
    changed._local_tensor, changed._spec = view._local_tensor, view._spec
    return as_view(op, args, kwargs, tensor)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether torch computes an op by other ops, which DTensor is asked for then (2.13-2.15)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _let_compilers_take_strided_shards() -> None:
    """Let compilers take apart, make again and gather DTensors whose placements are _StridedShard.

    So are linear layers' outputs of several batch entries where they go into a compiled function,
    or come out of it. `DTensor.__tensor_flatten__` (torch.distributed.tensor._api, read in 2.13.0)
    gives (placements, meta, order of shards, requires_grad), of which `DTensorSpec` makes
    "DTensorSpec doesn't allow specify shard_order", as it is not told that the placements say no
    order (`use_strided_shard_as_shard_order`).

    `_StridedShard.local_shard_size_and_offset` (torch.distributed.tensor.placement_types,
    2.13-2.15) finds a part's places with a tensor and reads them as a list. Compilers, which make
    the tensor a fake one, take the list for numbers of the graph ("Pending unbacked symbols"), and
    make a number of a symbol, which only needs to divide: a linear layer flattens a batch of two
    sequences of s0 tokens to 2 * s0 rows, of which each of two ranks has s0.
    """
    unflatten, strided = DTensor.__tensor_unflatten__, cast("Any", _StridedShard)
    measure = strided.local_shard_size_and_offset

    def with_order(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        is_known = context is not None and len(context) == 4 and context[2] is not None
        if not is_known or not any(isinstance(place, _StridedShard) for place in context[0]):
            return unflatten(parts, context, size, stride)
        placements, meta, order, requires_grad = context
        made: Any = unflatten(parts, (placements, meta, None, requires_grad), size, stride)
        made._spec.use_strided_shard_as_shard_order, made._spec.shard_order = False, order
        return made

    @wraps(measure)
    def in_numbers(self: Any, size: Any, ranks: int, *rest: Any, **options: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            with without_modes():
                return measure(self, size, ranks, *rest, **options)
        pieces = self.split_factor * ranks
        mode = options.get("offset_mode", rest[1] if len(rest) > 1 else None)
        if getattr(mode, "name", "") == "NONE" and has_hint(size) and size % pieces == 0:
            return size // ranks, None
        return measure(self, size, ranks, *rest, **options)

    run_uncompiled(with_order)
    run_uncompiled(in_numbers)
    DTensor.__tensor_unflatten__ = staticmethod(with_order)  # type: ignore[method-assign]
    strided.local_shard_size_and_offset = in_numbers
