"""Arguments of ops by name, and the kernels of SDPA, in order. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.nn.attention import SDPBackend

from cp_inductor.torch_private.modes import without_modes

OpOverload = torch._ops.OpOverload  # one of the ops of a name, by the types of its arguments

# In which SDPA tries them where nobody has said otherwise.
DEFAULT_ORDER = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.OVERRIDEABLE,
)


def sdpa_backends_at(node: fx.Node, *, with_priority: bool = False) -> list[SDPBackend] | None:
    """Return the kernels that `sdpa_kernel` enables at a node of a Dynamo graph; None without it.

    Dynamo records entering and leaving `sdpa_kernel` as calls of `_sdpa_kernel`
    (torch.nn.attention, 2.13-2.15) in the graph. While passes run, torch's switches are still those
    around the model, so they do not tell. The latest call says it; `with_priority`, the latest
    that says the order.
    """
    while node.op != "root":
        if node.op == "call_function" and node.target is torch.nn.attention._sdpa_kernel:
            names: Any
            names, has_priority = node.args
            if has_priority or not with_priority:
                return [name.target(*name.args) for name in names]
        node = node.prev
    return None


def sdpa_order(device: torch.device, capability: tuple[int, int] | None) -> list[SDPBackend]:
    """Return the kernels in the order in which SDPA tries them.

    `torch._C._get_sdp_priority_order` (2.13-2.15). On a GPU, SDPA sets the order when it chooses
    for the first time: cuDNN comes first on Hopper and Blackwell if it is newer than 9.15
    (`check_prefer_cudnn_attention`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), as it
    is in the wheels for CUDA 13. For a GPU that is not here the same holds.

    Args:
        device: of the tensors.
        capability: of a GPU that code is generated for, if it is not here.
    """
    is_here = device.type == "cuda" and torch.cuda.is_available()
    if is_here:
        with without_modes():
            tiny = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
            torch._fused_sdp_choice(tiny, tiny, tiny)
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    prefers_cudnn = capability is not None and capability[0] in (9, 10)
    if prefers_cudnn and not is_here and order == list(DEFAULT_ORDER):
        order = [SDPBackend.CUDNN_ATTENTION, *order]  # whose later place is never reached
    return order


def ops_that_write() -> list[OpOverload]:
    """Return the ops of ATen that write to an argument; `dir` has only those that were used."""
    schemas = torch._C._jit_get_all_schemas()
    names = [(s.name.split("::"), s.overload_name or "default") for s in schemas if s.is_mutable]
    return [getattr(getattr(torch.ops.aten, n), o) for (space, n), o in names if space == "aten"]


def tensors_written_by(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that a call of an op writes to, by the op's schema."""
    bound = bind_arguments(op, args, kwargs)
    names = (argument.name for argument in op._schema.arguments if argument.is_write)
    leaves = (leaf for name in names for leaf in pytree.tree_leaves(bound[name]))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def bind_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, with defaults, from its op's schema (2.13-2.15)."""
    arguments = op._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    return bound | dict(kwargs)
