"""Try what torch does where no name and no text of its sources would tell.

Each probe takes milliseconds, and returns what is other than this package expects; None if nothing
is. `doctor` and tests/backend/test_torch_private.py run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cp_inductor.torch_private.checkpoint import checkpoints_around
from cp_inductor.torch_private.leaned_on import BOTH_MASKS, TRANSFORMED


class _WithoutSetup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _mask_both_ways() -> None:
    x = torch.ones(1, 1, 2, 2)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x, torch.zeros(2, 2), is_causal=True)


def _message_of(call: Callable[[], object], text: str) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return None if text in str(error) else f"the error says {str(error)!r}, not {text!r}"
    return f"no error, where one said {text!r}"


def _find_checkpoint(*, is_reentrant: bool) -> str | None:
    """Try whether a checkpoint is found from within: by local variables of torch's frames."""
    counts: list[int] = []

    def block(x: Tensor) -> Tensor:
        counts.append(len(list(checkpoints_around())))
        return x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=is_reentrant)
    return None if counts == [1] else f"{counts} checkpoints are found from within one"


_under_vmap = partial(torch.vmap(_WithoutSetup.apply), torch.ones(2, 2))
PROBES: Mapping[str, Callable[[], str | None]] = {
    "attn_mask beside is_causal": partial(_message_of, _mask_both_ways, BOTH_MASKS),
    "autograd.Function under vmap": partial(_message_of, _under_vmap, TRANSFORMED),
    "a checkpoint": partial(_find_checkpoint, is_reentrant=False),
    "a reentrant checkpoint": partial(_find_checkpoint, is_reentrant=True),
}
