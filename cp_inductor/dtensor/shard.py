"""Cut a sequence into contiguous shards, and undo it. Both directions are differentiable.

0 1 2 3 4 5 6 7  =>  [0 1 2 3][4 5 6 7]        2 ranks
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.dtensor.axis import hold_sequences_along
from cp_inductor.dtensor.limits import check_mesh, dim_of, refuse_empty
from cp_inductor.dtensor.rules import register_rules
from cp_inductor.dtensor.wrap import whole_tensor, wrap_whole
from cp_inductor.errors import InvalidArgument
from cp_inductor.trust.agreement import note_batch


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int = 1) -> DTensor:
    """Shard a sequence that every rank has whole.

    Shard everything that depends on positions (position ids, RoPE tables, labels) in the same way.
    After this call, mean losses on the mesh are over all tokens.

    Args:
        tensor: the same on all ranks, of any shape and dtype. Its length need not divide by the
            number of ranks: each rank holds as many tokens as torch.chunk gives it.
        mesh: 1-D.
        dim: the sequence dim.

    Returns:
        A DTensor with Shard(dim). The gradient with respect to `tensor` is whole on every rank.

    Raises:
        UnevenSequence: the tensor is empty.
        UnsupportedPlacement: the mesh is not 1-D.
        InvalidArgument: it is no plain tensor, or has no such dim; or there is no mesh.
    """
    check_mesh(mesh, site="shard")
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
    if not torch.compiler.is_compiling():
        register_rules()
        hold_sequences_along(mesh, str(mesh.get_group().group_name))
        note_batch(str(mesh.get_group().group_name), tensor)
    return wrap_whole(tensor, mesh).redistribute(mesh, [Shard(dim)])


def unshard(tensor: DTensor, dim: int = 1) -> Tensor:
    """Return the whole sequence, in order, on every rank: the inverse of `shard`.

    Args:
        tensor: a DTensor on a 1-D mesh.
        dim: the sequence dim.

    Returns:
        A plain tensor, whole on every rank.

    Raises:
        UnsupportedPlacement: the mesh is not 1-D.
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
    check_mesh(tensor.device_mesh, site="unshard")
    return whole_tensor(tensor)
