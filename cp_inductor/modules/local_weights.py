"""Let modules read this rank's plain tensors where they hold DTensors, while they compute.

    module.weight: DTensor [Replicate]  =>  module.weight: Tensor, whose gradient is Partial

Code that DTensor has no rules for then runs on plain tensors. A rank uses a weight for its own
tokens only, so its gradient is a part of the sum. `Partial` says so.

Modules keep their parameters, names and hooks. Their class becomes a subclass, as in torch's
`parametrize` and `fully_shard`, in which reading a parameter returns the local one while the module
computes. Whoever reads it at another time, such as `get_parameter` or an initialisation, gets the
parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.kept import cache
from cp_inductor.torch_private.checkpoint import is_recomputing
from cp_inductor.torch_private.dynamo import are_gradients_reduced

_MARK = "_cp_mixin"


class Computing:
    """Which of such modules a thread is computing now.

    Attributes:
        is_local: whether modules now read local tensors (True) or parameters (False); None if no
            such module runs.
        tokens: the input of a mixture of experts, if the logits of its routers are recorded.
        sequence: of which such a module has this rank's tokens, if it passes states between ranks:
            a `SharedSequence`.
        questions: how often anybody has asked for it.
        is_in_form: whether a function runs that a form calls to compute this rank's tokens.
    """

    # In slots: Dynamo (2.13) loses what is assigned to other attributes after a flex_attention, if
    # they were also assigned to before it.
    __slots__ = ("is_in_form", "is_local", "questions", "sequence", "tokens")

    is_local: bool | None
    tokens: DTensor | None
    sequence: Any
    questions: int
    is_in_form: bool

    def __init__(self) -> None:
        self.is_local = None
        self.tokens = None
        self.sequence = None
        self.questions = 0
        self.is_in_form = False


class _Threads(threading.local):
    def __init__(self) -> None:  # in every thread that asks
        self.computing = Computing()


_threads = _Threads()


def computing() -> Computing:
    """Return what this thread is computing."""
    found: Computing = _threads.computing
    return found


def locally(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method; modules that run inside read local tensors."""
    return _reading(True, method, args, kwargs)


def _reading(
    is_local: bool, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    here = computing()
    before, here.is_local = here.is_local, is_local
    try:
        return method(*args, **kwargs)
    finally:
        here.is_local = before


class ReadsLocally(nn.Module):
    """What `read_locally` adds to a module: a base of the mixins, and one itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Read what the module around this one reads. The outermost decides by its arguments.

        If all its arguments are plain tensors, a checkpoint within a module is recomputing it.
        """
        if computing().is_local is not None:
            return super().forward(*args, **kwargs)
        is_local = not any(isinstance(value, DTensor) for value in (*args, *kwargs.values()))
        return _reading(is_local, super().forward, args, kwargs)


def read_locally(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Let a module read local tensors, and override its methods. Modules inside it do not change.

    Args:
        module: changed in place.
        mixin: has the new methods, which call the old ones `locally`.
    """
    cls: Any = type(module)
    methods: Any = mixin
    module.__class__ = _subclass(cls, methods, tuple(_tensor_names(module)))


def reads_locally(module: nn.Module) -> bool:
    """Whether `read_locally` was called of this module."""
    return hasattr(type(module), _MARK)


def check_weights(module: nn.Module) -> None:
    """Refuse weights that came into a module after `distribute`.

    The gradient of a plain weight is only a rank's part of the sum, unless DDP or `fully_shard`
    sums gradients over ranks. DTensors under new names are not read as local tensors.

    Raises:
        UnsupportedPlacement: there are such weights.
    """
    for inner in module.modules():
        for name, weight in inner._parameters.items():
            if weight is None:
                continue
            if isinstance(weight, DTensor):
                is_right = hasattr(type(inner), name)
            else:
                is_right = not (weight.requires_grad and torch.is_grad_enabled())
            if not is_right:
                _refuse(
                    name, isinstance(weight, DTensor), type(inner).__name__, type(module).__name__
                )


# Dynamo calls it while it traces, and raises what it raises.
@torch.compiler.assume_constant_result
def _refuse(name: str, is_distributed: bool, inner: str, outer: str) -> None:
    if is_distributed:
        got = "a DTensor under a new name, which this module does not read as a local tensor"
    elif are_gradients_reduced():
        return
    else:
        got = "a plain weight, whose gradient would be that of this rank's tokens alone"
    raise UnsupportedPlacement(
        site=f"{name} of {inner} in {outer}",
        expected="weights as DTensors that distribute has made in it",
        got=got,
        remedy="add adapters and the like before cp_inductor.distribute(model, mesh)",
    )


def _tensor_names(module: nn.Module) -> Iterator[str]:
    # Also names whose value is None, which may be set later, and what hooks set, as in weight_norm.
    yield from (*module._parameters, *module._buffers)
    yield from (name for name, value in vars(module).items() if isinstance(value, Tensor))


@cache
def _subclass(cls: Any, mixin: Any, names: tuple[str, ...]) -> Any:
    properties = {
        name: property(_reader(cls, name), _writer(name), _deleter(name)) for name in names
    }
    # pickle and copy look classes up by name, and this class has no place of its own.
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
    # A class with a property of this name holds the weight sharded, and gathers it.
    gather = getattr(getattr(cls, name, None), "fget", None)

    def read(module: Any) -> Any:
        tensor = gather(module) if gather is not None else _stored(module, name)
        if not isinstance(tensor, DTensor) or not _is_local():
            return tensor
        mesh = tensor.device_mesh
        if not all(place.is_replicate() for place in tensor.placements):
            # As by tensor parallelism. The module reads the whole.
            tensor = tensor.redistribute(mesh, [Replicate()] * mesh.ndim)
        parts: list[Placement] = [Partial()] * mesh.ndim
        return tensor.to_local(grad_placements=parts)

    return read


def _is_local() -> bool:
    # A checkpoint may recompute a function of a module without calling the module.
    here = computing().is_local
    return is_recomputing() if here is None else here


def _stored(module: nn.Module, name: str) -> Any:
    if name in module._parameters:
        return module._parameters[name]
    if name in module._buffers:
        return module._buffers[name]
    if name in module.__dict__:
        return module.__dict__[name]
    raise AttributeError(name)  # deleted: torch's own error follows


def _writer(name: str) -> Any:
    # nn.Module writes parameters and buffers itself. It calls this after one was deleted.
    def write(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value

    return write


def _deleter(name: str) -> Any:
    def delete(module: nn.Module) -> None:
        if name not in module.__dict__:
            raise AttributeError(name)
        del module.__dict__[name]

    return delete
