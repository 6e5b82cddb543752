"""Pretend to be one rank of a world that does not exist, with tensors without data.

    with pretended_world(rank=517, world_size=1024) as mesh:
        example = load_example("path/to/file.py:function", mesh)        # what a user names
        example = place(example, mesh)                                  # only shapes and placements

Existing process groups are hidden and restored. Tensors are CPU memory that is allocated but never
touched, so the operating system never backs it: a model of any size needs no memory.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
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
from cp_inductor.errors import CPError, ProcessGroupError, UnsupportedPlacement
from cp_inductor.inspect.pretend import stashed_process_groups
from cp_inductor.modules.model import adapt
from cp_inductor.modules.parallelize import options_of, parallelize_copy
from cp_inductor.modules.weights import Options
from cp_inductor.torch_private.dynamo import graph_break_reason

AXIS_NAMES = {1: ("cp",), 2: ("dp", "cp"), 3: ("dp", "cp", "tp")}


class CannotLoad(CPError):
    """The named function does not exist, or does not return a model and its arguments."""


@contextmanager
def pretended_world(
    rank: int,
    world_size: int,
    mesh_shape: Sequence[int] | None,
    mesh_dim_names: Sequence[str] | None,
) -> Iterator[DeviceMesh]:
    """Within this context, be one rank of a world whose collectives send nothing; yield its mesh.

    The mesh spans all ranks; it is 1-D, and its axes are named as in `AXIS_NAMES`, if not given.

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
    """A call of a model, a module or a function, and what torch.compile is told."""

    model: Callable[..., Any]
    args: Any = ()  # or a function from the mesh to them, until the call has its place
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    mode: str | None = None

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
    whole = example.args(mesh) if callable(example.args) else example.args
    tree = (tuple(whole), dict(example.kwargs))
    make = partial(_place, mesh=mesh, placements=placements)
    args, kwargs = pytree.tree_map_only(Tensor, make, tree)
    model: Any = getattr(example.model, "_orig_mod", example.model)  # what torch.compile wrapped
    options = dict(example.options)
    placed = replace(example, model=model, args=args, kwargs=kwargs, options=options)
    named = options.pop("mesh", None)
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
    elif like is not None and not all(isinstance(p, DTensor) for p in model.parameters()):
        adapt(placed, Options(like.device_mesh))
    return placed


def _place(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Tensor:
    if isinstance(tensor, DTensor):
        mesh, placements = _corresponding(tensor.device_mesh, mesh), tensor.placements
    if placements is None:
        shape, stride = tensor.shape, tensor.stride()
        placed = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
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


def load_example(name: str, mesh: DeviceMesh) -> Example:
    """Call the function that a user named, with the mesh of the ranks if it takes an argument.

    The name is ``module:function``, where module is to be imported or a path to a ``.py`` file.

    Raises:
        CannotLoad: the function does not exist, or raises, or does not return a model and its
            arguments.
    """
    try:
        function = _find(name)
        built = function(mesh) if inspect.signature(function).parameters else function()
    except CPError:
        raise
    except Exception as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        raise CannotLoad(
            site=name,
            expected="code that builds a model and its arguments",
            got=f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
            remedy="call the function in a program of its own to see the whole traceback",
        ) from error
    parts = built if isinstance(built, tuple) else (built,)
    is_right = (
        2 <= len(parts) <= 4
        and callable(parts[0])
        and isinstance(parts[1], (tuple, list))
        and all(isinstance(part, Mapping) for part in parts[2:])
    )
    if not is_right:
        raise CannotLoad(
            site=name,
            expected="a function that returns (model, args), optionally followed by kwargs"
            " and options",
            got=f"{type(built).__name__} of {[type(part).__name__ for part in parts]}",
            remedy="return the model and a tuple of its arguments",
        )
    return Example(*parts)


@contextmanager
def failures_named(name: str) -> Iterator[None]:
    """Raise as one line why Dynamo did not capture the model that a user named.

    Raises:
        CannotLoad: it did not; what it calls or is called with is at fault, and not the library.
    """
    try:
        yield
    except CPError:
        raise
    except Exception as error:
        reason = graph_break_reason(error)
        if reason is None:
            raise
        raise CannotLoad(
            site=name,
            expected="a model that runs on its arguments and is captured whole",
            got=reason,
            remedy="call it on plain tensors first; then with torch.compile(fullgraph=True)",
        ) from error


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.rpartition(":")
    try:
        if not colon:
            module = _import(name)
            functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f)}
            own = [n for n, f in functions.items() if f.__module__ == module.__name__]
            public = ", ".join(n for n in own if n[0] != "_")
            raise AttributeError(f"no function; there are {public or 'none'}")
        module = _import(module_name)
        function: Callable[..., Any] = getattr(module, function_name)
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        raise CannotLoad(
            site=name,
            expected="module:function, or path/to/file.py:function",
            got=str(error),
            remedy="name a function that can be imported from here",
        ) from None
    return function


def _import(name: str) -> Any:
    if not name.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(name)
    # So that the file can import those beside it; behind all else, lest a folder of the same name
    # take the place of a module of Python's in the processes that are started from here.
    folder = str(Path(name).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return import_file(Path(name), is_registered=True)


def import_file(path: Path, *, is_registered: bool = False) -> Any:
    """Import a file; if registered, dataclasses and pickle find its classes in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if is_registered:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
