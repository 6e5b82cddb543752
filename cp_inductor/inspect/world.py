"""Pretend to be one rank of a world that does not exist, with tensors without data.

    with pretended_world(rank=517, world_size=1024) as mesh:
        example = place(Example(model, args, kwargs, options), mesh)    # only shapes and placements

Existing process groups are hidden and restored. Tensors are CPU memory that is allocated but never
touched, so the operating system never backs it: a model of any size needs no memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    mesh_shape: Sequence[int] | None,
    mesh_dim_names: Sequence[str] | None,
) -> Iterator[DeviceMesh]:
    """Within this context, be one rank of a world whose collectives send nothing; yield its mesh.

    Args:
        rank, world_size: the global rank to be, and how many there are.
        mesh_shape: of the mesh over all ranks; ``(world_size,)`` if None.
        mesh_dim_names: names of its axes; ("cp",), ("dp", "cp") or ("dp", "cp", "tp") if None.

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
class Example:
    """A call of a model.

    Attributes:
        model: a module or function.
        args, kwargs: its arguments.
        options: for torch.compile.
    """

    model: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def like(self) -> DTensor | None:
        """The first DTensor among the arguments, which says how tensors are sharded."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return next((leaf for leaf in leaves if type(leaf) is DTensor), None)


def place(
    example: Example, mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> Example:
    """Replace the tensors of a call by uninitialized ones of the same shape, dtype and placements.

    Args:
        example: with trees of plain tensors, and of DTensors on any mesh, on any device, also
            "meta". A module is not changed: a copy has no data. The ``"mesh"`` of the options is
            the name of an axis, or a mesh whose axis has that name; if it is missing, it is "cp",
            unless DTensors or the model say how tensors are sharded.
        mesh: of the pretended world.
        placements: if given, plain arguments are whole tensors, and become DTensors with these
            placements. If None, they stay plain.

    Returns:
        The call. If an argument is a DTensor, plain parameters and buffers are DTensors, too,
        replicated on its mesh, and modules compute as `parallelize` would have them.
    """
    tree = (tuple(example.args), dict(example.kwargs))
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: _place(tensor, mesh, placements), tree
    )
    model: Any = getattr(example.model, "_orig_mod", example.model)  # what torch.compile wrapped
    options = dict(example.options)
    placed, named = Example(model, args, kwargs, options), options.pop("mesh", None)
    if named is not None or (placed.like is None and options_of(model) is None):
        if isinstance(named, DeviceMesh):
            named = (named.mesh_dim_names or ("cp",))[0]
        options["mesh"] = mesh if mesh.ndim == 1 else mesh[named or "cp"]
    return replace(placed, model=_place_model(model, mesh, placed.like))


def _place_model(model: Any, mesh: DeviceMesh, like: DTensor | None) -> Any:
    if not isinstance(model, nn.Module):
        return model
    options = options_of(model)
    if options is not None:
        like = None
    everywhere = None if like is None else [Replicate()] * like.device_mesh.ndim
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        new = _place(tensor, mesh if like is None else like.device_mesh, everywhere)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    # copy.deepcopy treats what the memo holds as copies that are made already.
    placed = copy.deepcopy(model, memo)
    if options is not None:
        weights = options.weights
        if weights is not None:
            weights = replace(weights, mesh=_corresponding(weights.mesh, mesh))
        here = _corresponding(options.mesh, mesh)
        parallelize_copy(placed, replace(options, mesh=here, weights=weights))
    elif like is not None and not all(isinstance(one, DTensor) for one in model.parameters()):
        adapt(placed, Options(like.device_mesh))
    return placed


def _place(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Tensor:
    if isinstance(tensor, DTensor):
        mesh, placements = _corresponding(tensor.device_mesh, mesh), tensor.placements
    if placements is None:
        how: Any = {"dtype": tensor.dtype, "device": "cpu"}
        placed = torch.empty_strided(tensor.shape, tensor.stride(), **how)
    else:
        placed = _empty_dtensor(tensor, mesh, placements)
    for name, value in vars(tensor).items():
        if name.startswith("_dynamo_"):  # set by torch._dynamo.mark_dynamic and the like
            setattr(placed, name, value)
    return placed.requires_grad_(tensor.requires_grad)


def _corresponding(theirs: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh that has the axes of a user's mesh."""
    names = theirs.mesh_dim_names
    if names is not None and set(names) <= set(mesh.mesh_dim_names or ()):
        return mesh if names == mesh.mesh_dim_names else mesh[names]
    if theirs.ndim == mesh.ndim:
        return mesh
    raise UnsupportedPlacement(
        site="a DTensor among model, args and kwargs",
        expected=f"a mesh with axes of {mesh.mesh_dim_names}",
        got=f"a {theirs.ndim}-D mesh with axes {names}",
        remedy="pass the mesh_shape= and mesh_dim_names= of the mesh that holds the DTensors",
    )


def _empty_dtensor(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    with FakeTensorMode():
        pieces = distributed_empty(whole.shape, device_mesh=mesh, placements=placements)
        shape = pieces.to_local().shape
    # Order the dims of the shard in memory as those of the whole tensor.
    stride = stride_of([max(size, 1) for size in shape], whole.stride())
    local = torch.empty_strided(shape, stride, dtype=whole.dtype, device="cpu")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
