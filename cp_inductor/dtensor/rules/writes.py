"""Refuse writes in place that DTensor would lose; let Dynamo trace them for our backends.

    first = h[:, :5]      h (B, S, D) [Shard(1)]: DTensor gathers S, so `first` is a copy
    first.zero_()         refused: it would not reach `h`
    h.mul_(2)             refused while `first` is alive: it would go on to hold what `h` held

    p.grad.fill_(0.25)    a partial, as a backward leaves it, is written to as a whole (`on_whole`)
    p.grad.mul_(0.5)      each rank's part takes a multiple

In compiled graphs the first two are right, because `passes/replay_writes.py` rewrites them. Before
that, Dynamo runs them on fake tensors, which have no values. DTensor cannot do some of these writes
at all: these are left out, as no shape changes. Views of empty DTensors are refused, see `limits`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.limits import refuse_empty
from cp_inductor.dtensor.rules.on_whole import run_on_whole
from cp_inductor.dtensor.rules.partials import is_partial
from cp_inductor.dtensor.wrap import wrap_whole
from cp_inductor.errors import UnsupportedWrite
from cp_inductor.source import user_line
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments, tensors_written_by
from cp_inductor.torch_private.dispatch import is_composite
from cp_inductor.torch_private.dtensor import (
    are_plain_tensors_replicated,
    is_propagating_shapes,
    local_of,
    without_handler,
)
from cp_inductor.torch_private.symbolic_dtensor import is_whole_slice
from cp_inductor.torch_private.traces import traces
from cp_inductor.torch_private.tracing import is_compiled, is_fake, memory_of, tensors_in

aten = torch.ops.aten
VIEWS = (
    *(aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.unbind.int),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.alias.default, aten.detach.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
    *(aten.expand.default, aten.unfold.default, aten.squeeze.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsafe_split.Tensor),
    *(aten.view_as_complex.default, aten.view_as_real.default, aten._neg_view.default),
)
# The second is no view to autograd, but as the first is to DTensor.
RESHAPES = (aten.view.default, aten._unsafe_view.default)
# What each part of a sum takes by itself: multiples, whose factors are whole, and further sums.
SCALED = {
    *(aten.mul_, aten.div_, aten.neg_, aten.zero_, aten._foreach_zero_),
    *(aten._foreach_mul_, aten._foreach_div_, aten._foreach_neg_),
}
ADDED = {aten.add_, aten.sub_, aten._foreach_add_, aten._foreach_sub_, aten.copy_}
# They write to entries of a list one after the other, and may read what they have written.
_LISTS = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
BY_ENTRY = {getattr(space, name) for name in _LISTS for space in (torch, aten)}
# From memory to the copies that DTensor made of it instead of views, and to the views of these.
_copies: MutableMapping[Any, Any] = WeakKeyDictionary()
# From the memory of such a copy to the copies of what it was made of. Memory itself tells of no
# life: exchanges hold it for a while, on each rank for another.
_copied: MutableMapping[Any, Any] = WeakKeyDictionary()
_is_strict: ContextVar[bool] = ContextVar("is_strict", default=False)


@contextmanager
def writes_as_dtensor() -> Iterator[None]:
    """Within this context, a write that DTensor cannot do fails even while a compiler traces."""
    token = _is_strict.set(True)
    try:
        yield
    finally:
        _is_strict.reset(token)


def view(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View as DTensor does, and note what it copies instead."""
    of = args[0]
    if op is aten.view.default and not of.numel() and any(p.is_shard() for p in of.placements):
        refuse_empty(f"view ({user_line()})", of)
    if op is aten.slice.Tensor and is_whole_slice(bind_arguments(op, args, kwargs), of.shape):
        return aten.alias.default(of)
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled() and not of.is_inference():
            # DTensor (2.13) would make views of a tensor from outside of inference_mode that torch
            # then refuses: "Cannot set version_counter for inference tensor".
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        try:
            views = without_handler(op, args, kwargs)
        except (RuntimeError, ValueError):
            if op not in RESHAPES:
                raise
            # DTensor has other strides than its part, if that lies otherwise than the whole.
            copied = aten.clone.default(of, memory_format=torch.contiguous_format)
            views = without_handler(op, (copied, *args[1:]), kwargs)
    is_view = op is not aten._unsafe_view.default
    if is_view and not is_fake(local_of(of)) and not is_compiled(local_of(of)):
        memory = memory_of(local_of(of))
        for made in views if isinstance(views, (tuple, list)) else (views,):
            own = memory_of(local_of(made))
            if own is not memory or memory in _copied:
                copies = _copied[memory] if memory in _copied else _copies_of(of)
                copies[made], _copied[own] = None, copies
    return views


def _copies_of(tensor: DTensor) -> Any:
    return _copies.setdefault(memory_of(local_of(tensor)), WeakTensorKeyDictionary())


def write(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write as one process does, or refuse."""
    tensors = tensors_written_by(op, args, kwargs)
    written = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if any(is_propagating_shapes(local_of(tensor)) for tensor in written):
        return _trace(op, args, kwargs, written)
    for tensor in written:
        _check(op, tensor)
    parts = [x for x in filter(is_partial, written) if holds_sequences(x.device_mesh)]
    if len(written) > 1 and op.overloadpacket in BY_ENTRY and _meet(args, written, bool(parts)):
        # DTensor, and an op on the whole, would read all before they write any.
        for entry in entries_of(args):
            op(*entry, **kwargs)
        return None
    if parts and not is_composite(op) and not _takes_parts(op, args, kwargs):
        return run_on_whole(op, args, kwargs)
    return without_handler(op, args, kwargs)


def _meet(args: tuple[Any, ...], written: list[DTensor], is_once: bool) -> bool:
    """Whether an op reads what it writes to; or, if asked, writes to a tensor twice."""
    memories = [memory_of(local_of(tensor)) for tensor in written]
    read = (memory_of(local_of(x)) for x in tensors_in(args[1:]) if isinstance(x, DTensor))
    return not {*memories}.isdisjoint(read) or (is_once and len({*memories}) < len(memories))


def entries_of(args: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the arguments of a foreach op for each entry of its lists."""
    for place in range(len(args[0])):
        part = slice(place, place + 1)
        yield [
            arg[part] if isinstance(arg, Sequence) or getattr(arg, "ndim", False) else arg
            for arg in args
        ]


def _takes_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a write to sums is right on each rank's part of them."""
    bound = bind_arguments(op, args, kwargs)
    to, *others = map(tensors_in, bound.values())
    if op.overloadpacket in SCALED and bound.get("rounding_mode") is None:
        tensors = (x for values in others for x in values if isinstance(x, DTensor))
        return not any(map(is_partial, tensors))
    places = [[getattr(x, "placements", None) for x in values] for values in (to, *others[:1])]
    return op.overloadpacket in ADDED and places[0] == places[1]


def _trace(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[DTensor]
) -> Any:
    """Write to fake tensors, or leave that out if a backend of this library rewrites the write."""
    try:
        return without_handler(op, args, kwargs)
    except (NotImplementedError, RuntimeError, TypeError):  # strides of symbols have no hash
        is_mixed = not are_plain_tensors_replicated() and any(
            x.ndim and not isinstance(x, DTensor) for x in tensors_in((args, kwargs))
        )
        if _is_strict.get() or not traces.is_ours or is_mixed:
            raise
        returned = op._schema.returns
        return tuple(written) if len(returned) > 1 else written[0] if returned else None


def _check(op: OpOverload, tensor: DTensor) -> None:
    local, base = local_of(tensor), tensor._base
    is_lost = isinstance(base, DTensor) and memory_of(local_of(base)) is not memory_of(local)
    if is_lost or memory_of(local) in _copied:
        raise _refusal(
            str(op),
            "a view with the placements of its tensor",
            f"one with {tensor.placements}, which DTensor has copied: the write would be lost",
        )
    if is_compiled(local) and traces.is_ours:
        return  # graphs of this library read no view after a write
    refuse_stale_copies(tensor, str(op))


def refuse_stale_copies(tensor: DTensor, site: str) -> None:
    """Refuse to write to a tensor while there are copies of it that are views on one process."""
    for copy in _copies.get(memory_of(local_of(tensor)), ()):
        raise _refusal(
            site,
            "a tensor without copies where one process has views of it",
            f"a view of shape {tuple(copy.shape)} that is alive and would be stale",
        )


def note_copies(tensors: Sequence[Any]) -> None:
    """Note tensors that are one memory on one process, and each its own here."""
    placed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    for tensor in placed:
        _copies_of(tensor).update({other: None for other in placed if other is not tensor})


def _refusal(site: str, expected: str, got: str) -> UnsupportedWrite:
    return UnsupportedWrite(
        site=f"{site} ({user_line()})",
        expected=expected,
        got=got,
        remedy="compile view and write in one graph with cp_inductor, or compute a new tensor"
        " (torch.where, torch.cat, a clone of the view)",
    )


def replicated_numbers(numbers: Any, dtype: torch.dtype, like: DTensor) -> DTensor:
    """Return numbers of the program as a DTensor that every rank has whole."""
    return replicated_like(torch.tensor(numbers, dtype=dtype, device=like.device), like)


def replicated_like(local: Tensor, like: DTensor) -> DTensor:
    """Return a tensor that all ranks have alike as a DTensor on the mesh of another."""
    return wrap_whole(local, like.device_mesh)
