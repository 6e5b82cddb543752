"""Let modules read this rank's plain tensors where they hold DTensors.

    module.weight: DTensor [Replicate]  =>  module.weight: Tensor, whose gradient is Partial

Code that DTensor has no rules for then runs on plain tensors. What a rank computes with a weight is
its part: of its own tokens, or of its part of what it returns. So a rank's gradient is a part of
the sum, which `Partial` says.

Modules keep their parameters, names and hooks. Their class becomes a subclass, as in torch's
`parametrize` and `fully_shard`, in which reading a parameter returns the local one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

_MARK = "_cp_mixin"


def read_locally(module: nn.Module, mixin: type[nn.Module] | None) -> None:
    """Let a module, without those inside, read local tensors, and overrule methods by a mixin's."""
    cls: Any = type(module)
    methods: Any = mixin
    module.__class__ = _subclass(cls, methods, tuple(_tensor_names(module)))


def reads_locally(module: nn.Module) -> bool:
    """Whether `read_locally` was called of this module."""
    return hasattr(type(module), _MARK)


def wrap_parts(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Wrap this rank's part of a tensor of a given shape."""
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(prod(shape[place + 1 :]) for place in range(len(shape))),
    )


def _tensor_names(module: nn.Module) -> Iterator[str]:
    for table in (module._parameters, module._buffers):
        yield from (name for name, tensor in table.items() if isinstance(tensor, DTensor))


@cache
def _subclass(cls: Any, mixin: Any, names: tuple[str, ...]) -> Any:
    properties = {name: property(_reader(cls, name), _writer(name)) for name in names}
    bases = (cls,) if mixin is None else (mixin, cls)
    # pickle and copy find a class by its name, and this one nowhere.
    made = {"__module__": cls.__module__, "__reduce_ex__": _reduce, _MARK: mixin}
    return type(cls.__name__, bases, {**made, **properties})


def _reduce(module: nn.Module, protocol: int) -> Any:
    cls = type(module)
    mixin = getattr(cls, _MARK)
    names = tuple(name for name, value in vars(cls).items() if isinstance(value, property))
    return _restore, (cls.__bases__[-1], mixin, names), module.__dict__


def _restore(cls: type, mixin: type | None, names: tuple[str, ...]) -> nn.Module:
    made = _subclass(cls, mixin, names)
    module: nn.Module = made.__new__(made)
    return module


def _reader(cls: Any, name: str) -> Any:
    gather = getattr(getattr(cls, name, None), "fget", None)

    def read(module: nn.Module) -> Tensor | None:
        tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
        if gather is not None:  # the class reads the weight in its own way: it is sharded
            tensor = gather(module)
        if not isinstance(tensor, DTensor):
            return tensor
        parts: list[Placement] = [Partial()] * tensor.device_mesh.ndim
        return tensor.to_local(grad_placements=parts)

    return read


def _writer(name: str) -> Any:
    def write(module: nn.Module, tensor: Tensor | None) -> None:
        table: Any = module._parameters if name in module._parameters else module._buffers
        table[name] = tensor

    return write
