"""Let ranks draw what one process would draw, if they are seeded alike; or refuse.

    dropout(x (B, S, H) [Shard(1)])  =>  every rank draws for (B, S, H), and keeps its part
    multinomial(probabilities (B, V) [Replicate], 1)  =>  what the first rank drew, on every rank
    hidden (B, S, H) [Shard(1)] * torch.rand(B, 1, 1)  =>  RanksDisagree, if ranks drew otherwise,
                                                           in a graph

Each rank draws with a generator of its own. DTensor (torch 2.13 to 2.15) assumes that ranks draw
the same numbers, whether they are seeded alike or not. In eager code over a replicated DTensor, all
ranks take here what the first rank drew, unless DTensor's own generator makes them draw alike,
which it does not on the CPU. Nobody can tell where a plain tensor comes from, so eager code takes
it as it is. Graphs compare what they draw: see `passes/note_draws.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.rules.partials import make_whole, part_of
from cp_inductor.dtensor.wrap import is_whole, whole_tensor, wrap_parts
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    has_generator_of_mesh,
    ops_that_draw,
    replicated,
    without_handler,
)
from cp_inductor.trust.graph_agreement import note_draw

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


def draw(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
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


def _part_of_whole(op: torch._ops.OpOverload, bound: dict[str, Any], of: DTensor) -> Any:
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
