"""Check what a sequence-sharded attention asks for: the rest is refused, never approximated."""

from __future__ import annotations

from torch import Tensor

from cp_inductor.errors import UnsupportedAttention


def check_attention(*, query: Tensor, key: Tensor, site: str) -> None:
    """Refuse an attention that no plan computes.

    Raises:
        UnsupportedAttention: query or key does not have 4 dims, or their batch sizes differ.
    """
    if query.ndim != 4 or key.ndim != 4:
        raise UnsupportedAttention(
            site=site,
            expected="query, key and value of shape (batch, heads, sequence, head dim)",
            got=f"a query of {query.ndim} and a key of {key.ndim} dims",
            remedy="unsqueeze the missing dims before the attention, and squeeze them after it",
        )
    if query.shape[0] != key.shape[0]:
        raise UnsupportedAttention(
            site=site,
            expected="equal batch sizes of query and key",
            got=f"{query.shape[0]} and {key.shape[0]}",
            remedy="expand the smaller batch before the attention",
        )
