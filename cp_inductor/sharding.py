"""Which mesh axis a sequence is sharded on, and whether an attention over it can be computed.

    q, k, v: DTensor (B, H, S, D) [Replicate, Shard(2)]  =>  SequenceAxis(group of mesh dim 1)

Read from the placements of DTensors, or from the mesh a user names for plain tensors. What is
sharded along the sequence in a way that no ring computes is refused here, for every caller: the
graph pass, and the DTensor handler in eager.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_inductor.errors import ProcessGroupError, UnevenSequence, UnsupportedPlacement
from cp_inductor.torch_private import mesh_axis_ranks

__all__ = ["SEQUENCE_DIM", "SequenceAxis", "axis_of_mesh", "axis_of_tensors", "from_local_like"]

BATCH_DIM, HEADS_DIM, SEQUENCE_DIM = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    """The mesh axis that holds the pieces of a sequence.

    Attributes:
        name: for people: the axis's name in its mesh.
        group_name: c10d name of its process group.
        rank: this process's position on it.
        world_size: number of ranks on it.
    """

    name: str
    group_name: str
    rank: int
    world_size: int


def axis_of_mesh(mesh: DeviceMesh, *, site: str) -> SequenceAxis:
    """Return the axis that a user's ``options={"mesh": mesh}`` names.

    Raises:
        UnsupportedPlacement: the mesh has several axes, or lists its ranks out of order.
        ProcessGroupError: there is no process group behind it.
    """
    if mesh.ndim != 1:
        raise UnsupportedPlacement(
            site=site,
            expected='a 1-D mesh in options={"mesh": mesh}',
            got=f"a {mesh.ndim}-D mesh with axes {mesh.mesh_dim_names}",
            remedy='name the axis that shards the sequence, as in options={"mesh": mesh["cp"]}',
        )
    return _axis(mesh, 0, site=site)


def axis_of_tensors(query: Tensor, key: Tensor, value: Tensor, *, site: str) -> SequenceAxis | None:
    """Return the axis on which the sequence of query, key and value is sharded.

    Args:
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D); other axes of the mesh may
            shard the batch or the heads.
        site: for the errors.

    Returns:
        None if no tensor is sharded along the sequence.

    Raises:
        UnsupportedPlacement: they are not sharded alike, or on more than one axis.
        UnevenSequence: a length does not divide by the size of the axis.
        ProcessGroupError: there is no process group behind the axis.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not any(_sequence_axes(tensor) for tensor in tensors.values()):
        return None
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    if plain:
        raise UnsupportedPlacement(
            site=site,
            expected="query, key and value to be DTensors on one mesh",
            got=f"{_describe(tensors)}",
            remedy=f"distribute {' and '.join(plain)} on the same mesh",
        )
    assert isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)
    mesh = query.device_mesh
    alike = key.device_mesh == value.device_mesh == mesh
    if not alike or not query.placements == key.placements == value.placements:
        raise UnsupportedPlacement(
            site=site,
            expected="query, key and value on one mesh with the same placements",
            got=_describe(tensors),
            remedy="redistribute them alike, the sequence dim on the same mesh axis",
        )
    axes = _sequence_axes(query)
    if len(axes) > 1:
        raise UnsupportedPlacement(
            site=site,
            expected=f"the sequence dim ({SEQUENCE_DIM}) sharded on one mesh axis",
            got=f"{_describe(tensors)}: it is sharded on {len(axes)}",
            remedy="flatten these axes into one, as in mesh['dp', 'cp']._flatten('seq')",
        )
    others = [p for dim, p in enumerate(query.placements) if dim != axes[0]]
    if not all(_is_batch_or_heads(placement) for placement in others) or (
        type(query.placements[axes[0]]) is not Shard
    ):
        raise UnsupportedPlacement(
            site=site,
            expected="Shard of the sequence, and Replicate or Shard of batch or heads elsewhere",
            got=_describe(tensors),
            remedy="redistribute query, key and value before the attention",
        )
    axis = _axis(mesh, axes[0], site=site)
    for name, tensor in tensors.items():
        _check_even(tensor, name, axis, site=site)
    return axis


def from_local_like(local: Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's piece into a DTensor with the mesh and the placements of another."""
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)


def _sequence_axes(tensor: Tensor) -> list[int]:
    if not isinstance(tensor, DTensor):
        return []
    sequence_dims = (SEQUENCE_DIM, SEQUENCE_DIM - tensor.ndim)
    return [axis for axis, p in enumerate(tensor.placements) if _dim_of(p) in sequence_dims]


def _dim_of(placement: Placement) -> int | None:
    """The dim a placement shards, for Shard and for its strided kind."""
    return getattr(placement, "dim", None)


def _is_batch_or_heads(placement: Placement) -> bool:
    if type(placement) is Shard:
        return placement.dim in (BATCH_DIM, HEADS_DIM)
    return isinstance(placement, Replicate)


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {_describe_one(tensor)}" for name, tensor in tensors.items())


def _describe_one(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "a plain tensor"
    return f"{tensor.placements} on mesh {tensor.device_mesh.mesh_dim_names}"


def _check_even(tensor: Tensor, name: str, axis: SequenceAxis, *, site: str) -> None:
    length = tensor.shape[SEQUENCE_DIM]
    if length % axis.world_size:
        raise UnevenSequence(
            site=site,
            expected=f"a sequence length divisible by the {axis.world_size} ranks of {axis.name}",
            got=f"{name} of length {length}",
            remedy=f"pad the sequence to {-(-length // axis.world_size) * axis.world_size}",
        )


def _axis(mesh: DeviceMesh, axis: int, *, site: str) -> SequenceAxis:
    name = f"axis {mesh.mesh_dim_names[axis]!r}" if mesh.mesh_dim_names else f"axis {axis}"
    if not dist.is_initialized():
        raise ProcessGroupError(
            site=site,
            expected=f"an initialised process group behind {name}",
            got="none: it was destroyed, or this process never joined it",
            remedy="call torch.distributed.init_process_group before compiling, and keep it",
        )
    if mesh.get_coordinate() is None:
        raise ProcessGroupError(
            site=site,
            expected=f"this process on {name}",
            got=f"global rank {dist.get_rank()}, which the mesh does not hold",
            remedy="run the model only on the ranks of its mesh",
        )
    ranks = mesh_axis_ranks(mesh, axis)
    if list(ranks) != sorted(ranks):
        raise UnsupportedPlacement(
            site=site,
            expected=f"ascending ranks along {name}: c10d numbers a group's ranks in that order",
            got=f"{list(ranks)}",
            remedy="build the mesh from sorted ranks",
        )
    # The group by its name: DTensor's caches may hand back an equal mesh from before the process
    # group was destroyed and built anew, whose group objects are dead.
    group_name = mesh.get_group(axis).group_name
    return SequenceAxis(name, group_name, ranks.index(dist.get_rank()), len(ranks))
