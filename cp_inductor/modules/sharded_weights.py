"""Store the weights of a model in shards, as FSDP does, and gather each where it is read.

    linear.weight (N, K), whole     linear.weight: a DTensor [Shard(0)] over all ranks, which the
                                =>  optimizer trains
    F.linear(x, linear.weight)      F.linear(x, gathered): a DTensor [Replicate] over the ranks of
                                    the sequence

A rank's gradient of a weight is of its own tokens. It is summed over the ranks of a sequence, and
averaged over those with other batches, as it is scattered back to shards: one reduce-scatter.

Weights are gathered by reading them, not by hooks as in `fully_shard`. Hooks break the graph at
each layer, and a mask that is computed before the first layer would then reach the others as a
tensor of all pairs. Without hooks the model is one graph, in which the compiler reads its masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from cp_inductor.errors import UnsupportedPlacement, UntiedWeights
from cp_inductor.modules.reading import scale_gradient
from cp_inductor.modules.ties import share_elements


@dataclass(frozen=True)
class ShardedWeights:
    """How the parameters of a model are stored and gathered.

    Attributes:
        mesh: 1-D, over which they are sharded: the ranks of the sequence, or these and those with
            other batches.
        param_dtype: in which floating-point parameters are gathered; None leaves theirs.
        reduce_dtype: in which their gradients are summed; None is the parameter's own.
        is_float32: whether shards of parameters that are trained are float32, whatever they were.
        is_offloaded: whether shards are in the host's memory, and so their gradients and the states
            of their optimizer; each is copied to the device when it is gathered.
    """

    mesh: DeviceMesh
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    is_float32: bool = False
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
        together: dict[int, list[tuple[str, Tensor]]] = {}  # by the address of their memory
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.numel():
                continue
            others = together.setdefault(tensor.untyped_storage().data_ptr(), [])
            for known, other in others:
                is_trained = any(isinstance(one, nn.Parameter) for one in (tensor, other))
                if is_trained and share_elements(tensor, other):
                    raise UntiedWeights(
                        site=f"{known} and {name}",
                        expected="one tensor under both names, or two with separate memory",
                        got="two that share memory, which shards would not",
                        remedy="make them one (b.weight = a.weight), or clone one of them",
                    )
            others.append((name, tensor))

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
        placements: list[Placement] = [Shard(0) if whole.ndim else Replicate()]
        if whole.is_meta:
            whole = torch.empty_like(whole, device=self.mesh.device_type)
        shard: Tensor = distribute_tensor(whole.contiguous(), self.mesh, placements)
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
