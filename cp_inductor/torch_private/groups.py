"""Process groups by their names, the stores behind them, and the ranks of a mesh axis.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def group_of(group_name: str) -> dist.ProcessGroup:
    """Return the process group that has a name now.

    `_resolve_process_group` (torch.distributed.distributed_c10d, 2.11-2.15) is what functional
    collectives use for the same name.
    """
    # From 2.13 names have a type of their own, a str to everybody but type checkers.
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return resolve(group_name)


def group_with_store(
    group_name: str,
) -> tuple[dist.ProcessGroup, Callable[[], tuple[dist.Store, float]]]:
    """Return a process group named by c10d, and what returns its store and its timeout in seconds.

    `ProcessGroup.get_group_store`, which is public; `ProcessGroup._device_types`, `._get_backend`
    and `.options._timeout` of its backends (torch._C._distributed_c10d, 2.11-2.15). The store's own
    timeout is not the group's.
    """
    group = group_of(group_name)

    def ask() -> tuple[dist.Store, float]:
        store: Any = group.get_group_store()
        backends = [group._get_backend(device) for device in group._device_types]
        timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
        return store, min(timeouts, default=store.timeout).total_seconds()

    return group, ask


def mesh_axis_ranks(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """Return the global ranks along one axis of a mesh, through this process, in mesh order.

    `unset_fake_temporarily` (torch._subclasses.fake_tensor, 2.11-2.15): the ranks of a mesh are a
    tensor, which must not become fake when this is asked during tracing.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    with unset_fake_temporarily():
        index = tuple(slice(None) if dim == axis else at for dim, at in enumerate(coordinate))
        return tuple(mesh.mesh[index].tolist())
