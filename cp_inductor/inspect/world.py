"""Pretend to be one rank of a world that does not exist, with tensors without data.

    with pretended_world(rank=517, world_size=1024) as mesh:
        (args, kwargs), like = Placer(mesh).call(args, kwargs)      # only shapes and placements
        model = Placer(mesh).model(model, like)

Existing process groups are hidden and restored. Tensors are CPU memory that is allocated but never
touched, so the operating system never backs it: a model of any size needs no memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import empty as distributed_empty

from cp_inductor.dtensor.wrap import stride_of
from cp_inductor.errors import ProcessGroupError, UnsupportedPlacement
from cp_inductor.inspect.pretend import stashed_process_groups
from cp_inductor.modules.parallelize import Options, adapt, options_of, parallelize_copy

AXIS_NAMES = {1: ("cp",), 2: ("dp", "cp"), 3: ("dp", "cp", "tp")}


@contextmanager
def pretended_world(
    rank: int,
    world_size: int,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
) -> Iterator[DeviceMesh]:
    """Within this context, be one rank of a world whose collectives send nothing.

    Args:
        rank: the global rank to be.
        world_size: number of ranks.
        mesh_shape: of the mesh over all ranks; by default ``(world_size,)``.
        mesh_dim_names: names of its axes; by default ("cp",), ("dp", "cp") or ("dp", "cp", "tp").

    Yields:
        The mesh.

    Raises:
        ProcessGroupError: the world has no such rank.
        UnsupportedPlacement: the sizes of the mesh's axes do not multiply to world_size, or the
            axes lack names.
    """
    shape = (world_size,) if mesh_shape is None else tuple(mesh_shape)
    names = AXIS_NAMES.get(len(shape)) if mesh_dim_names is None else tuple(mesh_dim_names)
    if not 0 <= rank < world_size:
        raise ProcessGroupError(
            site=f"rank={rank}, world_size={world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            got=str(rank),
            remedy="name a rank of this world",
        )
    if math.prod(shape) != world_size or min(shape, default=1) < 1:
        raise UnsupportedPlacement(
            site=f"mesh_shape={shape}",
            expected=f"a mesh of {world_size} ranks",
            got=f"a mesh of {' x '.join(map(str, shape))}",
            remedy="choose axis sizes whose product is world_size",
        )
    if not isinstance(names, tuple) or len(names) != len(shape) or len({*names}) < len(names):
        raise UnsupportedPlacement(
            site=f"mesh_shape={shape}",
            expected=f"{len(shape)} axis names, none of them twice",
            got=str(names),
            remedy="pass mesh_dim_names=",
        )
    # Importing this module registers the "fake" backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with stashed_process_groups():
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass(frozen=True, slots=True)
class Placer:
    """Replaces tensors by uninitialized ones with the same shape, dtype and placements on a mesh.

    Attributes:
        mesh: of the pretended world.
    """

    mesh: DeviceMesh

    def call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        placements: Sequence[Placement] | None = None,
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], DTensor | None]:
        """Replace every tensor of a call's arguments.

        Args:
            args, kwargs: trees of plain tensors and of DTensors on any mesh, on any device, also
                "meta".
            placements: if given, plain tensors are whole tensors, and become DTensors with these
                placements. If None, they stay plain.

        Returns:
            The new arguments, and the first DTensor among them, or None.
        """
        tree = (tuple(args), dict(kwargs))
        placed = pytree.tree_map_only(Tensor, lambda tensor: self.place(tensor, placements), tree)
        leaves = pytree.tree_leaves(placed)
        return placed, next((leaf for leaf in leaves if type(leaf) is DTensor), None)

    def options(
        self, options: Mapping[str, Any], model: Any, like: DTensor | None
    ) -> dict[str, Any]:
        """Return torch.compile's options, with "mesh" replaced by the same axis of this mesh.

        Args:
            options: ``"mesh"`` is the name of an axis, or a mesh whose axis has that name. If it is
                missing, it is "cp", unless something else says how tensors are sharded.
            model: of the call; if it is parallelized, it says how tensors are sharded.
            like: some DTensor among the arguments, which say so as well; or None.
        """
        rest = {name: value for name, value in options.items() if name != "mesh"}
        named = options.get("mesh")
        is_declared = like is not None or options_of(getattr(model, "_orig_mod", model)) is not None
        if named is None and is_declared:
            return rest
        if isinstance(named, DeviceMesh):
            named = (named.mesh_dim_names or ("cp",))[0]
        return rest | {"mesh": self.mesh if self.mesh.ndim == 1 else self.mesh[named or "cp"]}

    def model(self, model: Any, like: DTensor | None) -> Any:
        """Return a copy of a module whose parameters and buffers have no data.

        Args:
            model: a module, which is not changed, or a function, which is returned.
            like: if given, plain parameters and buffers become DTensors, replicated on its mesh,
                and modules compute as `parallelize` would have them.
        """
        model = getattr(model, "_orig_mod", model)  # the module that torch.compile has wrapped
        if not isinstance(model, nn.Module):
            return model
        if options_of(model) is not None:
            like = None
        mesh = self.mesh if like is None else like.device_mesh
        everywhere = None if like is None else [Replicate()] * mesh.ndim
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            new = Placer(mesh).place(tensor, everywhere)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = new
        # copy.deepcopy treats what the memo holds as copies that are made already.
        placed = copy.deepcopy(model, memo)
        if (options := options_of(model)) is not None:
            weights = options.weights
            if weights is not None:
                weights = replace(weights, mesh=self._corresponding(weights.mesh))
            here = self._corresponding(options.mesh)
            parallelize_copy(placed, replace(options, mesh=here, weights=weights))
            return placed
        if like is not None and not all(isinstance(one, DTensor) for one in model.parameters()):
            adapt(placed, Options(mesh))
        return placed

    def place(self, tensor: Tensor, placements: Sequence[Placement] | None) -> Tensor:
        """Replace one tensor; placements as in `call`."""
        if isinstance(tensor, DTensor):
            mesh = self._corresponding(tensor.device_mesh)
            placed: Tensor = _empty_dtensor(tensor, mesh, tensor.placements)
        elif placements is not None:
            placed = _empty_dtensor(tensor, self.mesh, placements)
        else:
            placed = _empty(tensor.shape, tensor.stride(), tensor.dtype)
        for name, value in vars(tensor).items():
            if name.startswith("_dynamo_"):  # set by torch._dynamo.mark_dynamic and the like
                setattr(placed, name, value)
        return placed.requires_grad_(tensor.requires_grad)

    def _corresponding(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the part of this mesh that has the axes of a user's mesh."""
        names = mesh.mesh_dim_names
        if names is not None and set(names) <= set(self.mesh.mesh_dim_names or ()):
            return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]
        if mesh.ndim == self.mesh.ndim:
            return self.mesh
        raise UnsupportedPlacement(
            site="a DTensor among model, args and kwargs",
            expected=f"a mesh with axes of {self.mesh.mesh_dim_names}",
            got=f"a {mesh.ndim}-D mesh with axes {names}",
            remedy="pass the mesh_shape= and mesh_dim_names= of the mesh that holds the DTensors",
        )


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _empty_dtensor(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    with FakeTensorMode():
        pieces = distributed_empty(whole.shape, device_mesh=mesh, placements=placements)
        shape = pieces.to_local().shape
    # Order the dims of the shard in memory as those of the whole tensor.
    stride = stride_of([max(size, 1) for size in shape], whole.stride())
    local = _empty(shape, stride, whole.dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
