"""Sum gradients of plain parameters over the ranks that share a sequence.

    rank 0: the gradient of its tokens       rank 1: the gradient of its tokens
      =>  on both: the sum, in the dtype of the gradient

    weight.grad, bias.grad, ...  =>  one buffer of up to 32 MiB  =>  all_reduce  =>  back

One all_reduce of five numbers first tells whether all ranks are about to reduce the same
parameters. Only if they are not, ranks compare the parameters one by one, to name the difference.

A gradient that is a sum already would be summed again, P times too large, and what a backward has
added to it cannot be told from it. So a sum is noted, and refused if it is still in the gradient:

    sum G  =>  zero_grad()        =>  backward: N      =>  summed
    sum G  =>                         backward: G + N  =>  refused
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.kept import on_reset
from cp_inductor.torch_private.groups import mesh_axis_ranks, ranks_that_reduce
from cp_inductor.trust.agreement import agree_once
from cp_inductor.trust.record import Entry

SITE = "reduce_gradients"
BUCKET_BYTES = 32 << 20
MOST_NAMED = 4  # parameters, by an error


@torch.no_grad()
def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum gradients of plain parameters over the ranks that share a sequence, in place.

        with cp_inductor.context_parallel(mesh["cp"], buffers=[ids, labels], ...):
            (loss_of(model(ids), labels) / world_size).backward()
        cp_inductor.reduce_gradients(model, mesh["cp"])
        optimizer.step()

    Every rank calls it, once per optimizer step, after the last backward. It is a sum: divide the
    loss by the number of ranks if it is a mean over a rank's own tokens. A gradient that it has
    summed is zeroed, by `zero_grad()`, before the next backward.

    Parameters whose gradients are already reduced over these ranks are left alone: DTensors on a
    mesh that contains the ranks, such as those of FSDP2, and parameters in
    modules that DistributedDataParallel or FSDP wraps with a group that contains them. If a DTensor
    is on other axes, such as that of tensor parallelism, each rank's part is summed. Tied weights
    are summed once. If some ranks have no gradient of a parameter, it counts as zero there, and
    they get the sum as well; if none has one, there is none afterwards.

    Args:
        model: with the same parameters that require a gradient on every rank, of any dtype.
        mesh: 1-D, the ranks that share a sequence.

    Raises:
        UnsupportedPlacement: the mesh is not 1-D; a gradient is sparse on some rank, or holds what
            was summed before; or whoever reduces a parameter does so over a part of these ranks.
        RanksDisagree: ranks have other parameters.
    """
    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise UnsupportedPlacement(
            site=SITE,
            expected="an nn.Module and a 1-D DeviceMesh",
            got=f"a {type(model).__name__} and a {type(mesh).__name__}"
            + (f" of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else ""),
            remedy='name the axis that shards the sequence, as in mesh["cp"]',
        )
    parameters = dict(_unreduced(model, frozenset(mesh_axis_ranks(mesh, 0))))
    if _compare(parameters, mesh):
        _fill(parameters, mesh)
    grads = [held_by_rank(p.grad) for p in parameters.values() if p.grad is not None]
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=mesh.get_group())
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
    for parameter in parameters.values():
        if parameter.grad is not None:
            _note_sum(parameter, mesh.get_group().group_name)


def _unreduced(model: nn.Module, ranks: frozenset[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters whose gradients nobody sums over some ranks, with their names."""
    wrapped: dict[int, frozenset[int]] = {}
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            reducing = ranks_that_reduce(module)
            wrapped |= {id(parameter): reducing for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        over = wrapped.get(id(parameter), frozenset())
        if isinstance(parameter, DTensor):
            over |= frozenset(parameter.device_mesh.mesh.flatten().tolist())
        common = over & ranks
        if common != ranks and len(common) > 1:
            raise UnsupportedPlacement(
                site=name,
                expected=f"a gradient that is reduced over all of the ranks {sorted(ranks)} that"
                " share a sequence, or over none of them",
                got=f"one that is reduced over {sorted(common)}",
                remedy="wrap the model with a group, or a mesh, of all of them",
            )
        if parameter.requires_grad and common != ranks:
            yield name, parameter


def _compare(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> bool:
    """Return whether any rank lacks a gradient; refuse what `reduce_gradients` cannot sum."""
    texts = [f"{name}: {p.dtype} {list(held_by_rank(p).shape)}" for name, p in parameters.items()]
    digest = int.from_bytes(hashlib.sha256(repr(texts).encode()).digest()[:7], "big")
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    sparse = [name for name, g in grads.items() if held_by_rank(g).layout != torch.strided]
    group, summed = mesh.get_group(), {n: _sums[p] for n, p in parameters.items() if p in _sums}
    sums = {name: known.is_left(group.group_name) for name, known in summed.items()}
    said = [digest, -digest, len(grads) < len(parameters), bool(sparse), False]
    most = torch.tensor(said, dtype=torch.int64, device=mesh.device_type)
    for is_left in sums.values():
        most[-1] |= is_left
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    greatest, least, is_missing, is_sparse, is_sum = most.tolist()
    if greatest != -least:
        fields = {"what": "parameters to reduce", "parameters": str(len(texts))}
        fields |= {f"parameter {number}": text for number, text in enumerate(texts)}
        remedy = "build the same model on every rank, and freeze the same parameters"
        entry = Entry(SITE, fields, ("parameters",), remedy)
        agree_once([str(group.group_name)], lambda: entry)
    if is_sparse:
        raise UnsupportedPlacement(
            site=", ".join(sparse) or SITE,
            expected="dense gradients on all ranks",
            got="sparse ones" if sparse else "sparse ones on another rank",
            remedy="use nn.Embedding with sparse=False",
        )
    if is_sum:
        named = [name for name, is_left in sums.items() if is_left]
        raise UnsupportedPlacement(
            site=", ".join(named[:MOST_NAMED]) or SITE,
            expected="gradients of each rank's own tokens",
            got="gradients that hold what reduce_gradients summed before"
            + ("" if named else ", on another rank"),
            remedy="call it once per optimizer step, after the last backward, and zero_grad()"
            " behind the step",
        )
    return bool(is_missing)


class _Sum:
    """A gradient that is a sum, until a backward finds that it was zeroed or replaced."""

    def __init__(self, parameter: nn.Parameter, group_names: frozenset[str]) -> None:
        assert parameter.grad is not None
        self.parameter, self.grad = TensorWeakRef(parameter), TensorWeakRef(parameter.grad)
        self.group_names = group_names
        self.is_untouched, self.was_left = True, torch.tensor(True)
        self.handle = parameter.register_hook(self.look)

    @unserializable_hook
    def look(self, _: Tensor) -> None:
        """Look at the gradient before a backward adds to it."""
        self.is_untouched, self.was_left = False, self.was_left & self._is_nonzero()

    def is_left(self, group_name: str) -> Tensor:
        """Return whether the sum is in a gradient that is to be summed over a group."""
        if self.is_untouched and group_name not in self.group_names:
            return torch.tensor(False)
        return self.was_left & self._is_nonzero()

    def _is_nonzero(self) -> Tensor:
        grad = self.parameter().grad
        is_same = grad is not None and grad is self.grad()
        return held_by_rank(grad).any() if is_same else torch.tensor(False)


_sums: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()


def _note_sum(parameter: nn.Parameter, group_name: str) -> None:
    names = frozenset((group_name,))
    if parameter in _sums:
        last = _sums[parameter]
        last.handle.remove()
        is_same = last.is_untouched and last.grad() is parameter.grad
        if is_same and group_name not in last.group_names:  # zeros, otherwise
            names |= last.group_names
    _sums[parameter] = _Sum(parameter, names)


@on_reset
def _forget_sums() -> None:
    while _sums:
        _sums.popitem()[1].handle.remove()


def _fill(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Make gradients of zeros where another rank has a gradient."""
    has_grad = [p.grad is not None for p in parameters.values()]
    of_any = torch.tensor(has_grad, dtype=torch.int32, device=mesh.device_type)
    dist.all_reduce(of_any, dist.ReduceOp.MAX, group=mesh.get_group())
    for parameter, is_there in zip(parameters.values(), of_any.tolist(), strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype and device, in their order, until a bucket is full."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        bucket = by_kind.setdefault((grad.dtype, grad.device), [])
        bucket.append(grad)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
            yield by_kind.pop((grad.dtype, grad.device))
    yield from by_kind.values()
