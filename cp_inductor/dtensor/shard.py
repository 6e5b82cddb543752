"""Cut a sequence into shards, optionally in an order that balances causal attention, and undo it.

    positions      0 1 2 3 4 5 6 7        2 ranks
    contiguous    [0 1 2 3][4 5 6 7]
    zigzag        [0 1 6 7][2 3 4 5]      first half from the start, second half from the end

Both directions are differentiable. They consist of an index_select and DTensor's own
redistribution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.limits import check_mesh, dim_of, refuse_empty
from cp_inductor.dtensor.rules.loss import correct_losses_along
from cp_inductor.errors import InvalidArgument, UnevenSequence, UnsupportedPlacement
from cp_inductor.plan import LAYOUTS
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.trust.agreement import note_batch


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int = 1, *, layout: str = "contiguous") -> DTensor:
    """Shard a sequence that every rank has whole.

    Shard everything that depends on positions (position ids, RoPE tables, labels) in the same way.
    After this call, mean losses on the mesh are over all tokens: `cp_inductor.dtensor.rules.loss`.

    Args:
        tensor: the same on all ranks, of any shape and dtype. Its length need not divide by the
            number of ranks: each rank holds as many tokens as torch.chunk gives it.
        mesh: 1-D.
        dim: the sequence dim.
        layout: "contiguous", or "zigzag" for models compiled with ``options={"layout": "zigzag"}``.

    Returns:
        A DTensor with Shard(dim). The gradient with respect to `tensor` is whole on every rank.

    Raises:
        UnevenSequence: the tensor is empty; or the layout is zigzag and there are fewer tokens than
            ranks. DTensor would gather such a sequence in the first linear layer, in permuted
            order.
        UnsupportedPlacement: the layout is unknown, or the mesh is not 1-D.
        InvalidArgument: it is no plain tensor, or has no such dim; or there is no mesh.
    """
    check_shards(mesh, layout, site="shard")
    dim = dim_of(tensor, dim, site="shard")
    if isinstance(tensor, DTensor):
        raise InvalidArgument(
            site="shard",
            expected="a plain tensor, which every rank has whole",
            got=f"a DTensor with placements {tensor.placements}",
            remedy="leave it as it is, or call redistribute(mesh, [Shard(dim)])",
        )
    if not tensor.numel():
        refuse_empty("shard", tensor)
    if layout == "zigzag" and tensor.shape[dim] < mesh.size():
        raise UnevenSequence(
            site="shard",
            expected=f"at least {mesh.size()} tokens under layout='zigzag', one for each rank",
            got=f"{tensor.shape[dim]}",
            remedy="use layout='contiguous', or pad the sequence",
        )
    if not torch.compiler.is_compiling():
        correct_losses_along(mesh, str(mesh.get_group().group_name))
        note_batch(str(mesh.get_group().group_name), tensor)
    if layout == "zigzag":
        order = stored_positions(tensor.shape[dim], mesh.size())
        tensor = tensor.index_select(dim, order.to(tensor.device))
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(dim)])


def unshard(tensor: DTensor, dim: int = 1, *, layout: str = "contiguous") -> Tensor:
    """Return the whole sequence, in order, on every rank: the inverse of `shard`.

    Args:
        tensor: a DTensor on a 1-D mesh.
        dim: the sequence dim.
        layout: the layout that it was sharded in.

    Returns:
        A plain tensor, whole on every rank.

    Raises:
        UnsupportedPlacement: the layout is unknown, or the mesh is not 1-D.
        InvalidArgument: it is no DTensor, or has no such dim.
    """
    dim = dim_of(tensor, dim, site="unshard")
    if not isinstance(tensor, DTensor):
        raise InvalidArgument(
            site="unshard",
            expected="a DTensor, which says how it is sharded",
            got="a plain tensor",
            remedy="use context_parallel_unshard(mesh, [tensor], [dim]) for plain shards",
        )
    mesh = tensor.device_mesh
    check_shards(mesh, layout, site="unshard")
    whole: Tensor = tensor.redistribute(mesh, [Replicate()]).to_local()
    if layout == "zigzag":
        order = stored_positions(tensor.shape[dim], mesh.size()).argsort()
        whole = whole.index_select(dim, order.to(whole.device))
    return whole


def stored_positions(length: int, world_size: int) -> Tensor:
    """Return the position of each token in the order in which the ranks hold them under zigzag."""
    locals_ = shard_lengths(length, world_size)
    pieces = [n // 2 for n in locals_] + [n - n // 2 for n in reversed(locals_)]
    positions = torch.arange(length).split(pieces)
    last = 2 * world_size - 1
    stored = [positions[piece] for rank in range(world_size) for piece in (rank, last - rank)]
    return torch.cat(stored)


def check_shards(mesh: DeviceMesh, layout: str | None, *, site: str) -> None:
    """Check that a sequence can be sharded on a mesh in a layout; None: in whatever layout.

    Raises:
        UnsupportedPlacement: the layout is unknown, or the mesh is not 1-D.
        InvalidArgument: it is no mesh.
    """
    if layout not in (None, *LAYOUTS):
        raise UnsupportedPlacement(
            site=site,
            expected=f"layout to be one of {', '.join(LAYOUTS)}",
            got=repr(layout),
            remedy="use layout='contiguous', unless you want permuted batches",
        )
    check_mesh(mesh, site=site)
