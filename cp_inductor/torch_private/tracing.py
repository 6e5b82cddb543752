"""Trace functions and graphs into aten ops, on fake tensors. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import predispatch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, maybe_get_fake_mode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import preserve_node_meta

from cp_inductor.kept import cache
from cp_inductor.torch_private.arguments import tensors_written_by
from cp_inductor.torch_private.modes import OpWatcher


@contextmanager
def fake_mode_of(tensor: Tensor) -> Iterator[None]:
    """Enter the fake mode that a fake tensor belongs to, and the Python dispatcher (2.13-2.15).

    Without the latter, ops such as `constant_pad_nd`, with which DTensor gathers shards that differ
    in length, run kernels that take no symbols.
    """
    mode = maybe_get_fake_mode(tensor)
    assert mode is not None
    with enable_python_dispatcher(), mode:
        yield


def unbacked_ignored(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context that ignores new data-dependent sizes in a fake mode (2.13-2.15)."""
    mode = maybe_get_fake_mode(tensor)
    shape_env = None if mode is None else mode.shape_env
    return nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


def trace_fake(
    function: Callable[..., Any],
    values: Sequence[Any],
    decompositions: Mapping[Any, Any],
    *,
    like: Tensor | None = None,
) -> fx.GraphModule:
    """Trace a function on fake tensors, keeping symbolic sizes.

    `make_fx` with `tracing_mode="real"` on fake tensors, under their mode and the Python
    dispatcher, as torch._inductor.pattern_matcher.fwd_only does (2.13-2.15).

    Args:
        function, values: what to trace, and its arguments.
        decompositions: op => the function that replaces it.
        like: a tensor of the fake mode to trace under; by default the first value.
    """
    like = values[0] if like is None else like
    with torch.no_grad(), fake_mode_of(like):
        return make_fx(function, dict(decompositions), tracing_mode="real")(*values)


# Returns the decompositions into core aten ops (2.13-2.15).
core_decompositions = cache(core_aten_decompositions)


def fakes_of_shapes(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Return a fake CPU tensor for each (shape, dtype), under a new mode without symbolic sizes."""
    with FakeTensorMode():
        return [torch.empty(tuple(s), dtype=dtype, device="cpu") for s, dtype in shapes]


def trace_of_shapes(
    function: Callable[..., Any],
    shapes: Sequence[tuple[Sequence[int], torch.dtype]],
    decompositions: Mapping[Any, Any],
) -> fx.GraphModule:
    """Trace a function of CPU tensors with the given shapes and dtypes.

    The nodes keep in their meta what `torch.fx.traceback.annotate` says within the function.
    """
    like, *values = fakes_of_shapes([((), torch.bool), *shapes])
    with preserve_node_meta():
        return trace_fake(function, values, decompositions, like=like)


def writes_of(function: Callable[[], Any], like: Tensor) -> list[tuple[OpOverload, Tensor]]:
    """Call a function on fake tensors, and return what it writes to in place, and by which ops.

    It is called under the fake mode of `like`, a fake tensor or a DTensor of one.
    """
    written: list[tuple[OpOverload, Tensor]] = []

    class Watch(OpWatcher):
        def meet(self, op: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
            written.extend((op, tensor) for tensor in tensors_written_by(op, args, kwargs))

    local = like.to_local() if isinstance(like, DTensor) else like
    with torch.no_grad(), fake_mode_of(local), Watch():
        function()
    return written


def trace_pre_dispatch(function: Callable[..., Any], values: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function on fake tensors above autograd, as torch.export does (2.13-2.15).

    Composite ops are not decomposed.
    """
    with torch.no_grad(), fake_mode_of(values[0]):
        return make_fx(function, tracing_mode="real", pre_dispatch=True)(*values)


def retrace(
    run: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """Trace an interpreter's run over a graph. New nodes keep the meta of the node they come from.

    `preserve_node_meta` copies what AOTAutograd and the partitioner left in `meta`: tags,
    recomputation, stack traces. Above autograd, a torch build without the device's kernels would
    decompose composite ops for which the device has a kernel, such as silu_backward (2.13-2.15).
    """
    like = next(value for value in values if isinstance(value, Tensor))
    with preserve_node_meta(), torch._C._AutoDispatchBelowAutograd():
        return trace_fake(run, values, decompositions, like=like)


def fake_on(value: Any, device: torch.device) -> Any:
    """Return a fake tensor moved to a device that need not exist; other values unchanged."""
    return _fake_like(value, value, device) if isinstance(value, FakeTensor) else value


def _fake_like(tensor: Tensor, fake: FakeTensor, device: torch.device) -> Tensor:
    """Return a new fake tensor like a tensor, of the mode of a fake one."""
    size, stride = tensor.shape, tensor.stride()
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, device)


def fake_copy(value: Tensor) -> Tensor:
    """Return a new fake tensor with the size, stride, dtype and device of a tensor.

    For a DTensor it is a plain tensor of the whole size, because computing with DTensors has side
    effects, such as on the masks that their placements share.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, FakeTensor):
        return _fake_like(value, local, local.device)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no data, because only shapes are being propagated."""
    return isinstance(tensor, FakeTensor)


# Calls a subgraph (torch._higher_order_ops.invoke_subgraph, read in 2.13.0).
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def known_results(piece: fx.GraphModule, results: Sequence[Tensor]) -> None:
    """Say what a subgraph returns, so that Inductor need not run all of it at each of its calls.

    For fake tensors INVOKE_SUBGRAPH calls its module, which calls `forward` as nn.Module does: an
    attribute of the instance comes before the one of the class (read in 2.13.0).
    """
    piece.forward = partial(_make_like, results)


def _make_like(results: Sequence[Tensor], *operands: Any) -> tuple[Tensor, ...]:
    """Return new fake tensors with the sizes, strides, dtypes and devices of some."""
    like = next(out for out in operands if isinstance(out, Tensor))
    assert is_fake(like), "a piece is run by the code that is generated for it"
    return tuple(
        like.new_empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        for out in results
    )


# What brings an index into torch.vmap in a Dynamo graph (torch._functorch.predispatch, 2.13).
ADD_BATCH_DIM = getattr(predispatch, "_add_batch_dim", None)


def without_vmap(tensor: Tensor) -> Tensor:
    """Return the tensor within a tensor of torch.vmap, as Dynamo graphs have them (2.13-2.15)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def replace_backward(
    node: Any, replace: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the backward of the compiled graph of a node."""
    function = node._forward_cls
    function.backward = staticmethod(replace(function.backward))


def is_of_compiled_graph(node: object) -> bool:
    """Whether an autograd node is that of a graph which AOTAutograd has compiled.

    It makes a `torch.autograd.Function` of its own for every graph (`CompiledFunction` in
    torch._functorch._aot_autograd.runtime_wrappers, 2.13-2.15). Its node finds it as `_forward_cls`
    (`BackwardCFunction`, torch.autograd.function, 2.13-2.15).
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    function: type = node._forward_cls  # type: ignore[attr-defined]
    return function.__qualname__.endswith("CompiledFunction")


# What `tensor.data` is in a Dynamo graph (torch._C._autograd, 2.13-2.15).
get_data = getattr(torch._C._autograd, "_get_data_attr", None)


def memory_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return what tensors have in common which share memory (2.13-2.15)."""
    tensor = without_vmap(tensor)
    held = tensor.elem if isinstance(tensor, FunctionalTensor) else tensor
    return held.untyped_storage()


def is_compiled(tensor: Tensor) -> bool:
    """Whether a tensor stands for one of a graph that AOTAutograd traces (2.13-2.15)."""
    return isinstance(tensor, FunctionalTensor) or get_proxy_mode() is not None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, such as a tuple of them."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value with all its tensors replaced."""
    return pytree.tree_map_only(Tensor, function, value)
