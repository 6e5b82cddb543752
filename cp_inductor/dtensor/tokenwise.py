"""Run modules that treat every token alone on the shards themselves, such as mixtures of experts.

    block(hidden (B, S, H) [Shard(1)]) -> out
      =>
    local = hidden.to_local()                        this rank's tokens
    weight = weight.to_local(grad_placements=[Partial()])
    out = from_local(block's own forward(local))     [Shard(1)]

DTensor has no sharding rules for the ops of experts (sorts, grouped products), or gathers all
tokens on every rank first. Routing is per token, so a rank needs no other rank's tokens. A rank's
gradient of a weight is its part of the sum, which `Partial` says.

The logits of a router leave the block for the load-balancing loss, by a hook of transformers. There
they become a DTensor of all ranks' tokens, so that means over tokens are over all. Where
transformers records no logits, nothing reads them, and they stay this rank's.

Modules keep their parameters, names and hooks. Their class becomes a subclass, as in torch's
`parametrize` and `fully_shard`, in which reading a parameter returns the local one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_inductor.errors import UnsupportedPlacement

ROUTERS = ("gate", "router")


def run_on_shards(model: nn.Module, more: Sequence[type[nn.Module]] = ()) -> None:
    """Make the token-wise modules of a model compute on shards, in place.

    Args:
        model: whose parameters are DTensors.
        more: classes of token-wise modules, besides mixtures of experts of transformers. Their
            first argument is (B, S, ...) or (T, ...), and so are the tensors that they return.
    """
    _install_recorders(model)
    recorded = dict(_recorded_logits(model))
    for module in list(model.modules()):
        if isinstance(module, _OnShards):
            continue
        if not (isinstance(module, tuple(more)) or is_mixture_of_experts(module)):
            continue
        for inner in dict.fromkeys(module.modules()):
            place = recorded.get(type(inner))
            if place is not None and inner is not module:
                inner._cp_place_of_logits = place  # type: ignore[assignment]
                inner._cp_tokens = None  # type: ignore[assignment]
                mixin: Any = _Router
            else:
                mixin = _OnShards if inner is module else None
            cls: Any = type(inner)
            inner.__class__ = _subclass(cls, mixin, tuple(_tensor_names(inner)))


def is_mixture_of_experts(module: nn.Module) -> bool:
    """Whether a module is one of transformers: experts, and a router."""
    has_experts = isinstance(getattr(module, "experts", None), nn.Module)
    has_router = any(isinstance(getattr(module, name, None), nn.Module) for name in ROUTERS)
    return has_experts and has_router and type(module).__module__.startswith("transformers.models.")


def _install_recorders(model: nn.Module) -> None:
    """Let transformers install the hooks that record logits, now.

    It would install them in the first forward that is to return logits, under a lock, which Dynamo
    (2.13) does not trace.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is None:
        return
    for module in model.modules():
        if getattr(module, "_can_record_outputs", None) and hasattr(module, "config"):
            install(module)


def _recorded_logits(model: nn.Module) -> Iterator[tuple[type, int]]:
    """Yield the classes of which transformers records logits of routers, and the place in what
    they return.
    """
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        found = recorders.get("router_logits", ())
        for recorder in found if isinstance(found, (list, tuple)) else (found,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                yield target, getattr(recorder, "index", 0)


def _tensor_names(module: nn.Module) -> Iterator[str]:
    for table in (module._parameters, module._buffers):
        yield from (name for name, tensor in table.items() if isinstance(tensor, DTensor))


@cache
def _subclass(cls: Any, mixin: Any, names: tuple[str, ...]) -> Any:
    properties = {name: property(_reader(name), _writer(name)) for name in names}
    bases = (cls,) if mixin is None else (mixin, cls)
    # pickle and copy find a class by its name, and this one nowhere.
    made = {"__module__": cls.__module__, "__reduce_ex__": _reduce, **properties}
    return type(cls.__name__, bases, made)


def _reduce(module: nn.Module, protocol: int) -> Any:
    cls = type(module)
    mixin = next((base for base in (_OnShards, _Router) if base in cls.__bases__), None)
    names = tuple(name for name, value in vars(cls).items() if isinstance(value, property))
    return _restore, (cls.__bases__[-1], mixin, names), module.__dict__


def _restore(cls: type, mixin: type | None, names: tuple[str, ...]) -> nn.Module:
    made = _subclass(cls, mixin, names)
    module: nn.Module = made.__new__(made)
    return module


def _reader(name: str) -> Any:
    def read(module: nn.Module) -> Tensor | None:
        tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
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


class _OnShards(nn.Module):
    """Computes on this rank's tokens."""

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tokens, DTensor):
            raise UnsupportedPlacement(
                site=type(self).__name__,
                expected="tokens as a DTensor, as the weights are",
                got="a plain tensor",
                remedy="distribute the input of the model on the same mesh",
            )
        mesh, given = tokens.device_mesh, tokens.placements
        # Where ranks hold the same tokens, each takes a part, or each would have whole gradients.
        dims = 2 if tokens.ndim > 2 else 1
        placements = [p if _shards_token(p, dims) else Shard(dims - 1) for p in given]
        tokens = tokens.redistribute(mesh, placements)
        local = tokens.to_local()
        routers = [router for router in self.modules() if isinstance(router, _Router)]
        for router in routers:
            router._cp_tokens = tokens
        result = super().forward(local, *args, **kwargs)
        for router in routers:
            router._cp_tokens = None
        whole = result if isinstance(result, tuple) else (result,)
        outs = (_flat(whole[0], local, tokens), *whole[1:])
        outs = tuple(_distributed(out, local, tokens, given) for out in outs)
        return outs if isinstance(result, tuple) else outs[0]


class _Router(nn.Module):
    """Returns logits of all ranks' tokens, beside what the block needs of this rank's."""

    _cp_tokens: DTensor | None
    _cp_place_of_logits: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        tokens = self._cp_tokens
        if tokens is None or not isinstance(result, tuple) or not _records_logits():
            return result
        outs, place = list(result), self._cp_place_of_logits
        outs[place] = _tokens_of_all(outs[place], tokens)
        return tuple(outs)


def _shards_token(placement: Placement, dims: int) -> bool:
    return type(placement) is Shard and placement.dim < dims


def _flat(out: Any, local: Tensor, tokens: DTensor) -> Any:
    """Wrap the block's result, if it is (B * S, H) and its input is (B, S, H), as in Llama 4."""
    is_flat = isinstance(out, Tensor) and tokens.ndim == 3 and out.ndim == 2
    if not is_flat or out.shape != (local.shape[:2].numel(), tokens.shape[2]):
        return out
    return _wrapped(out.unflatten(0, local.shape[:2]), tokens).flatten(0, 1)


def _distributed(out: Any, local: Tensor, tokens: DTensor, placements: Sequence[Placement]) -> Any:
    """Wrap what was computed for this rank's tokens, (B, S, ...) or (B * S, ...)."""
    if not isinstance(out, Tensor) or isinstance(out, DTensor):
        return out
    dims = 2 if tokens.ndim > 2 else 1
    if out.shape[:dims] == local.shape[:dims]:
        return _wrapped(out, tokens).redistribute(tokens.device_mesh, placements)
    return _tokens_of_all(out, tokens) if _records_logits() else out


def _records_logits() -> bool:
    """Whether transformers records what routers return, in the forward that runs now.

    `_active_collector` of its output_capturing (5.23): by name, what is recorded. Without it, yes.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        return True
    return "router_logits" in (collector.get() or {})


def _tokens_of_all(out: Tensor, tokens: DTensor) -> Tensor:
    """Gather (B * S, ...) of all ranks from that of this rank."""
    if tokens.ndim > 2:
        out = out.unflatten(0, tokens.to_local().shape[:2])
    whole = _wrapped(out, tokens)
    whole = whole.redistribute(whole.device_mesh, [Replicate()] * whole.device_mesh.ndim)
    return whole.flatten(0, 1) if tokens.ndim > 2 else whole


def _wrapped(out: Tensor, tokens: DTensor) -> DTensor:
    """Wrap (B, S, ...), or (T, ...), of this rank's tokens."""
    dims = 2 if tokens.ndim > 2 else 1
    shape = (*tokens.shape[:dims], *out.shape[dims:])
    return DTensor.from_local(
        out.contiguous(),
        tokens.device_mesh,
        tokens.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(prod(shape[place + 1 :]) for place in range(len(shape))),
    )
