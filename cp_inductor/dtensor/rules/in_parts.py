"""Ops that ranks can compute in parts, where DTensor lacks a rule or has a wrong one.

    dropout(x (B, S, H) [Shard(1)])  =>  every rank draws for (B, S, H), and keeps its part
    multinomial(probabilities (B, V) [Replicate], 1)  =>  what the first rank drew, on every rank
    hidden (B, S, H) [Shard(1)] * torch.rand(B, 1, 1)  =>  RanksDisagree, if ranks drew otherwise,
                                                           in a graph
    cumsum(x (B, S) [Shard(1)], 1)
      =>
    own = cumsum(x's part, 1)
    out = own + the sum of the last column of every rank before     (B, S) [Shard(1)]

    cat([tensor of shape (0,), keys (B, G, T, D) [Shard(2)]], dim=-2)  =>  keys, placed as they are
    torch.polar(DTensor [Shard(1)], DTensor [Shard(1)])  =>  DTensor [Shard(1)]

Each rank draws with a generator of its own. DTensor (torch 2.13 to 2.15) assumes that ranks draw
the same numbers, whether they are seeded alike or not. In eager code over a replicated DTensor, all
ranks take here what the first rank drew, unless DTensor's own generator makes them draw alike,
which it does not on the CPU. Nobody can tell where a plain tensor comes from, so eager code takes
it as it is. Graphs compare what they draw: see `passes/note_draws.py`.

DTensor (2.13) gathers the whole of what is accumulated on every rank, where a column of each rank
is enough. Caches of keys often begin with a tensor of shape (0,), which torch skips, however many
dims the others have. DTensor (2.13 to 2.15) looks for the sharded dim in it, and fails. Rotary
embeddings of some models (DeepSeek-V2, Llama 4) turn angles into complex numbers, and some
activations have rules in the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.rules.partials import make_whole, part_of
from cp_inductor.dtensor.wrap import is_whole, whole_tensor, wrap_parts
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    has_generator_of_mesh,
    ops_that_draw,
    replicated,
    without_handler,
)
from cp_inductor.trust.agreement import note_draw

aten = torch.ops.aten
# They draw from the values of a tensor, where others only fill or follow its shape.
OF_VALUES = (aten.multinomial.default, aten.bernoulli.default)
DROPOUT = aten.native_dropout.default
# DTensor fills each rank's part by itself with these, and has no generator for them.
FILLS = (
    *(aten.exponential_.default, aten.geometric_.default, aten.log_normal_.default),
    *(aten.cauchy_.default, aten.random_.default, aten.random_.to),
    getattr(aten.random_, "from"),
)


def draw(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Draw as one process does over what is sharded, and as the first rank over what is whole."""
    bound = bind_arguments(op, args, kwargs)
    of: Any = next(value for value in bound.values() if isinstance(value, DTensor))
    mesh = of.device_mesh
    is_drawn_alike = op in ops_that_draw() and has_generator_of_mesh(mesh)
    is_idle = bound.get("train") is False  # a dropout
    if is_drawn_alike or is_idle or not holds_sequences(mesh):
        return without_handler(op, args, kwargs)
    # A fake tensor is traced. A program that passes a generator seeds it itself.
    is_compared = type(of.to_local()) is Tensor and bound.get("generator") is None
    if not is_whole(of):
        drawn = _part_of_whole(op, bound, of)
    elif is_compared:
        drawn = dispatch_as_dtensor(op, args, kwargs)
    else:
        return without_handler(op, args, kwargs)
    if is_compared:
        for tensor in pytree.tree_leaves(drawn):
            take_from_first(tensor)
    return args[0] if op._schema.is_mutable else drawn


def _part_of_whole(op: OpOverload, bound: dict[str, Any], of: DTensor) -> Any:
    """Draw what one process would draw, and keep this rank's part of it."""
    mesh, own = of.device_mesh, of.to_local().detach()
    name = next(iter(bound))

    def part(whole: Tensor) -> DTensor:
        return wrap_parts(part_of(whole, of), mesh, of.placements, of.shape)

    if op in OF_VALUES:
        return replicated(op(**bound | {name: whole_tensor(of)}), mesh)
    if op is DROPOUT:
        probability = 1.0 - bound["p"]
        of = make_whole(of)
        mask = part(own.new_empty(of.shape).bernoulli_(probability).bool())
        scale = 1.0 / probability if probability else 0.0
        kept = of.to_local().detach() * mask.to_local() * scale
        return wrap_parts(kept, mesh, of.placements, of.shape), mask
    filled = own.new_empty(of.shape)
    drawn = op(**bound | {name: filled})
    if op._schema.is_mutable:
        own.copy_(part_of(filled, of))
        return of
    return part(drawn)


def take_from_first(drawn: DTensor) -> None:
    """Take what the first rank drew, in place, on each mesh axis on which a DTensor is the same."""
    local = drawn.to_local()
    for axis in _axes_of_equals(drawn):
        # Every rank has the same elements, but they may lie otherwise.
        sent = local.detach().contiguous()
        dist.broadcast(sent, group=drawn.device_mesh.get_group(axis), group_src=0)
        local.detach().copy_(sent)


def _axes_of_equals(tensor: DTensor) -> list[int]:
    """Return the mesh axes on whose ranks a DTensor is the same."""
    places = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return [axis for axis, (p, size) in enumerate(places) if p.is_replicate() and size > 1]


def note_drawn(drawn: DTensor, number: int, site: str) -> DTensor:
    """Return a copy of what a graph draws over a DTensor, noted where it must be alike on ranks.

    The number is that of the draw in the program.
    """
    mesh, local = drawn.device_mesh, drawn.to_local()
    for axis in _axes_of_equals(drawn):
        local = note_draw(local, number, site, mesh.get_group(axis).group_name)
    places, size, stride = drawn.placements, drawn.shape, drawn.stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=size, stride=stride)


# torch 2.13 has no rules for them.
ALONE = (
    *(aten.polar.default, aten.complex.default, aten.log_sigmoid_backward.default),
    *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardtanh_backward.default, aten.hardshrink_backward.default),
    *(aten.softshrink_backward.default, aten._prelu_kernel_backward.default),
)


def concatenate(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate as DTensor does, without what torch skips."""
    bound = bind_arguments(op, args, kwargs)
    tensors: list[Tensor] = list(bound["tensors"])
    rest = [tensor for tensor in tensors if tensor.shape != (0,)]
    if not rest or len(rest) == len(tensors):
        return dispatch_as_dtensor(op, args, kwargs)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    rest = [tensor.to(dtype) for tensor in rest]
    if len(rest) == 1:
        return rest[0].clone()  # DTensor would gather it first
    return dispatch_as_dtensor(op, (rest, bound["dim"]), {})


def places(num_results: int, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return placements of the results and of what is given, on one axis of a mesh.

    Given are tensors, some of which are broadcast to the shape of the results, then numbers.
    """
    shapes = [argument.shape for argument in arguments if hasattr(argument, "shape")]
    numbers = [None] * (len(arguments) - len(shapes))
    num_dims = max(map(len, shapes))
    shardings: list[Any] = [([Replicate()] * num_results, [Replicate()] * len(shapes) + numbers)]
    for dim in range(-num_dims, 0):
        inputs = [
            Replicate() if len(shape) < -dim or shape[dim] == 1 else Shard(len(shape) + dim)
            for shape in shapes
        ]
        shardings.append(([Shard(num_dims + dim)] * num_results, inputs + numbers))
    return shardings


# What a rank makes of its own and of what those before it end with; what would change nothing.
ACCUMULATED: dict[Any, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    aten.cumsum.default: (torch.add, 0),
    aten.cumprod.default: (torch.mul, 1),
    aten.logcumsumexp.default: (torch.logaddexp, -torch.inf),
}


def accumulate(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Accumulate along a sharded dim, a column of every rank gathered; other dims as DTensor."""
    tensor, mesh, places = args[0], args[0].device_mesh, args[0].placements
    dim = args[1] % max(tensor.ndim, 1)
    axes = [axis for axis, place in enumerate(places) if place == Shard(dim)]
    is_odd = any(type(place) not in (Shard, Replicate) for place in places)
    if len(axes) != 1 or is_odd or mesh.get_coordinate() is None:
        return without_handler(op, args, kwargs)
    own = op(tensor.to_local(), *args[1:], **kwargs)
    length = own.shape[dim]
    # Ranks without elements are the last, and no other reads what they send.
    last = own.select(dim, length - 1) if length else own.sum(dim, dtype=own.dtype)
    gathered = [Shard(0) if axis == axes[0] else Replicate() for axis in range(mesh.ndim)]
    columns = whole_tensor(DTensor.from_local(last[None].contiguous(), mesh, gathered))
    join, nothing = ACCUMULATED[op]
    # Every rank reads what it has gathered: where a compiled forward does not, torch's partitioner
    # lets the backward of other ranks alone gather again.
    ranks = torch.arange(len(columns), device=own.device).view(-1, *[1] * last.ndim)
    before = columns.masked_fill(ranks >= mesh.get_local_rank(axes[0]), nothing)
    joined = join(reduce(join, before.unbind(0)).unsqueeze(dim), own)
    return wrap_parts(joined, mesh, places, tensor.shape)
