"""What regions write into a graph while Dynamo traces it, for the passes to read.

with local_attention(): sdpa(q, k, v)           node.meta["custom"] has LEFT_ALONE
with per_rank(): x.roll(1)                      node.meta["custom"] has PER_RANK
ContextParallel's module                        node.meta["custom"] has IN_REGION
with context_parallel(mesh): checkpoint(f, x)   checkpoint(f, in_region(x, group, rank, ...))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.sequence.rules.elements import pointwise
from cp_inductor.sequence.rules.table import RULES

# The custom metadata of an attention that is left alone on purpose.
LEFT_ALONE = {"cp_inductor": "local_attention"}

# The custom metadata of what each rank computes within its own shard on purpose.
PER_RANK = {"cp_inductor": "per_rank"}

# The custom metadata of what runs in a region that the graph begins: the group of its ranks. Around
# a graph, only a mode says that there is a region.
IN_REGION = "cp_inductor_region"


@torch.library.custom_op("cp_inductor::in_region", mutates_args=())
def _in_region(
    tensor: Tensor,
    group_name: str,
    rank: int,
    world_size: int,
    lengths: list[int],
) -> Tensor:
    """Mark an argument of the body of a higher-order op that is traced in a region.

    Dynamo (2.13 to 2.15) calls no mode while it traces such a body, as of a checkpoint or a branch.
    The query of flex_attention is marked as well. If it were a DTensor, the functions of
    flex_attention would have to compute with DTensors. A graph pass reads the mark and removes it.
    Only another backend runs this op.
    """
    raise UnsupportedAttention(
        site="flex_attention, torch.cond, while_loop or another higher-order op, in a"
        " context-parallel region",
        expected="a function compiled with backend='cp_inductor' or 'cp_aot_eager' around it",
        got="eager code, in which torch runs such an op with a backend of its own, or another"
        " backend; there attention would see only the local shard",
        remedy="compile the function that calls it with backend='cp_inductor'; or, instead of"
        " torch.cond and while_loop, write if and while in eager code",
    )


@_in_region.register_fake
def _(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(tensor)


_in_region.register_autograd(lambda ctx, grad: (grad, *[None] * 4))

MARK = torch.ops.cp_inductor.in_region.default
RULES[MARK] = pointwise
