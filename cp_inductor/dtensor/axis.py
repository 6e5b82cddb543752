"""Find the mesh axis on which a sequence is sharded, and check that a plan can attend over it.

    q, k, v: DTensor (B, H, S, D) [Replicate, Shard(2)]  =>  SequenceAxis(group of mesh dim 1)

The axis follows from the placements of DTensors, or from the mesh that a user names for plain
tensors. Shardings that no plan supports are refused here, for graph passes and eager code alike.

A program that does not use this library may count on DTensor's own numbers. So means, partials and
losses are corrected only where the library is used: in what our backends compile, and on a mesh
with an axis that holds sequences. An axis holds sequences once an attention over it was met, in
eager code or in a compile, `cp_inductor.shard` has cut a tensor for it, or a model was given to
`cp_inductor.parallelize` with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from sympy import Expr
from torch import SymInt, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_inductor.dtensor.limits import check_mesh
from cp_inductor.dtensor.wrap import wrap_shard, wrap_whole
from cp_inductor.errors import ProcessGroupError, UnsupportedPlacement
from cp_inductor.mask.language import BATCH, HEAD, QUERY, is_of_pairs
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.tiles.dims import BATCH_DIM, HEADS_DIM, SEQUENCE_DIM
from cp_inductor.tiles.dropout import BATCH_STRIDE
from cp_inductor.torch_private.groups import group_of, mesh_axis_ranks
from cp_inductor.torch_private.traces import traces

# The groups of mesh axes along which sequences lie, by the names of axis and group. Meshes over the
# same ranks may share a group. The name of a group outlives it, and may be given again.
_SEQUENCES: WeakValueDictionary[tuple[str | None, str], dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    """The mesh axis that shards the sequence, and this process's position on it."""

    name: str  # for messages
    group_name: str  # of c10d
    rank: int
    world_size: int


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Whether this rank is the one that gives a warning for all ranks of a mesh."""
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def hold_sequences_along(mesh: DeviceMesh, group_name: str) -> None:
    """Note that the axis of a mesh that has a process group of this c10d name holds sequences."""
    group = group_of(group_name)
    _SEQUENCES.update({key: group for key in _axes_of(mesh) if key[1] == group_name})


def holds_sequences(mesh: DeviceMesh) -> bool:
    """Whether a mesh holds this process, and sequences; any mesh may, in what is traced for us."""
    if mesh.get_coordinate() is None:
        return False
    if traces.is_ours:
        return True
    return any(_SEQUENCES.get(key) == group_of(key[1]) for key in _axes_of(mesh))


def _axes_of(mesh: DeviceMesh) -> list[tuple[str | None, str]]:
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    groups = (str(mesh.get_group(axis).group_name) for axis in range(mesh.ndim))
    return list(zip(names, groups, strict=True))


def axis_of_mesh(mesh: DeviceMesh, *, site: str) -> SequenceAxis:
    """Return the axis that a user's ``options={"mesh": mesh}`` names."""
    check_mesh(mesh, site=site)
    return _axis(mesh, 0, site=site)


def axis_and_placements(
    query: Tensor, key: Tensor, value: Tensor, *, site: str
) -> tuple[SequenceAxis | None, tuple[Placement, ...]]:
    """Return the axis that shards the sequence; None if none of the three is sharded along it.

    And the placements at which ranks take query, key and value, all three alike:

    [Shard(2)], [Replicate], [Replicate]  =>  [Shard(2)]         a rank takes its part of a whole

    One mesh axis shards the sequence. The others shard batch or heads, if any of the tensors does,
    and heads only if groups of query heads stay with their key head.
    """
    tensors = {"query": query, "key": key, "value": value}
    axes = {axis for tensor in tensors.values() for axis in _sequence_axes(tensor)}
    if not axes:
        return None, ()
    placed = _on_one_mesh(tensors, site=site)
    if len(axes) > 1:
        raise UnsupportedPlacement(
            site=site,
            expected=f"the sequence dim ({SEQUENCE_DIM}) sharded on one mesh axis",
            got=f"{_describe(tensors)}, which shard it on {len(axes)} axes",
            remedy="flatten these axes into one, as in mesh['dp', 'cp']._flatten('seq')",
        )
    (axis,), placements = axes, list(batch_and_heads(*placed))
    placements[axis] = Shard(SEQUENCE_DIM)
    return _axis(placed[0].device_mesh, axis, site=site), tuple(placements)


def batch_and_heads(query: DTensor, key: DTensor, value: DTensor) -> tuple[Placement, ...]:
    """Return placements that shard batch and heads as the first of these tensors does that may.

    A rank with some query heads must have exactly their key heads: (B, 12, S, D) and (B, 3, T, D)
    over 2 ranks would give 6 query heads 2 key heads, in groups of 3 instead of 4. No rank may be
    left without entries or heads, on which kernels fail: 4 over 3 ranks are 2, 2 and 0.
    """
    mesh = query.device_mesh
    placements: list[Placement] = []
    for of_axis in zip(query.placements, key.placements, value.placements, strict=True):
        dims = [getattr(placement, "dim", None) for placement in of_axis]
        sharded = [Shard(dim) for dim in dims if dim in (BATCH_DIM, HEADS_DIM)]
        placements.append(sharded[0] if sharded else Replicate())
    num_heads, num_kv_heads = query.shape[HEADS_DIM], key.shape[HEADS_DIM]
    for dim in (HEADS_DIM, BATCH_DIM):
        sizes = [mesh.size(axis) for axis, p in enumerate(placements) if p == Shard(dim)]
        smallest = min(query.shape[dim], key.shape[dim])
        for ranks in sizes:
            smallest -= (ranks - 1) * -(-smallest // ranks)
        is_grouped = dim == HEADS_DIM and num_heads != num_kv_heads
        if (is_grouped and num_kv_heads % prod(sizes)) or smallest < 1:
            placements = [Replicate() if p == Shard(dim) else p for p in placements]
    return tuple(placements)


def check_shards_of_named_mesh(query: Tensor, key: Tensor, value: Tensor, *, site: str) -> None:
    """Check tensors whose sequence is sharded according to the user, not to their placements.

    Plain tensors are accepted as they are. DTensors may shard batch or heads, all three alike.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return
    placed = _on_one_mesh(tensors, site=site)
    wanted = batch_and_heads(*placed)
    if any(tensor.placements != wanted for tensor in placed):
        raise UnsupportedPlacement(
            site=site,
            expected="Replicate, or Shard of batch or heads, the same of query, key and value, and"
            " a number of key heads that divides by the ranks",
            got=_describe(tensors),
            remedy=f"redistribute them to {wanted} before the attention",
        )


def whole_of_shard(lengths: Sequence[int], world_size: int, rank: int) -> dict[int, int]:
    """Map the length of a rank's shard to the length of the whole sequence.

    Empty if all lengths in use divide: then a sequence is P times as long as its shard on any rank.
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

    It is a DTensor, or the same on every rank; `like` is the query, a DTensor; roles: `roles_of`.
    """
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    if not isinstance(tensor, DTensor):
        tensor = wrap_whole(tensor, mesh)
    dims = {BATCH_DIM: roles.find("b"), HEADS_DIM: roles.find("h"), SEQUENCE_DIM: roles.find("q")}
    placements: list[Placement] = []
    for placement in like.placements:
        dim = dims.get(placement.dim, -1) if isinstance(placement, Shard) else -1
        is_sharded = dim >= 0 and tensor.shape[dim] != 1
        placements.append(Shard(dim) if is_sharded else Replicate())
    return tensor.redistribute(mesh, placements).to_local()


def first_batch_and_head(tensor: Tensor) -> tuple[int | SymInt, int | SymInt]:
    """Return the global indices of the first batch entry and head that this rank holds.

    Of (B, H, S, D); a plain tensor counts as whole in batch and heads.
    """
    if not isinstance(tensor, DTensor):
        return 0, 0
    first: list[int | SymInt] = [0] * tensor.ndim
    lengths: list[int | SymInt] = [*tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and placement.dim in (BATCH_DIM, HEADS_DIM):
            # As torch.chunk cuts what the axes before have left.
            length, dim = lengths[placement.dim], placement.dim
            most = -(-length // tensor.device_mesh.size(axis))
            before = torch.sym_min(length, most * tensor.device_mesh.get_local_rank(axis))
            first[dim] += before
            lengths[dim] = torch.sym_min(most, length - before)
    return first[BATCH_DIM], first[HEADS_DIM]


def seed_of_shard(seed: Tensor, like: Tensor) -> Tensor:
    """Return the seed with which a rank draws its part of the dropout of the whole tensor.

    Seeds follow global positions, so that dropout does not depend on how many ranks there are. The
    seed is () int64, the same on every rank; `like` is the query (B, H, S, D), a DTensor.
    """
    first: Any = first_batch_and_head(like)
    return seed + (first[0] * BATCH_STRIDE + first[1])


def from_local_like(local: Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's shard into a DTensor with the mesh and placements of another (B, H, S, D).

    It has as many batch entries, heads and tokens as the shard of the other.
    """
    mesh, placements = like.device_mesh, like.placements
    shape = (*like.shape[:3], *local.shape[3:])
    if all(
        not isinstance(placement, Shard) or like.shape[placement.dim] % mesh.size(axis) == 0
        for axis, placement in enumerate(placements)
    ):
        return DTensor.from_local(local, mesh, placements, run_check=False)
    return wrap_shard(local, mesh, placements, shape)


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
    # Of Shard and _StridedShard.
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    return [axis for axis, dim in enumerate(dims) if dim == SEQUENCE_DIM]


def _on_one_mesh(tensors: dict[str, Tensor], *, site: str) -> list[DTensor]:
    """Return query, key and value, which must be DTensors on one mesh."""
    placed = [tensor for tensor in tensors.values() if isinstance(tensor, DTensor)]
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    if plain or any(tensor.device_mesh != placed[0].device_mesh for tensor in placed):
        raise UnsupportedPlacement(
            site=site,
            expected="query, key and value as DTensors on one mesh",
            got=_describe(tensors),
            remedy=f"distribute {' and '.join(plain) or 'all three'} on the same mesh",
        )
    return placed


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {tensor.placements} on mesh {tensor.device_mesh.mesh_dim_names}"
        if isinstance(tensor, DTensor)
        else f"{name} a plain tensor"
        for name, tensor in tensors.items()
    )


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
