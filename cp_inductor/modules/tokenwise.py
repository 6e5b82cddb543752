"""Run modules that treat every token alone on the shards themselves, such as mixtures of experts.

    block(hidden (B, S, H) [Shard(1)]) -> out
      =>
    local = hidden.to_local()                        this rank's tokens
    weight = weight.to_local(grad_placements=[Partial()])
    out = from_local(block's own forward(local))     [Shard(1)]

DTensor has no sharding rules for the ops of experts (sorts, grouped products), or gathers all
tokens on every rank first. A rank's gradient of a weight is its part of the sum. A weight that none
of a rank's tokens meets, such as those of an expert, has a gradient of zeros there, and not None:
what adds up gradients over ranks would wait for one that a rank does not have.

The logits of a router may leave the block for the load-balancing loss, by a hook that records them.
Then they become a DTensor of all ranks' tokens, so that means over tokens are means over all of
them. Logits that nobody records stay this rank's.

Layers that torch's `parallelize_module` has split over another axis run on a rank's tokens as well:

    up(x (B, S, H) [Shard(1)] over cp)        weight (N, H): a DTensor [Shard(0)] over tp
      =>
    out = up(x.to_local())                    with the hooks of its style, which know tp alone
    from_local(out (B, S / cp, N / tp))       [Shard(1)] over cp

Between such layers the local part of a DTensor over cp is what the styles hand on as plain tensors:
some of the heads, or all features. Gradients of the weights stay DTensors over tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_inductor.dtensor.wrap import wrap_whole
from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.kept import cache
from cp_inductor.modules.mixers import (
    dims_of_tokens,
    drawing_alike,
    part_beside,
    shared_out,
    wrap_tokens,
)
from cp_inductor.modules.reading import (
    ReadsLocally,
    computing,
    computing_with,
    libraries,
    locally,
    read_locally,
    reading_now,
    reading_once,
)
from cp_inductor.modules.whole_batches import map_parts, tensors_of


class OnShards(ReadsLocally):
    """Computes on this rank's tokens.

    Attributes:
        keeps_routing: whether a tuple within a result stays this rank's.
    """

    keeps_routing = False

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take this rank's part of the arguments, and compute."""
        if isinstance(tokens, DTensor):
            args, kwargs = map_parts(lambda _, other: part_beside(other, tokens), (args, kwargs))
        return self.on_shards(super().forward, tokens, *args, **kwargs)

    def on_shards(self, method: Any, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a method for this rank's tokens."""
        if not isinstance(tokens, DTensor):
            return method(tokens, *args, **kwargs)
        placements = tokens.placements
        tokens = tokens.redistribute(placements=shared_out(tokens))
        local = tokens.to_local()
        # Dynamo (2.13) refuses it within a checkpoint of activations.
        has_routers = any(isinstance(inner, _Router) for inner in self.modules())
        recorded = {"tokens": tokens} if has_routers and _is_recording_logits() else {}
        with computing_with(**recorded):
            if torch.compiler.is_compiling():  # one graph of all ranks
                result = locally(method, local, *args, **kwargs)
            else:
                with _calling_all(self), drawing_alike(self, tokens), reading_once(self) as weights:
                    result = locally(method, local, *args, **kwargs)
                parts = [*tensors_of((local, args, kwargs)), *weights]
                result = _with_all_gradients(result, local, parts)
        outs = [*result] if isinstance(result, tuple) else [result]
        outs[0] = _flat(outs[0], local, tokens)
        for place, out in enumerate(outs):
            if not self.keeps_routing or not isinstance(out, tuple):
                outs[place] = map_parts(
                    lambda _, part: _distributed(part, local, tokens, placements), out, is_ours=True
                )
        return tuple(outs) if isinstance(result, tuple) else outs[0]


class _Router(ReadsLocally):
    """Returns logits of all ranks' tokens, beside what the block needs of this rank's."""

    _cp_place_of_logits: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        tokens = computing().tokens
        if tokens is None or not isinstance(result, tuple) or not _is_recording_logits():
            return result
        outs, place = list(result), self._cp_place_of_logits
        outs[place] = _tokens_of_all(outs[place], tokens)
        return tuple(outs)


@cache
def router(place: int) -> type[ReadsLocally]:
    """Return a mixin for routers that return logits at a place of their result."""
    return type("Router", (_Router,), {"_cp_place_of_logits": place})


@contextmanager
def _calling_all(block: nn.Module) -> Iterator[None]:
    """Refuse that a block leaves out an expert that FSDP gathers by itself.

    The replicas gather modules in the order of their calls. If one leaves out what another calls,
    it gets parts of other weights, or all wait for ever.
    """
    inner = [one for one in block.modules() if isinstance(one, FSDPModule) and one is not block]
    called: set[int] = set()
    with ExitStack() as hooks:
        for one in inner:
            hook = one.register_forward_pre_hook(lambda module, _: called.add(id(module)))
            hooks.enter_context(hook)
        yield
    if len(called) < len(inner):
        raise UnsupportedPlacement(
            site=type(block).__name__,
            expected="that every module that fully_shard gathers by itself is called on every rank",
            got=f"{len(inner) - len(called)} of {len(inner)} that no token of this rank meets",
            remedy="call fully_shard on the block that holds the experts, and not on each of them",
        )


def _with_all_gradients(result: Any, local: Tensor, parts: Sequence[Tensor]) -> Any:
    """Return a result whose tensors of tokens depend on all that a module was given, and weights.

    A rank's tokens decide what each depends on, and the program which of them it uses. But all
    ranks must go the same way back.
    """
    dims = dims_of_tokens(local)
    outs = [
        out
        for place, out in enumerate(tensors_of(result))
        if out.is_floating_point() and not isinstance(out, DTensor)
        if place == 0 or out.shape[:dims] == local.shape[:dims]
    ]
    if not outs or not torch.is_grad_enabled():
        return result
    ends = {part.grad_fn for part in parts}
    nodes: set[Node] = set()
    pending = [out.grad_fn for out in outs]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [] if node in ends else [behind for behind, _ in node.next_functions]
    missing = [part for part in parts if part.requires_grad and part.grad_fn not in nodes]
    made = dict(zip(map(id, outs), _Together.apply(len(outs), *outs, *missing), strict=True))
    return map_parts(lambda _, out: made.get(id(out), out), result, is_ours=True)


class _Together(torch.autograd.Function):
    """Passes tensors on, so that a gradient of one is one of all, and zeros for others."""

    @staticmethod
    def forward(ctx: Any, num_outs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.like = [(one.shape, one.dtype, one.device) for one in tensors[num_outs:]]
        return tuple(out.view_as(out) for out in tensors[:num_outs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=d, device=where) for shape, d, where in ctx.like)
        return None, *grads, *zeros


def _flat(out: Any, local: Tensor, tokens: DTensor) -> Any:
    """Wrap the block's result, if it is (B * S, H) and its input is (B, S, H), as in Llama 4."""
    is_flat = isinstance(out, Tensor) and tokens.ndim == 3 and out.ndim == 2
    if not is_flat or out.shape != (local.shape[:2].numel(), tokens.shape[2]):
        return out
    return wrap_tokens(out.unflatten(0, local.shape[:2]), tokens).flatten(0, 1)


def _distributed(out: Any, local: Tensor, tokens: DTensor, placements: Sequence[Placement]) -> Any:
    """Wrap what was computed for this rank's tokens, (B, S, ...) or (B * S, ...)."""
    if not isinstance(out, Tensor) or isinstance(out, DTensor):
        return out
    dims = dims_of_tokens(tokens)
    if out.shape[:dims] == local.shape[:dims]:
        return wrap_tokens(out, tokens).redistribute(tokens.device_mesh, placements)
    return _tokens_of_all(out, tokens) if _is_recording_logits() else out


def _is_recording_logits() -> bool:
    return any(library.is_recording_logits() for library in libraries)


def _tokens_of_all(out: Tensor, tokens: DTensor) -> Tensor:
    """Gather (B * S, ...) of all ranks from that of this rank."""
    if tokens.ndim > 2:
        out = out.unflatten(0, tokens.to_local().shape[:2])
    mesh = tokens.device_mesh
    whole = wrap_tokens(out, tokens).redistribute(mesh, [Replicate()] * mesh.ndim)
    return whole.flatten(0, 1) if tokens.ndim > 2 else whole


def is_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether a style of torch has split a layer over another mesh."""
    is_layer = isinstance(module, (nn.Linear, nn.Embedding)) and _has_style(module)
    weight = module._parameters["weight"] if is_layer else None
    return isinstance(weight, DTensor) and weight.device_mesh != mesh


def check_styles(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse other styles beside these, such as SequenceParallel and PrepareModuleInput.

    Raises:
        UnsupportedPlacement: they hand on DTensors over their own mesh, or take them.
    """
    split = {module for module in model.modules() if is_tensor_parallel(module, mesh)}
    for name, module in model.named_modules() if split else ():
        if _has_style(module) and module not in split:
            raise _refused(name, f"a style for a {type(module).__name__}")


def run_beside_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make layers that are split over another mesh compute on this rank's tokens, in place."""
    for name, module in model.named_modules():
        if is_tensor_parallel(module, mesh):
            if isinstance(module, ReadsLocally):
                raise _refused(name, "one within a module that runs on a rank's own tokens")
            read_locally(module, _OnTokens, {})


def _has_style(module: nn.Module) -> bool:
    """Whether a style of `parallelize_module` prepares a module's inputs, or its outputs."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    places = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return any(place.startswith("torch.distributed.tensor") for place in places)


class _OnTokens(ReadsLocally):
    """Calls a layer, with its hooks, for this rank's tokens."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        reading = reading_now(self)
        if reading is None:
            return super().__call__(x, *args, **kwargs)
        if not isinstance(x, DTensor):
            x = wrap_whole(x, reading.mesh)
        mesh, placements, num_dims = x.device_mesh, x.placements, x.ndim - x.is_floating_point()
        if not num_dims:
            return self(x[None], *args, **kwargs)[0]
        parts = shared_out(x, num_dims)
        for part, ranks in zip(parts, mesh.shape, strict=True):
            size = x.shape[part.dim]
            # DTensor (2.13) views no empty part, on one rank alone.
            if size <= -(-size // ranks) * (ranks - 1):
                raise _refused(type(self).__name__, f"{size} tokens for {ranks} ranks")
        x = x.redistribute(mesh, parts)
        out: Tensor = locally(super().__call__, x.to_local(), *args, **kwargs)
        if isinstance(out, DTensor):
            raise _refused(type(self).__name__, "one that hands on DTensors")
        places = [p if type(p) is Shard else Replicate() for p in placements]
        return wrap_tokens(out, x, num_dims).redistribute(mesh, places)


def _refused(site: str, got: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site=site,
        expected="ColwiseParallel and RowwiseParallel, with plain tensors between them",
        got=got,
        remedy="leave this style out, or use context_parallel (docs/fsdp.md)",
    )
