"""Find the arguments of an op's call by name, and the kernels that `sdpa_kernel` enables.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend


def sdpa_backends_at(node: fx.Node) -> list[SDPBackend] | None:
    """Return the kernels that `sdpa_kernel` enables at a node of a Dynamo graph; None without it.

    Dynamo records entering and leaving `sdpa_kernel` as calls of `_sdpa_kernel`
    (torch.nn.attention, 2.11-2.15) in the graph. While passes run, torch's switches are still those
    around the model, so they do not tell.
    """
    while node.op != "root":
        if node.op == "call_function" and node.target is torch.nn.attention._sdpa_kernel:
            names: Any = node.args[0]
            return [name.target(*name.args) for name in names]
        node = node.prev
    return None


def bind_arguments(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, from the schema of its op.

    `OpOverload._schema` (torch._ops, 2.11-2.15).
    """
    arguments = op._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    return bound | dict(kwargs)
