"""The op that plans a batch: once per batch and rule, on the host, for all layers that share it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.batches.plans import HashedTables, copy_numbers, numbers_of
from cp_inductor.ops.rules_of_lengths import check_lengths
from cp_inductor.run.tables import layout_of
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import new_size
from cp_inductor.trust.agreement import compare_tables
from cp_inductor.trust.claims import name_tables


@torch.library.custom_op("cp_inductor::plan_batch", mutates_args=())
def plan_batch(
    tables: list[Tensor],
    rule: str,
    batch: int,
    query_length: int,
    key_length: int,
    num_heads: int,
    num_kv_heads: int,
    stages: int,
    device: torch.device,
    group_name: str,
    mask: str = "",
    nodes: str = "",
) -> tuple[Tensor, Tensor]:
    """Plan a batch, and return this rank's part of the plan as numbers.

    Args:
        tables: of the rule, whole, the same on all ranks of the group.
        rule: its text.
        batch: B, batch entries.
        query_length, key_length: S and T, tokens of the whole sequence, which ranks hold as
            torch.chunk cuts them.
        num_heads, num_kv_heads: H and G.
        stages: that fetch.
        device: of the attention.
        group_name: c10d name of the process group.
        mask: its name, if the rule was read at other lengths than these may be; see
            `cp_inductor.ops.rules_of_lengths`.
        nodes: that ranks share, as `cp_inductor.plan.batch_nodes.Nodes` writes them; "" for none.

    Returns:
        sizes, on the CPU, and numbers, on the device; see
        `cp_inductor.plan.batch_tables.RankTables`. Both int64.
    """
    if mask:
        check_lengths(mask, (query_length, key_length))
    group = group_of(group_name)
    # Ranks with other tables would make other plans, and wait for what nobody sends.
    site = f"the plan of a batch under {rule}"
    compare_tables(group_name, name_tables(tables), f"batches under {rule}", site)
    found = numbers_of(
        HashedTables.of(tables),
        rule,
        batch,
        (query_length, key_length),
        (num_heads, num_kv_heads),
        stages,
        dist.get_world_size(group),
        dist.get_rank(group),
        nodes,
    )
    return torch.from_numpy(found.sizes).clone(), copy_numbers(found, device)


@plan_batch.register_fake
def _(tables: list[Tensor], *how: Any) -> tuple[Tensor, Tensor]:
    stages, device, group_name = how[6:9]
    layout = layout_of(stages, group_name)
    length = new_size(2)
    sizes = torch.empty(layout.num_sizes, dtype=torch.int64, device="cpu")
    return sizes, torch.empty(length, dtype=torch.int64, device=device)


PLAN_BATCH: Any = torch.ops.cp_inductor.plan_batch.default
