"""What torch's own context parallelism is doing in this process.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.leaned_on import TORCHS_ATTENTION


def torchs_attention() -> Any:
    """Return the module of torch's context parallelism."""
    return import_module(TORCHS_ATTENTION)


@dataclass(frozen=True, slots=True)
class TorchsContextParallel:
    """What torch's own context parallelism is doing in this process.

    Attributes:
        is_around: its `context_parallel` has been entered, and has cut the buffers.
        has_shards: `_context_parallel_shard` was the last to cut something, at some time.
        is_dispatching: DTensor's attention on CUDA is its ring.
        is_balanced: what it has cut, and cuts, is permuted.
    """

    is_around: bool
    has_shards: bool
    is_dispatching: bool
    is_balanced: bool


def torchs_context_parallel() -> TorchsContextParallel:
    """Look what torch's own context parallelism is doing.

    All in torch.distributed.tensor.experimental._context_parallel._attention (read in 2.13):
    `context_parallel` puts a function of `_replaced_functions` in the place of
    scaled_dot_product_attention, `_context_parallel_shard` sets `_dispatch_mode` to MODULE_WRAPPER,
    and both set `_cp_options.enable_load_balance`, which says of the ring, too, what it computes.
    """
    module = torchs_attention()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    table = DTensor._op_dispatcher._custom_op_handlers
    return TorchsContextParallel(
        is_around=F.scaled_dot_product_attention in module._replaced_functions,
        has_shards=module._dispatch_mode is module._DispatchMode.MODULE_WRAPPER,
        is_dispatching=table.get(op) is module.custom_ops[op],
        is_balanced=bool(module._cp_options.enable_load_balance),
    )


@contextmanager
def torchs_load_balance(is_balanced: bool) -> Iterator[None]:
    """Tell torch's `context_parallel_unshard` what it is given inside: permuted shards, or not.

    `_cp_options.enable_load_balance` (torch.distributed.tensor.experimental._context_parallel, read
    in 2.13), which torch's own `context_parallel` sets, and sets back, in the same way.
    """
    options = torchs_attention()._cp_options
    before = options.enable_load_balance
    options.enable_load_balance = is_balanced
    try:
        yield
    finally:
        options.enable_load_balance = before


def order_of_balancer(load_balancer: Any) -> Tensor | None:
    """Return where each token of a sequence is among the shards that a balancer has permuted.

    `_LoadBalancer._generate_indices` (torch.distributed.tensor.experimental._context_parallel, read
    in 2.13): (1, S), or (B, S) where the entries of a batch differ; None where none has moved.
    """
    indices: Tensor | None = load_balancer._generate_indices(restore=True)
    return indices
