"""What a sequence-sharded attention may ask for; the rest is refused, never approximated."""

from __future__ import annotations

from torch import Tensor

from cp_inductor.errors import UnsupportedAttention

__all__ = ["check_attention"]


def check_attention(*, query: Tensor, key: Tensor, site: str) -> None:
    """Refuse what no plan computes.

    Raises:
        UnsupportedAttention: not 4 dims.
    """
    if query.ndim != 4 or key.ndim != 4:
        raise UnsupportedAttention(
            site=site,
            expected="query, key and value of shape (batch, heads, sequence, head dim)",
            got=f"{query.ndim} and {key.ndim} dims",
            remedy="unsqueeze the missing dims before the attention, and squeeze them after it",
        )
