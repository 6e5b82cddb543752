"""The op that plans a batch: once per batch and rule, on the host, for all layers that share it.

    arange(s0) < 512        at 300 tokens, all keys; at 600 tokens, not all

A graph whose lengths are symbols computes with the rule of one length. Before it plans for another,
its mask is read there, once per length and process; if it is another rule there, the call is
refused. Graphs find their mask by its name, in whichever process they were compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.batches.plans import HashedTables, copy_numbers, numbers_of
from cp_inductor.errors import UnsupportedAttention
from cp_inductor.kept import lru_cache
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
        query_length, key_length: tokens of the whole sequence, which ranks hold as torch.chunk cuts
            them.
        stages: that fetch.
        group_name: c10d name of the process group.
        mask: its name for `remember_mask`, if the rule was read at other lengths than these may be.
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

# --- Lengths for which a rule holds -------------------------------------------------------------

# Masks that are remembered; the oldest are forgotten. Lengths that are remembered of all.
NUM_MASKS, NUM_LENGTHS = 256, 4096

REMEDY = "compile with dynamic=False: then each length has a graph of its own"


class _Mask(NamedTuple):
    site: str
    holds: Callable[[int, int], bool]
    lengths: tuple[int, int]


_masks: dict[str, _Mask] = {}


def remember_mask(
    name: str, site: str, holds: Callable[[int, int], bool], lengths: tuple[int, int]
) -> None:
    """Remember a mask of a graph that is compiled.

    It was read for these lengths of queries and keys; its rule holds for others if `holds` says so.
    """
    known = _masks.pop(name, None)
    _masks[name] = _Mask(site, holds, lengths if known is None else known.lengths)
    if len(_masks) > NUM_MASKS:
        del _masks[next(iter(_masks))]


@lru_cache(maxsize=NUM_LENGTHS)
def check_lengths(name: str, lengths: tuple[int, int]) -> None:
    """Check that the rule of a mask holds for the lengths of a call.

    Raises:
        UnsupportedAttention: it does not, or that cannot be known.
    """
    mask = _masks.get(name)
    if mask is None:
        raise UnsupportedAttention(
            site="an attention under a mask, in a graph with lengths that change",
            expected="a mask that this process has traced, so that it can be read at each length",
            got=f"a graph of another process, or one of the oldest of {NUM_MASKS}",
            remedy=REMEDY,
        )
    if lengths == mask.lengths:
        return
    # In a thread of its own, which has no modes: graphs call this below autograd, where the same
    # functions are other ops. It was read above it.
    with ThreadPoolExecutor(1, thread_name_prefix="cp_inductor_lengths") as thread:
        holds = thread.submit(mask.holds, *lengths).result()
    if not holds:
        raise UnsupportedAttention(
            site=mask.site,
            expected=f"a mask that is the same function of indices at all lengths, as of"
            f" {mask.lengths[0]} queries and {mask.lengths[1]} keys, for which it was compiled",
            got=f"another one at {lengths[0]} queries and {lengths[1]} keys",
            remedy=REMEDY,
        )
