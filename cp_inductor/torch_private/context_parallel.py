"""Read and set the state of torch's own context parallelism in this process.

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.leaned_on import TORCHS_ATTENTION


def torchs_attention() -> Any:
    """Return the module of torch's context parallelism."""
    return import_module(TORCHS_ATTENTION)


@dataclass(frozen=True, slots=True)
class TorchsContextParallel:
    """The state of torch's own context parallelism in this process.

    Attributes:
        is_around: the caller is within torch's `context_parallel`, which has sharded its buffers.
        has_shards: the latest API of torch that sharded something is `_context_parallel_shard`.
        is_dispatching: DTensor computes attention on CUDA by torch's ring.
        is_balanced: shards are permuted to balance the work under a causal mask.
    """

    is_around: bool
    has_shards: bool
    is_dispatching: bool
    is_balanced: bool


def torchs_context_parallel() -> TorchsContextParallel:
    """Return the state of torch's own context parallelism.

    In torch.distributed.tensor.experimental._context_parallel._attention (read in 2.13):
    `context_parallel` replaces scaled_dot_product_attention by a function in
    `_replaced_functions`; `_context_parallel_shard` sets `_dispatch_mode` to MODULE_WRAPPER; both
    set `_cp_options.enable_load_balance`, which the ring reads, too.
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
    """Within this context, tell torch's `context_parallel_unshard` whether shards are permuted.

    Torch's own `context_parallel` sets and restores it in the same way (2.13).
    """
    options = torchs_attention()._cp_options
    before = options.enable_load_balance
    options.enable_load_balance = is_balanced
    try:
        yield
    finally:
        options.enable_load_balance = before
