"""Weights of a model: read as DTensors, stored in shards, or tied by their memory.

    linear.weight (N, K), whole     linear.weight: a DTensor [Shard(0)] over all ranks, which the
                                =>  optimizer trains
    F.linear(x, linear.weight)      F.linear(x, gathered): a DTensor [Replicate] over the ranks of
                                    the sequence

A rank's gradient of a weight is of its own tokens. It is summed over the ranks of a sequence, and
averaged over those with other batches, as it is scattered back to shards: one reduce-scatter.
Weights are not gathered by hooks, as in `fully_shard`: these break the graph at each layer, and a
mask that is computed before the first layer would then reach the others as a tensor of all pairs.

    embedding(ids, weight_0); linear(x, weight_1)    two DTensors, one memory  =>  UntiedWeights

torch's `distribute_module` makes a new parameter for each name. On the CPU, and if the model was
already on the device, the two still share the memory that they were made from. That is never
intended, so it is refused. If the weights were copied to the device, only their values are equal,
which may be intended. For an embedding's table, a warning says so.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cp_inductor.dtensor.axis import is_first_rank
from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.errors import UnsupportedPlacement, UntiedWeights
from cp_inductor.kept import cache
from cp_inductor.torch_private.dtensor import with_version_of
from cp_inductor.torch_private.dynamo import graph_inputs

log = logging.getLogger("cp_inductor")

REMEDY = "call cp_inductor.parallelize(model, mesh), which keeps ties, not distribute_module"


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor, whose gradient is multiplied by a number on its way back."""
    scaled: Tensor = _ScaledGradient.apply(tensor, factor)
    return scaled


class _Read(torch.autograd.Function):  # which shares the version of what is stored
    @staticmethod
    def forward(ctx: Any, read: DTensor, stored: Tensor) -> DTensor:
        return with_version_of(stored, read)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


@dataclass(frozen=True)
class ShardedWeights:
    """How the parameters of a model are stored and gathered."""

    # 1-D, over which they are sharded: the ranks of the sequence, or these and those with other
    # batches.
    mesh: DeviceMesh
    # The dtype in which floating-point parameters are gathered; None leaves theirs.
    param_dtype: torch.dtype | None = None
    # The dtype in which their gradients are summed; None is the parameter's own.
    reduce_dtype: torch.dtype | None = None
    # Whether shards of parameters that are trained are float32, whatever they were.
    is_float32: bool = False
    # Whether shards are in the host's memory, and so their gradients and the states of their
    # optimizer; each is copied to the device when it is gathered.
    is_offloaded: bool = False

    def check(self, model: nn.Module) -> None:
        """Refuse parameters that are not plain.

        Raises:
            UnsupportedPlacement: a parameter is of a subclass, such as a DTensor, or has hooks.
            UntiedWeights: two share memory, which their shards would not.
        """
        for name, parameter in model.named_parameters():
            if type(parameter) is not nn.Parameter:
                raise UnsupportedPlacement(
                    site=name,
                    expected="a plain parameter, whose shards are to be stored",
                    got=f"a {type(parameter).__name__}",
                    remedy="leave out weights=, or pass a model that nothing has sharded or"
                    " quantized before",
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UnsupportedPlacement(
                    site=name,
                    expected="a parameter without hooks, as its shard would not have them",
                    got="hooks that somebody has registered",
                    remedy="register them after parallelize(..., weights=), on the shards",
                )
        together: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)  # by their memory
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.numel():
                together[tensor.untyped_storage().data_ptr()].append((name, tensor))
        pairs = (pair for named in together.values() for pair in combinations(named, 2))
        for (name, one), (other_name, other) in pairs:
            is_stored = isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter)
            if is_stored and _share_elements(one, other):
                raise UntiedWeights(
                    site=f"{name} and {other_name}",
                    expected="one tensor under both names, or two with separate memory",
                    got="two that share memory, which shards would not",
                    remedy="make them one (b.weight = a.weight), or clone one of them",
                )

    def shard(self, model: nn.Module) -> None:
        """Replace parameters by their shards, of the values of the first rank; ties stay.

        Parameters may be on "meta" on others than the first rank.
        """
        shards: dict[int, nn.Parameter] = {}
        # In the order of the modules, which is the same on every rank: each is a collective.
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    if id(parameter) not in shards:
                        shards[id(parameter)] = self._sharded(parameter)
                    module._parameters[key] = shards[id(parameter)]

    def _sharded(self, old: nn.Parameter) -> nn.Parameter:
        new = nn.Parameter(self._shard_of(old.detach(), old), requires_grad=old.requires_grad)
        new.grad = None if old.grad is None else self._shard_of(old.grad, old)
        for name, value in vars(old).items():
            setattr(new, name, value)
        return new

    def _shard_of(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        place = Shard(0) if whole.ndim else Replicate()
        if whole.is_meta:
            whole = torch.empty_like(whole, device=self.mesh.device_type)
        shard: Tensor = distribute_tensor(whole.contiguous(), self.mesh, [place])
        if self.is_float32 and parameter.requires_grad and whole.is_floating_point():
            shard = shard.float()
        return shard.cpu() if self.is_offloaded else shard

    def gather(self, weight: DTensor, sequence: DeviceMesh) -> DTensor:
        """Return a weight whole, over the ranks of a sequence; its gradient is their part."""
        is_cast = weight.is_floating_point()
        shard: Any = weight.to(self.mesh.device_type) if self.is_offloaded else weight
        gathered = shard.redistribute(
            placements=[Replicate()],
            forward_dtype=self.param_dtype if is_cast else None,
            backward_dtype=self.reduce_dtype if is_cast else None,
        )
        local = gathered.to_local(grad_placements=[Partial()])
        if weight.requires_grad and self.mesh.size() > sequence.size():
            local = scale_gradient(local, sequence.size() / self.mesh.size())
        return DTensor.from_local(
            local, sequence, [Replicate()], run_check=False, grad_placements=[Partial()]
        )


@dataclass(eq=False)
class Options:
    """How a model was parallelized, and so how its modules read their tensors while it runs."""

    # mesh, tokenwise, recurrent, whole, seq_dims, outputs, gradients: arguments of `parallelize`.
    mesh: DeviceMesh
    tokenwise: tuple[type[nn.Module], ...] = ()
    recurrent: tuple[type[nn.Module], ...] = ()
    whole: tuple[type[nn.Module], ...] = ()
    seq_dims: Mapping[str, int | None] = field(default_factory=dict)
    outputs: str = "sharded"
    weights: ShardedWeights | None = None  # how parameters are stored in shards; None leaves them
    gradients: str = "sum"

    @property
    def everybody(self) -> DeviceMesh:
        """Of the ranks that get the weights of the first."""
        return self.mesh if self.weights is None else self.weights.mesh

    def as_dtensor(self, tensor: Tensor) -> Tensor:
        """Return a DTensor, of what every rank has whole; over other ranks it stays on its mesh."""
        if isinstance(tensor, DTensor):
            if not self.is_beside(tensor):
                return tensor if self.weights is None else self.weights.gather(tensor, self.mesh)
            whole = cast("DTensor", self.as_dtensor(tensor.to_local()))
            local = whole.to_local(grad_placements=[Partial()] * self.mesh.ndim)
            read = wrap_parts(local, tensor.device_mesh, tensor.placements, tensor.shape)
        else:
            parts = None if self.gradients == "sum" else [Partial()] * self.mesh.ndim
            is_scaled = parts is not None and tensor.requires_grad
            own = scale_gradient(tensor, self.mesh.size()) if is_scaled else tensor
            places = [Replicate()] * self.mesh.ndim
            read = DTensor.from_local(
                own, self.mesh, places, run_check=False, grad_placements=parts
            )
        if torch.compiler.is_compiling() or tensor.is_inference() or read.is_inference():
            return read  # graphs compare versions themselves
        shared: DTensor = _Read.apply(read, tensor.detach())  # autograd sees writes to either
        return shared

    def is_beside(self, tensor: Tensor) -> bool:
        """Whether a tensor is a DTensor over other ranks, which is read as it is."""
        return (
            self.weights is None and isinstance(tensor, DTensor) and tensor.device_mesh != self.mesh
        )


def check_ties(graph: fx.Graph) -> None:
    """Refuse, or warn of, parameters of a Dynamo graph that were tied and no longer are.

    Without gradients nothing is checked: both parameters still have the same values. Neither are
    pairs of which none is trained.

    Raises:
        UntiedWeights: two parameters share memory.
    """
    if not torch.is_grad_enabled():
        return
    # Name, parameter, this rank's part of it, and whether an embedding looks up its rows.
    alike: defaultdict[Any, list[tuple[str, DTensor, Tensor, bool]]] = defaultdict(list)
    for node, name, value in graph_inputs(graph):
        if isinstance(value, DTensor) and isinstance(value, nn.Parameter):
            is_table = any(
                # F.embedding takes the table second, the op first.
                user.target in (F.embedding, torch.embedding)
                and node in (*user.args[:2], user.kwargs.get("weight"))
                for user in node.users
            )
            local = value.to_local().detach()
            key = (value.shape, value.dtype, value.placements, local.device)
            alike[key].append((name, value, local, is_table))
    pairs = (pair for weights in alike.values() for pair in combinations(weights, 2))
    for (name, tensor, local, is_table), (other_name, other, other_local, is_other_table) in pairs:
        if tensor is other or not (tensor.requires_grad or other.requires_grad):
            continue
        if _share_elements(local, other_local):
            raise UntiedWeights(
                site=f"{name} and {other_name}",
                expected="one parameter under both names",
                got="two that share memory: they were one before they were distributed, and"
                " each would get only a part of the gradient",
                remedy=REMEDY,
            )
        is_said = (is_table or is_other_table) and is_first_rank(tensor.device_mesh)
        if is_said and _is_alike(local, other_local):
            _warn(name, other_name)


def _share_elements(tensor: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors have an element in common, and not bytes of one storage alone.

    Interleaved parts of one tensor, such as its even and its odd columns, have none.
    """
    address = tensor.untyped_storage().data_ptr()
    # A tensor on "meta" has no address, nor has a weight that FSDP has freed.
    is_same = address != 0 and address == other.untyped_storage().data_ptr()
    return is_same and np.shares_memory(_where_elements_are(tensor), _where_elements_are(other))


def _where_elements_are(tensor: Tensor) -> np.ndarray:
    """Return an array at the address of a tensor, which may be a device's: nobody may read it."""
    size = tensor.element_size()
    interface = {
        **{"version": 3, "typestr": f"|V{size}", "data": (tensor.data_ptr(), True)},
        "shape": tuple(tensor.shape),
        "strides": tuple(size * stride for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, and not all the same number, as in initialized weights."""
    if tensor.is_meta or not tensor.numel() or not torch.equal(tensor, other):
        return False
    return bool((tensor != tensor.flatten()[0]).any())


@cache
def _warn(name: str, other: str) -> None:
    log.warning(
        "UntiedWeights: %s and %s are two parameters of equal values. If they were one before"
        " the model was distributed, each now gets only a part of the gradient, and they will"
        " train apart: %s. If they are separate weights, ignore this.",
        name,
        other,
        REMEDY,
    )
