"""Process groups by name, their stores, and their ranks. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel


def group_of(group_name: str) -> dist.ProcessGroup:
    """Return the process group that has a name now, as functional collectives do (2.13-2.15)."""
    # Names have a type of their own, a str to everybody but type checkers.
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return resolve(group_name)


def group_with_store(
    group_name: str,
) -> tuple[dist.ProcessGroup, Callable[[], tuple[dist.Store, float]]]:
    """Return a process group, and a function that returns its store and its timeout in seconds.

    `ProcessGroup.get_group_store`, which is public; `ProcessGroup._device_types`, `._get_backend`
    and `.options._timeout` of its backends (torch._C._distributed_c10d, 2.13-2.15). The timeout is
    the least of the backends'; the store has another one, which is used if no backend has any.
    """
    group = group_of(group_name)

    def ask() -> tuple[dist.Store, float]:
        store: Any = group.get_group_store()
        backends = [group._get_backend(device) for device in group._device_types]
        timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
        return store, min(timeouts, default=store.timeout).total_seconds()

    return group, ask


def exchange_rows(
    rows: Tensor, received: list[int] | None, sent: list[int] | None, mesh: DeviceMesh, axis: int
) -> Tensor:
    """Send rows to the ranks along a mesh axis, in order; the gradients of what arrives come back.

    Every rank gets as many, unless `sent` and `received` count those to and from each (2.13-2.15).
    """
    return all_to_all_single_autograd(rows, received, sent, (mesh, axis))


def mesh_axis_ranks(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """Return the global ranks on this process's line along one axis of a mesh, in mesh order.

    A mesh holds its ranks in a tensor. While a graph is traced, indexing it would return a fake
    tensor (2.13-2.15).
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    with unset_fake_temporarily():
        index = tuple(slice(None) if dim == axis else at for dim, at in enumerate(coordinate))
        return tuple(mesh.mesh[index].tolist())


def ranks_that_reduce(module: DistributedDataParallel | FullyShardedDataParallel) -> frozenset[int]:
    """Return the ranks over which a wrapper of data parallelism reduces gradients.

    FSDP that shards within groups and replicates across them reduces over both; the second is
    `_inter_node_pg` (torch.distributed.fsdp._init_utils, 2.13-2.15).
    """
    ranks = dist.get_process_group_ranks(module.process_group)
    if isinstance(module, FullyShardedDataParallel) and module.sharding_strategy in _HYBRID:
        # The groups are rows and columns of a grid.
        replicas = dist.get_process_group_ranks(module._inter_node_pg)
        ranks = [rank + replica - dist.get_rank() for rank in ranks for replica in replicas]
    return frozenset(ranks)


_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
