"""Number the tokens of packed documents by document, from where the documents begin.

cu_seqlens  0 3 3 7     T = 9
  =>
0 0 0 2 2 2 2 3 3
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def document_numbers(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the number of each token's document.

    Args:
        cu_seqlens: (N + 1,), where each document begins, and where the last ends; the same on all
            ranks, or a DTensor.
        length: T, tokens of the whole sequence. Those behind the last document are one more.

    Returns:
        (T,) int64, the same on all ranks.
    """
    whole = cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    positions = torch.arange(length, device=whole.device, dtype=whole.dtype)
    return torch.searchsorted(whole[1:].contiguous(), positions, right=True)
