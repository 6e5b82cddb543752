"""Let modules read this rank's plain tensors where they hold DTensors, while they compute.

    module.weight: DTensor [Replicate]  =>  module.weight: Tensor, whose gradient is Partial

Code that DTensor has no rules for then runs on plain tensors. What a rank computes with a weight is
its part: of its own tokens, or of its part of what it returns. So a rank's gradient is a part of
the sum, which `Partial` says.

Modules keep their parameters, names and hooks. Their class becomes a subclass, as in torch's
`parametrize` and `fully_shard`, in which reading a parameter returns the local one while the module
computes. Whoever reads it at another time, such as `get_parameter` or an initialisation, gets the
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

_MARK = "_cp_mixin"


class Reading:
    """Whether modules compute on plain tensors. All such modules of a model share one."""

    def __init__(self) -> None:
        self.is_local = False

    @staticmethod
    def of(model: nn.Module) -> Reading:
        """Return that of a model's modules, or a new one."""
        given = (vars(module).get("_cp_reading") for module in model.modules())
        return next((reading for reading in given if reading is not None), None) or Reading()

    def locally(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method, in which modules read local tensors."""
        before, self.is_local = self.is_local, True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_local = before


class ReadsLocally(nn.Module):
    """What `read_locally` adds to a module: a base of the mixins, and one itself.

    A module that is called with plain tensors alone is called by another that computes locally, or
    again by a checkpoint inside it.
    """

    # Until `read_locally` sets it, as in slices of an nn.Sequential, which hold no tensors.
    _cp_reading = Reading()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on what is given, and read weights as it is: local tensors, or DTensors."""
        if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)
        return self._cp_reading.locally(super().forward, *args, **kwargs)


def read_locally(module: nn.Module, mixin: type[nn.Module], reading: Reading) -> None:
    """Let a module, without those inside, read local tensors, and overrule methods by a mixin's.

    Args:
        module: changed in place.
        mixin: it overrules methods, and calls them within ``self._cp_reading.locally``.
        reading: that of its model.
    """
    cls: Any = type(module)
    methods: Any = mixin
    module.__class__ = _subclass(cls, methods, tuple(_tensor_names(module)))
    module._cp_reading = reading  # type: ignore[assignment]


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
    properties = {
        name: property(_reader(cls, name), _writer(name), _deleter(name)) for name in names
    }
    # pickle and copy find a class by its name, and this one nowhere.
    made = {"__module__": cls.__module__, "__reduce_ex__": _reduce, _MARK: mixin}
    return type(cls.__name__, (mixin, cls), {**made, **properties})


def _reduce(module: nn.Module, protocol: int) -> Any:
    cls = type(module)
    mixin = getattr(cls, _MARK)
    names = tuple(name for name, value in vars(cls).items() if isinstance(value, property))
    return _restore, (cls.__bases__[-1], mixin, names), module.__dict__


def _restore(cls: type, mixin: type, names: tuple[str, ...]) -> nn.Module:
    made = _subclass(cls, mixin, names)
    module: nn.Module = made.__new__(made)
    return module


def _reader(cls: Any, name: str) -> Any:
    # A class that reads the weight in its own way has it sharded, and gathers it.
    gather = getattr(getattr(cls, name, None), "fget", None)

    def read(module: Any) -> Any:
        tensor = gather(module) if gather is not None else _stored(module, name)
        if not module._cp_reading.is_local or not isinstance(tensor, DTensor):
            return tensor
        parts: list[Placement] = [Partial()] * tensor.device_mesh.ndim
        return tensor.to_local(grad_placements=parts)

    return read


def _stored(module: nn.Module, name: str) -> Any:
    for table in (module._parameters, module._buffers, module.__dict__):
        if name in table:
            return table[name]
    raise AttributeError(name)  # deleted: torch's own error follows


def _writer(name: str) -> Any:
    # Parameters and buffers are written by nn.Module; this is what comes after one was deleted.
    def write(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value

    return write


def _deleter(name: str) -> Any:
    def delete(module: nn.Module) -> None:
        if name not in module.__dict__:
            raise AttributeError(name)
        del module.__dict__[name]

    return delete
