"""Meshes along which this library's sequences lie: where it corrects what DTensor computes.

A program that does not use this library may count on DTensor's own numbers. So means, partials and
losses are corrected only where the library is used: in what our backends compile, and on a mesh
with an axis that holds sequences. An axis holds sequences once an attention over it was met, in
eager code or in a compile, `cp_inductor.shard` has cut a tensor for it, or a model was given to
`cp_inductor.parallelize` with it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.traces import traces

# The groups of mesh axes along which sequences lie, by the names of axis and group. Meshes over the
# same ranks may share a group. The name of a group outlives it, and may be given again.
_SEQUENCES: WeakValueDictionary[tuple[str | None, str], dist.ProcessGroup] = WeakValueDictionary()


def hold_sequences_along(mesh: DeviceMesh, group_name: str) -> None:
    """Note that an axis of a mesh holds sequences.

    Args:
        mesh: a mesh that holds this process.
        group_name: c10d name of the axis's process group.
    """
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
