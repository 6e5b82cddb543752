"""Refuse a sequence that torch's load balancer may have permuted.

    torch's context_parallel and _context_parallel_shard, with a load balancer      refused
    the same without one, and cp_inductor.context_parallel                          in order

Ranks hold contiguous shards, in the order of the ranks. Nothing about a tensor tells the order of
its tokens, but torch leaves flags in the process when it shards. They are read when an attention is
planned, and whenever a compiled graph runs. `cp_inductor.context_parallel` shards its own buffers,
and clears torch's flag inside.

Not noticed: batches that a program has permuted itself.
"""

from __future__ import annotations

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.torch_private.context_parallel import torchs_context_parallel

REMEDY = (
    "pass load_balancer=None to torch's _context_parallel_shard, or set"
    " torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
    " before torch shards the batch, or use cp_inductor.context_parallel: plans balance the work"
)


def may_be_permuted() -> bool:
    """Whether torch's context parallelism has sharded something here, with its load balancer on."""
    torchs = torchs_context_parallel()
    return torchs.is_balanced and (torchs.is_around or torchs.has_shards)


def refuse_permuted(site: str, *, remedy: str = REMEDY) -> None:
    """Refuse shards that may not be in order.

    Raises:
        UnsupportedPlacement: torch's load balancer may have permuted them.
    """
    if may_be_permuted():
        raise UnsupportedPlacement(
            site=site,
            expected="contiguous shards of the sequence, in the order of the ranks",
            got="shards of torch's context parallelism, whose load balancer may have permuted them",
            remedy=remedy,
        )


def refuse_two_contexts(site: str) -> None:
    """Refuse to shard buffers within torch's own `context_parallel`.

    Raises:
        UnsupportedPlacement: the caller is within it.
    """
    if torchs_context_parallel().is_around:
        raise UnsupportedPlacement(
            site=site,
            expected="one context that shards the sequence",
            got="a region of this library and torch's context_parallel, nested",
            remedy="use only one of the two",
        )
