"""Ranks compare their models before one of them hands out its weights.

    rank 0: q.weight, k.weight        rank 1: k.weight, q.weight
      => RanksDisagree on both: module 1: q (Linear): weight float32 [4, 4] on rank 0, k ...

Weights are handed out one by one, in the order of the modules. If models differ, a rank takes one
weight for another, waits for ever, or aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_inductor.trust.agreement import agree_once
from cp_inductor.trust.record import Entry


def agree_on_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    site: str,
    with_meta: bool,
    check: Callable[[], None],
) -> None:
    """Compare the modules of a model, their parameters and buffers, on all ranks of a mesh.

    Names, classes, shapes, dtypes, ties, what requires or has a gradient, and what is distributed
    must be the same. Values are not compared, nor whether modules are in training.

    Args:
        model: this rank's.
        mesh: of any number of axes.
        site: for errors.
        with_meta: whether the same tensors must be on "meta" on all ranks.
        check: refuses models. If one rank refuses, the others raise as well.

    Raises:
        RanksDisagree: a rank has another model, or did not come.
        ProcessGroupError: the store does not answer.
    """
    groups = [str(mesh.get_group(axis).group_name) for axis in range(mesh.ndim)]

    def describe() -> Entry:
        check()
        known: dict[int, str] = {}
        modules = [_describe(name, one, known, with_meta) for name, one in model.named_modules()]
        fields = {f"module {number}": text for number, text in enumerate(modules)}
        remedy = "build the same model on every rank, from one configuration; values may differ"
        what = {"what": "a model", "modules": str(len(modules))}
        return Entry(site, {**what, **fields}, ("modules",), remedy)

    agree_once(groups, describe)


def _describe(name: str, module: nn.Module, known: dict[int, str], with_meta: bool) -> str:
    """Name a module, and what it holds itself."""
    held = []
    for table, kind in ((module._parameters, ""), (module._buffers, "buffer ")):
        for key, tensor in table.items():
            if tensor is not None:
                first = known.setdefault(id(tensor), f"{name}.{key}")
                what = " ".join(_words(tensor, with_meta))
                held.append(f"{kind}{key} {what if first == f'{name}.{key}' else f'is {first}'}")
    return f"{name or 'the model'} ({type(module).__qualname__}): {', '.join(held) or 'no tensor'}"


def _words(tensor: Tensor, with_meta: bool) -> Iterator[str]:
    yield f"{_dtype(tensor)} {list(tensor.shape)}"
    if isinstance(tensor, DTensor):
        yield f"distributed as {tensor.placements}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        yield "frozen"
    if with_meta and tensor.is_meta:
        yield "on meta"
    if tensor.grad is not None:
        yield f"with a gradient, {_dtype(tensor.grad)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
