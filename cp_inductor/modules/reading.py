"""Let the modules of a model read their plain tensors as DTensors, while the model runs.

    module.weight      an nn.Parameter (N, K), outside of a run
    module.weight      a DTensor [Replicate] of it, within a run; its gradient is summed over ranks
    module.weight      that DTensor's own tensor, whose gradient is this rank's part of the sum,
                       within a module that computes on a rank's own tokens

Modules keep their parameters, names and hooks: state dicts, optimizers and whoever else looks at
the parameters see those of one process. Their class becomes a subclass, as in torch's `parametrize`
and `fully_shard`, with a property for each tensor.

What a checkpoint recomputes runs outside of the run, and reads as within.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cp_inductor.kept import cache
from cp_inductor.modules.weights import Options
from cp_inductor.torch_private.checkpoint import is_recomputing, rerun_within

# What classes made here have beside their methods: how their tensors are read.
READING = "_cp_reading"
PART = "_cp_part_"  # before the name of an attribute: whether it was written as a rank's part


# In slots: Dynamo (2.13) loses what is assigned to other attributes after a flex_attention, if they
# were also assigned to before it.
@dataclass(slots=True)
class Computing:
    """What a thread is computing now."""

    # Whether a parallelized model runs (True), or runs on its plain weights, as on one process
    # (False); None if none runs.
    is_running: bool | None = None
    # Whether modules now read local tensors (True) or DTensors (False); None if no module runs that
    # computes on a rank's own tokens.
    is_local: bool | None = None
    # The input of a mixture of experts, if the logits of its routers are recorded.
    tokens: DTensor | None = None
    # sequence: of which such a module has this rank's tokens, if it passes states between ranks: a
    # `SharedSequence`.
    sequence: Any = None
    questions: int = 0  # how often it has been asked for
    # Whether a function runs that a form calls to compute this rank's tokens.
    is_in_form: bool = False
    # Whether a checkpoint recomputes here whose forward was outside of a run.
    is_alone: bool = False
    # Attributes that were set to tensors in a module that computes on the whole sequence.
    left: list[tuple[nn.Module, str]] | None = None
    # The parameters that modules have read since `reading_once`, by module and name.
    weights: dict[tuple[int, str], Tensor] | None = None


class _Threads(threading.local):
    def __init__(self) -> None:  # in every thread that asks
        self.computing = Computing()


_threads = _Threads()


def computing() -> Computing:
    """Return what this thread is computing."""
    here: Computing = _threads.computing
    return here


@contextmanager
def computing_with(**values: Any) -> Iterator[Computing]:
    """Within this context, attributes of what this thread is computing have other values."""
    here = computing()
    before = {name: getattr(here, name) for name in values}
    for name, value in values.items():
        setattr(here, name, value)
    try:
        yield here
    finally:
        for name, value in before.items():
            setattr(here, name, value)


@dataclass
class ComputingAgain:
    """A `computing_with` for checkpoints that recompute, which may be entered several times."""

    values: dict[str, Any]
    entered: list[Any] = field(default_factory=list, compare=False)

    def __enter__(self) -> None:
        self.entered.append(computing_with(**self.values))
        self.entered[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        self.entered.pop().__exit__(*error)


def as_on_one_process() -> AbstractContextManager[Any]:
    """Return a context in which parallelized models run on plain weights, each rank by itself."""
    return computing_with(is_running=False)


def locally(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method for a DTensor's tokens; modules that run inside read local tensors."""
    is_running = computing().is_running is not False  # None: called by itself, not by its model
    with computing_with(is_running=is_running, is_local=True):
        return method(*args, **kwargs)


@contextmanager
def reading_once(block: nn.Module) -> Iterator[list[Tensor]]:
    """Have a block's weights read at once, in one order, whichever of them a rank's tokens need.

    A weight may be gathered where it is read, and its gradient is summed there. So all ranks do so
    for all weights, in the same order. What `fully_shard` gathers by itself is whole only later,
    and is not among those that are returned, nor is what is a DTensor over other ranks.
    """
    known = computing().weights
    with computing_with(weights={} if known is None else known):
        apart = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
        later = {inner for outer in apart for inner in outer.modules()}
        modules = [module for module in block.modules() if module not in later]
        read = [locally(getattr, module, name) for module in modules for name in module._parameters]
        yield [item for item in read if isinstance(item, Tensor) and not isinstance(item, DTensor)]


class ReadsLocally(nn.Module):
    """What `read_locally` adds to a module: a base of the mixins, and one itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Read what the module around this one reads. The outermost decides by its arguments.

        If all its arguments are plain tensors, a checkpoint within a module is recomputing it.
        """
        if computing().is_local is not None:
            return super().forward(*args, **kwargs)
        is_local = not any(isinstance(value, DTensor) for value in (*args, *kwargs.values()))
        with computing_with(is_local=is_local):
            return super().forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Local:
    """How a module computes on plain tensors, in a model that computes on DTensors."""

    # What `read_locally` adds to the module: `OnWhole` computes on all tokens, `OnOwnTokens` and
    # `OnShards` on a rank's own.
    mixin: type[ReadsLocally]
    # What it adds to modules inside it, by their class, if not `ReadsLocally`.
    inner: Mapping[type, type[ReadsLocally]] = field(default_factory=dict)
    # Forms of functions that pass states, by the names under which the module calls them, beside
    # what `recurrences` knows.
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


# Files of `integrations/`, each of which describes a library of models, without importing it:
#   adapt(model)             changes a model that reads DTensors from now on, before it runs
#   find_local(module)       returns the `Local` of one that treats tokens alone, or mixes them
#   find_routers(model)      returns classes of routers whose logits are recorded, with their place
#                            in the result; the hooks that record them are installed afterwards
#   is_recording_logits()    whether they are recorded in the forward that runs now
libraries: list[ModuleType] = []


def read_as_dtensors(module: nn.Module, reading: Options) -> None:
    """Let a module read its tensors as DTensors while its model runs.

    A second call does the same for tensors that came into the module since the first.
    """
    cls: Any = type(module)
    stored = (*module._parameters, *module._buffers)  # also None, which may be set later
    names = tuple(name for name in stored if not isinstance(getattr(cls, name, None), property))
    if names or reading_of(module) is None:
        module.__class__ = _subclass(cls, None, names, reading)


def read_locally(
    outer: nn.Module, mixin: type[ReadsLocally], inner: Mapping[type, type[ReadsLocally]]
) -> None:
    """Let a module, and those inside it that do not do so yet, read local tensors.

    Its mixin overrides its methods; so do those of `inner`, by the classes of modules inside it.
    """
    for module in outer.modules():
        cls: Any = type(module)
        if issubclass(cls, ReadsLocally):
            continue
        # Where its weight is sharded, the class is a subclass of that of a router.
        known = (inner[base] for base in cls.__mro__ if base in inner)
        methods: Any = mixin if module is outer else next(known, ReadsLocally)
        # Also what hooks set, as in weight_norm.
        held = (name for name, value in vars(module).items() if isinstance(value, Tensor))
        names = tuple(dict.fromkeys((*module._parameters, *module._buffers, *held)))
        module.__class__ = _subclass(cls, methods, names, reading_of(module))


def reading_of(module: nn.Module) -> Options | None:
    """Return how a module reads its tensors; None if it is of no parallelized model."""
    reading: Options | None = getattr(type(module), READING, None)
    return reading


def reading_now(module: nn.Module) -> Options | None:
    """Return how a module now reads its tensors; None if it reads them as on one process."""
    is_running = computing().is_running
    return reading_of(module) if (_is_rerun() if is_running is None else is_running) else None


def _is_rerun() -> bool:
    """Whether a checkpoint recomputes, outside of the run, what ran within."""
    here = computing()
    if is_recomputing():
        return not here.is_alone
    if here.is_running is None and not torch.compiler.is_compiling():
        rerun_within(ComputingAgain({"is_alone": True}))
    return False


@cache
def _subclass(
    cls: Any, mixin: Any, names: tuple[str, ...], reading: Options | None
) -> type[nn.Module]:
    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if name in module._buffers and isinstance(value, DTensor) and reading_now(module):
            value = value.full_tensor()  # self.count = self.count + 1: it stays plain
        left = computing().left if isinstance(value, Tensor) else None
        if left is not None and not any(module is known and name == at for known, at in left):
            left.append((module, name))
        cls.__setattr__(module, name, value)

    def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # As those who sum their squares in a forward ask for them.
        reading = reading_now(module)
        for name, parameter in cls.named_parameters(module, *args, **kwargs):
            yield name, parameter if reading is None else reading.as_dtensor(parameter)

    def parameters(module: nn.Module, recurse: bool = True) -> Iterator[Any]:
        for _, parameter in module.named_parameters(recurse=recurse):
            yield parameter

    def reduce(module: nn.Module, protocol: int) -> Any:
        return _new, (class_of(module),), _state_of(module)

    def copy_deeply(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        copied: Any = memo.setdefault(id(module), _new(type(module)))
        copied.__setstate__(copy.deepcopy(_state_of(module), memo))
        return cast("nn.Module", copied)

    bases = (cls,) if mixin is None else (mixin, cls)
    is_local = any(issubclass(base, ReadsLocally) for base in bases)
    # pickle looks classes up by name, and this class has no place of its own.
    special = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__setattr__": set_attribute,
        "named_parameters": named_parameters,
        "parameters": parameters,
        "__reduce_ex__": reduce,
        "__deepcopy__": copy_deeply,
        READING: reading,
    }
    properties = {name: _property(name, reading, is_local) for name in names}
    made: type[nn.Module] = type(cls.__name__, bases, {**special, **properties})
    return made


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before any of this, as which it is pickled."""
    classes: tuple[Any, ...] = type(module).__mro__
    return next(c for c in classes if READING not in vars(c) and not issubclass(c, ReadsLocally))


def _state_of(module: nn.Module) -> Any:
    """Return what a module is pickled by: its attributes, or what its class says."""
    return object.__reduce_ex__(module, 2)[2]


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _property(name: str, reading: Options | None, is_local: bool) -> property:
    # Dynamo traces this for every weight: what most modules need comes first, and no call is made
    # for what the class knows.
    def read(module: nn.Module) -> Any:
        parameters = module._parameters
        tensor = parameters[name] if name in parameters else _stored_beside(module, name)
        if not isinstance(tensor, Tensor):
            return tensor
        here = _threads.computing
        # It may recompute a function of a module without calling the module.
        if is_local and (_is_rerun() if here.is_local is None else here.is_local):
            return _local_part(module, name, tensor)
        if not (_is_rerun() if here.is_running is None else here.is_running):
            return tensor
        # A class may have learned later of what its model is a part.
        now = reading_of(module) if reading is None else reading
        return tensor if now is None else now.as_dtensor(tensor)

    # nn.Module writes parameters and buffers itself. It calls these after one was deleted.
    def write(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value
        # Hooks, as of `nn.utils.weight_norm`, compute it of what they read: it is a part already.
        module.__dict__[PART + name] = computing().is_local

    def delete(module: nn.Module) -> None:
        if name not in module.__dict__:
            raise AttributeError(name)
        del module.__dict__[name]

    return property(read, write, delete)


def _local_part(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a module that computes on a rank's own tokens; its gradient is a part."""
    here = computing()
    if module.__dict__.get(PART + name) and name in module.__dict__:
        return tensor
    is_weight = here.is_local and name in module._parameters
    known = here.weights if is_weight else None  # buffers may change within a block
    if known is not None and (id(module), name) in known:
        return known[id(module), name]
    own, reading = reading_of(module), reading_now(module)
    whole = tensor if reading is None else reading.as_dtensor(tensor)
    is_beside = own is not None and own.is_beside(tensor)
    if is_beside or not isinstance(whole, DTensor):
        return whole
    mesh = whole.device_mesh
    if not all(place.is_replicate() for place in whole.placements):
        # As by tensor parallelism. The module reads the whole.
        whole = whole.redistribute(mesh, [Replicate()] * mesh.ndim)
    parts: list[Placement] = [Partial()] * mesh.ndim
    local: Tensor = whole.to_local(grad_placements=parts)
    if known is not None:
        known[id(module), name] = local
    return local


def _stored_beside(module: nn.Module, name: str) -> Any:
    """Return what a module stores under a name that no parameter has."""
    if name in module._buffers:
        return module._buffers[name]
    if name in module.__dict__:
        return module.__dict__[name]
    raise AttributeError(name)  # deleted: torch's own error follows
