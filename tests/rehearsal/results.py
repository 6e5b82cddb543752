"""What a model returns: its numbers by name, its loss, its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

Loss = Callable[[Any], Tensor]


def named(outputs: Any, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return results by name: ``output 0``, ``loss``, ``gradient of qkv.weight``."""
    leaves = [one for one in pytree.tree_leaves(_as_tree(outputs)) if isinstance(one, Tensor)]
    results = {f"output {number}": one for number, one in enumerate(leaves)}
    if loss is not None:
        results["loss"] = loss
    return results | {f"gradient of {name}": grad for name, grad in gradients.items()}


def loss_of(outputs: Any, of_user: Loss | None) -> Tensor | None:
    """Return the loss: what the user says, a scalar output, or half the sum of squares."""
    if of_user is not None:
        return of_user(outputs)
    floating = [
        one
        for one in pytree.tree_leaves(_as_tree(outputs))
        if isinstance(one, Tensor) and one.is_floating_point()
    ]
    if not floating:
        return None
    if is_scalar(outputs):
        return floating[0]
    total: Any = sum(0.5 * (one.to(_wide(one)) ** 2).sum() for one in floating)
    return total


def is_scalar(outputs: Any) -> bool:
    """Whether the first floating output is a scalar, such as a loss."""
    for one in pytree.tree_leaves(_as_tree(outputs)):
        if isinstance(one, Tensor) and one.is_floating_point():
            return one.ndim == 0
    return False


def gradients_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all gradients by name."""
    named: dict[str, Tensor] = {}
    if isinstance(model, nn.Module):
        named.update(model.named_parameters())
    for path, leaf in pytree.tree_leaves_with_path({"args": tuple(args), "kwargs": dict(kwargs)}):
        if isinstance(leaf, Tensor):
            key = pytree.keystr(path)
            named[key.replace("['args']", "args").replace("['kwargs']", "args")] = leaf
    return {name: one.grad for name, one in named.items() if one.grad is not None}


def sequence_dim(tensor: Tensor) -> int | None:
    """Return the sequence dim of a plain shard; None if it has none, as a loss has.

    It is that of scaled_dot_product_attention, 2 of (B, H, S, D), or 1.
    """
    dim = 2 if tensor.ndim == 4 else 1
    return dim if tensor.ndim > dim else None


def _as_tree(outputs: Any) -> Any:
    """Return outputs of transformers, which are dictionaries, as such."""
    return dict(outputs) if isinstance(outputs, Mapping) else outputs


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
