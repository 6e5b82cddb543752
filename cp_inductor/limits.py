"""What a sequence-sharded attention may ask for; the rest is refused, never approximated."""

from __future__ import annotations

from torch import Tensor

from cp_inductor.errors import UnsupportedAttention

__all__ = ["check_attention"]


def check_attention(
    *, has_mask: bool, dropout_p: float, is_causal: bool, query: Tensor, key: Tensor, site: str
) -> None:
    """Refuse what no plan computes.

    Raises:
        UnsupportedAttention: a mask, dropout, causal over different lengths, or not 4 dims.
    """
    if query.ndim != 4 or key.ndim != 4:
        raise UnsupportedAttention(
            site=site,
            expected="query, key and value of shape (batch, heads, sequence, head dim)",
            got=f"{query.ndim} and {key.ndim} dims",
            remedy="unsqueeze the missing dims before the attention, and squeeze them after it",
        )
    if has_mask:
        raise UnsupportedAttention(
            site=site,
            expected="attn_mask=None",
            got="an attn_mask over a sharded sequence",
            remedy="use is_causal=True where the mask is causal, or keep this sequence whole",
        )
    if dropout_p:
        raise UnsupportedAttention(
            site=site,
            expected="dropout_p=0",
            got=f"dropout_p={dropout_p}",
            remedy="set the attention dropout to 0, or call model.eval() to evaluate",
        )
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedAttention(
            site=site,
            expected="as many queries as keys where is_causal=True",
            got=f"{query.shape[2]} queries and {key.shape[2]} keys",
            remedy="set is_causal=False for cross-attention, or pad the shorter sequence",
        )
