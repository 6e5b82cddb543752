"""Find the mesh axis on which a sequence is sharded, and check that a plan can attend over it.

    q, k, v: DTensor (B, H, S, D) [Replicate, Shard(2)]  =>  SequenceAxis(group of mesh dim 1)

The axis follows from the placements of DTensors, or from the mesh that a user names for plain
tensors. Sequence shardings that no plan supports are refused here, for every caller: the graph pass
and the DTensor handler in eager code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sympy import Expr
from torch import SymInt, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_inductor.errors import ProcessGroupError, UnsupportedPlacement
from cp_inductor.mask.language import BATCH, HEAD, QUERY, is_of_pairs
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.tiles.dims import BATCH_DIM, HEADS_DIM, SEQUENCE_DIM
from cp_inductor.torch_private.groups import mesh_axis_ranks


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    """The mesh axis that shards the sequence.

    Attributes:
        name: for messages: the name of the axis in its mesh.
        group_name: c10d name of its process group.
        rank: this process's position on it.
        world_size: number of ranks on it.
    """

    name: str
    group_name: str
    rank: int
    world_size: int


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Whether this rank is the one that gives a warning for all ranks of a mesh."""
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


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
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D). Other axes of the mesh may
            shard the batch or the heads.
        site: for errors.

    Returns:
        None if no tensor is sharded along the sequence.

    Raises:
        UnsupportedPlacement: they are sharded differently, or on more than one axis.
        ProcessGroupError: there is no process group behind the axis.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not any(_sequence_axes(tensor) for tensor in tensors.values()):
        return None
    mesh, placements = _check_alike(tensors, site=site)
    axes = _sequence_axes(query)
    if len(axes) > 1:
        raise UnsupportedPlacement(
            site=site,
            expected=f"the sequence dim ({SEQUENCE_DIM}) sharded on one mesh axis",
            got=f"{_describe(tensors)}, which shard it on {len(axes)} axes",
            remedy="flatten these axes into one, as in mesh['dp', 'cp']._flatten('seq')",
        )
    others = [placement for dim, placement in enumerate(placements) if dim != axes[0]]
    _check_batch_or_heads(others, tensors, site=site)
    if type(placements[axes[0]]) is not Shard:
        raise UnsupportedPlacement(
            site=site,
            expected="contiguous shards of the sequence, in rank order",
            got=_describe(tensors),
            remedy="redistribute query, key and value to a plain Shard before the attention",
        )
    return _axis(mesh, axes[0], site=site)


def check_shards_of_named_mesh(query: Tensor, key: Tensor, value: Tensor, *, site: str) -> None:
    """Check tensors whose sequence is sharded according to the user, not to their placements.

    Plain tensors are accepted as they are. DTensors may shard batch or heads, all three alike.

    Raises:
        UnsupportedPlacement: plain tensors and DTensors are mixed, or DTensors differ.
    """
    tensors = {"query": query, "key": key, "value": value}
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        _, placements = _check_alike(tensors, site=site)
        _check_batch_or_heads(placements, tensors, site=site)


def whole_of_shard(lengths: Sequence[int], world_size: int, rank: int) -> dict[int, int]:
    """Map the length of a rank's shard to the length of the whole sequence.

    Args:
        lengths: of the sequences in use. A length that does not divide by the ranks must be
            included.

    Returns:
        Empty if all lengths divide: then a sequence is P times as long as its shard on any rank.
    """
    if all(length % world_size == 0 for length in lengths):
        return {}
    return {shard_lengths(length, world_size)[rank]: length for length in lengths}


def roles_of(indices: Sequence[Expr]) -> str:
    """Tell what the dims of a table are, from the indices at which a rule reads it.

    Returns:
        A letter per dim: "b" for batch, "h" for heads; "q" for queries if the table is indexed by
        keys as well, so that a rank reads only the rows of its own queries; "." for anything else,
        which a rank reads whole.
    """
    letters = {BATCH: "b", HEAD: "h", QUERY: "q" if is_of_pairs(indices) else "."}
    return "".join(letters.get(index, ".") for index in indices)


def local_part(tensor: Tensor, like: Tensor, roles: str) -> Tensor:
    """Return the part that this rank reads of a mask, or of a table that a mask is made from.

    Args:
        tensor: a DTensor, or a plain tensor that is the same on every rank.
        like: the query, a DTensor (B, H, S, D).
        roles: of the tensor's dims; see `roles_of`.
    """
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    if not isinstance(tensor, DTensor):
        whole = [Replicate()] * mesh.ndim
        tensor = DTensor.from_local(tensor, mesh, whole, run_check=False)
    role_of_dim = {BATCH_DIM: "b", HEADS_DIM: "h", SEQUENCE_DIM: "q"}
    placements: list[Placement] = []
    for placement in like.placements:
        role = role_of_dim.get(placement.dim) if isinstance(placement, Shard) else None
        dim = roles.find(role) if role is not None else -1
        is_sharded = dim >= 0 and tensor.shape[dim] != 1
        placements.append(Shard(dim) if is_sharded else Replicate())
    return tensor.redistribute(mesh, placements).to_local()


def first_batch_and_head(tensor: Tensor) -> tuple[int | SymInt, int | SymInt]:
    """Return the global indices of the first batch entry and the first head that this rank holds.

    Args:
        tensor: (B, H, S, D). A plain tensor counts as whole in batch and heads.
    """
    if not isinstance(tensor, DTensor):
        return 0, 0
    first: dict[int, int | SymInt] = {BATCH_DIM: 0, HEADS_DIM: 0}
    lengths = dict(zip(first, tensor.shape, strict=False))
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard) or placement.dim not in first:
            continue
        # As torch.chunk cuts what the axes before have left.
        length, dim = lengths[placement.dim], placement.dim
        most = -(-length // tensor.device_mesh.size(axis))
        before = torch.sym_min(length, most * tensor.device_mesh.get_local_rank(axis))
        first[dim] += before
        lengths[dim] = torch.sym_min(most, length - before)
    return first[BATCH_DIM], first[HEADS_DIM]


def from_local_like(local: Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's shard into a DTensor with the mesh and placements of another.

    Args:
        local: this rank's shard, with as many batch entries, heads and tokens as the shard of
            `like`.
        like: (B, H, S, D).
    """
    mesh, placements = like.device_mesh, like.placements
    shape = (*like.shape[:3], *local.shape[3:])
    if all(
        not isinstance(placement, Shard) or like.shape[placement.dim] % mesh.size(axis) == 0
        for axis, placement in enumerate(placements)
    ):
        return DTensor.from_local(local, mesh, placements, run_check=False)
    stride = global_stride(local, shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def global_stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a whole tensor whose dims are in the memory order of its shard."""
    stride, length = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        stride[dim] = length
        length *= shape[dim]
    return tuple(stride)


def is_sequence_sharded(tensor: Tensor) -> bool:
    """Whether a query, key or value is a DTensor that is sharded along the sequence."""
    return bool(_sequence_axes(tensor))


def sequence_groups(tensor: Tensor) -> list[str]:
    """Return the names of the process groups that a query, key or value is sharded among."""
    if not isinstance(tensor, DTensor) or not dist.is_initialized():
        return []
    mesh = tensor.device_mesh
    axes = [] if mesh.get_coordinate() is None else _sequence_axes(tensor)
    return [mesh.get_group(axis).group_name for axis in axes]


def _sequence_axes(tensor: Tensor) -> list[int]:
    if not isinstance(tensor, DTensor):
        return []
    sequence_dims = (SEQUENCE_DIM, SEQUENCE_DIM - tensor.ndim)
    return [axis for axis, p in enumerate(tensor.placements) if _dim_of(p) in sequence_dims]


def _dim_of(placement: Placement) -> int | None:
    """The dim that a placement shards, for Shard and _StridedShard."""
    return getattr(placement, "dim", None)


def _check_alike(
    tensors: dict[str, Tensor], *, site: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements that query, key and value share."""
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    if plain:
        raise UnsupportedPlacement(
            site=site,
            expected="query, key and value as DTensors on one mesh",
            got=_describe(tensors),
            remedy=f"distribute {' and '.join(plain)} on the same mesh",
        )
    query, *others = (tensor for tensor in tensors.values() if isinstance(tensor, DTensor))
    if any(
        other.device_mesh != query.device_mesh or other.placements != query.placements
        for other in others
    ):
        raise UnsupportedPlacement(
            site=site,
            expected="query, key and value on one mesh with the same placements",
            got=_describe(tensors),
            remedy="redistribute them alike, the sequence dim on the same mesh axis",
        )
    return query.device_mesh, query.placements


def _check_batch_or_heads(
    placements: Sequence[Placement], tensors: dict[str, Tensor], *, site: str
) -> None:
    if not all(_is_batch_or_heads(placement) for placement in placements):
        raise UnsupportedPlacement(
            site=site,
            expected="Shard of the sequence on one mesh axis, and Replicate, or Shard of"
            " batch or heads, on the others",
            got=_describe(tensors),
            remedy="redistribute query, key and value before the attention",
        )


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


def _axis(mesh: DeviceMesh, axis: int, *, site: str) -> SequenceAxis:
    name = f"axis {mesh.mesh_dim_names[axis]!r}" if mesh.mesh_dim_names else f"axis {axis}"
    if not dist.is_initialized():
        raise ProcessGroupError(
            site=site,
            expected=f"an initialised process group behind {name}",
            got="none: it was destroyed, or this process never joined it",
            remedy="call torch.distributed.init_process_group before compiling, and do not"
            " destroy it",
        )
    if mesh.get_coordinate() is None:
        raise ProcessGroupError(
            site=site,
            expected=f"a process on {name}",
            got=f"global rank {dist.get_rank()}, which is not in the mesh",
            remedy="run the model only on the ranks of its mesh",
        )
    ranks = mesh_axis_ranks(mesh, axis)
    if list(ranks) != sorted(ranks):
        raise UnsupportedPlacement(
            site=site,
            expected=f"ascending ranks along {name}, because c10d numbers a group's ranks in"
            " that order",
            got=f"{list(ranks)}",
            remedy="build the mesh from sorted ranks",
        )
    # The group by its name: DTensor's caches may hand back an equal mesh from before the process
    # group was destroyed and built anew, whose group objects are dead.
    group_name = mesh.get_group(axis).group_name
    return SequenceAxis(name, group_name, ranks.index(dist.get_rank()), len(ranks))
