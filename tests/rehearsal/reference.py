"""The same model on one process, in float64 and in its own dtypes, to hold a rehearsal against.

The model is called in eager code, over plain tensors: its attention is local. In its own dtypes
attention rounds where the kernels of a GPU do: probabilities, and gradients of scores, to half
types before they are multiplied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from cp_inductor.modules.reading import as_on_one_process
from tests.rehearsal.report import ROUNDING, Difference
from tests.rehearsal.stand_ins import StandIns
from tests.support.reference import full

Loss = Callable[[Any], Tensor]


def copy_of(model: Any) -> Any:
    """Return a copy of a module with whole, plain weights; every rank takes part."""
    if not isinstance(model, nn.Module):
        return model
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        whole = full(tensor.detach()).clone()
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = whole
    return copy.deepcopy(model, memo)


def run(
    model: Any, args: Any, kwargs: Any, of_user: Loss | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return outputs, loss and gradients by name, computed in a dtype, or in that of each."""

    def convert(tensor: Tensor) -> Tensor:
        new = tensor.detach().clone()
        if dtype is not None and new.is_floating_point():
            new = new.to(dtype)
        return new.requires_grad_(tensor.requires_grad)

    if isinstance(model, nn.Module):
        model = copy.deepcopy(model)
        model = model.to(dtype) if dtype is not None else model
    args, kwargs = pytree.tree_map_only(Tensor, convert, (args, kwargs))
    with as_on_one_process(), nullcontext() if dtype is not None else StandIns():
        outputs = model(*args, **kwargs)
        loss = loss_of(outputs, of_user)
        if loss is not None and loss.requires_grad:
            loss.backward()
    return named(outputs, loss, gradients_of(model, args, kwargs))


def compare(
    model: Any, args: Any, kwargs: Any, rehearsed: Mapping[str, Tensor], of_user: Loss | None
) -> tuple[dict[str, Difference], str]:
    """Return how far results are from those of one process, or why that is not known."""
    before = torch.get_rng_state()
    try:
        exact, own = (run(model, args, kwargs, of_user, one) for one in (torch.float64, None))
    except Exception as error:  # a model may do anything on one process
        said = next(iter(str(error).splitlines()), "")
        return {}, f"one process cannot run the model: {type(error).__name__}: {said}"
    if not torch.equal(before, torch.get_rng_state()):
        return {}, (
            "the model draws random numbers, and no two worlds draw the same; call eval(), or set"
            " the probability of dropout to 0"
        )
    differences = {}
    coarsest = _coarsest([*own.values(), *pytree.tree_leaves((args, kwargs))])
    for name in dict.fromkeys((*rehearsed, *exact)):
        value, truth = rehearsed.get(name), exact.get(name)
        if value is None or truth is None or value.shape != truth.shape:
            # One of them lacks it, such as a gradient, or has another shape.
            differences[name] = Difference(math.inf, 0.0, "missing or of another shape")
            continue
        # A number is as exact as what it is computed from, whatever its own dtype.
        of = coarsest if value.ndim == 0 else _dtype(own[name])
        differences[name] = Difference(distance(value, truth), distance(own[name], truth), of)
    return differences, "" if differences else "it returns no tensor"


def _coarsest(values: list[Any]) -> str:
    names = [_dtype(one) for one in values if isinstance(one, Tensor)]
    return max((name for name in names if name in ROUNDING), key=lambda name: ROUNDING[name])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return |a - b| / |b| over all elements; infinite if any differ in being finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if not actual.numel():
        return 0.0
    if (actual.isfinite() != expected.isfinite()).any():
        return float("inf")
    actual, expected = actual.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm or 1.0)


def named(outputs: Any, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return results by name: ``output 0``, ``loss``, ``gradient of qkv.weight``."""
    results = {f"output {number}": one for number, one in enumerate(_leaves(outputs))}
    if loss is not None:
        results["loss"] = loss
    return results | {f"gradient of {name}": grad for name, grad in gradients.items()}


def loss_of(outputs: Any, of_user: Loss | None) -> Tensor | None:
    """Return the loss: what the user says, a scalar output, or half the sum of squares."""
    if of_user is not None:
        return of_user(outputs)
    floating = [one for one in _leaves(outputs) if one.is_floating_point()]
    if not floating or floating[0].ndim == 0:
        return floating[0] if floating else None
    wide = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in floating)
    total: Any = sum(0.5 * (one**2).sum() for one in wide)
    return total


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


def _leaves(outputs: Any) -> list[Tensor]:
    """Return the tensors of outputs; those of transformers are dictionaries."""
    tree = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)]
