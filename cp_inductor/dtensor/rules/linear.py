"""Run linear layers on a batch of more than one where DTensor cannot: torch 2.11, 2.12.

    F.linear(x (B, S, H) [Shard(1)], weight, bias)
      =>
    bmm(x, weight.T for every entry of the batch) + bias          [Shard(1)]

`F.linear` flattens batch and sequence into one dim. DTensor of torch 2.11 has no placement for the
result, and raises "Attempted to flatten multiple dimensions". Later releases have one
(`_StridedShard`), which 2.12 does not redistribute in a graph. To be removed when 2.12 is no longer
supported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.torch_private.dtensor import flattens_shards


def let_linear_layers_take_batches(model: nn.Module) -> None:
    """Make the linear layers of a model take sharded sequences, in place, if they do not."""
    if flattens_shards():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = LinearOfBatches


class LinearOfBatches(nn.Linear):
    """A linear layer that keeps batch and sequence apart."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply each entry of the batch, where the sequence is sharded."""
        if not isinstance(input, DTensor) or input.ndim != 3 or Shard(1) not in input.placements:
            return super().forward(input)
        weights = self.weight.t().expand(input.shape[0], -1, -1)
        product = torch.bmm(input, weights)
        return product if self.bias is None else product + self.bias
