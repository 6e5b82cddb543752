"""Run layers that torch's `parallelize_module` has split over another axis on a rank's own tokens.

    up(x (B, S, H) [Shard(1)] over cp)        weight (N, H): a DTensor [Shard(0)] over tp
      =>
    out = up(x.to_local())                    with the hooks of its style, which know tp alone
    from_local(out (B, S / cp, N / tp))       [Shard(1)] over cp

A linear layer or an embedding treats every token alone. So between layers a DTensor over cp has,
as its local part, what the styles hand on as a plain tensor: some of the heads, or all features.
Gradients of the weights stay DTensors over tp, and are summed over cp where weights are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.reading import (
    ReadsLocally,
    locally,
    read_locally,
    reading_now,
    reads_locally,
)
from cp_inductor.modules.whole import shared_out, wrap_tokens


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
            if reads_locally(module):
                raise _refused(name, "one within a module that runs on a rank's own tokens")
            read_locally(module, _OnTokens)


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
            x = reading.replicate(x)
        mesh, given, num_dims = x.device_mesh, x.placements, x.ndim - x.is_floating_point()
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
        places = [p if type(p) is Shard else Replicate() for p in given]
        return wrap_tokens(out, x, num_dims).redistribute(mesh, places)


def _refused(site: str, got: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site=site,
        expected="ColwiseParallel and RowwiseParallel, with plain tensors between them",
        got=got,
        remedy="leave this style out, or use context_parallel (docs/fsdp.md)",
    )
