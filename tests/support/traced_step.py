"""A training step of plain tensors, as lists of graph passes are given it: traced by make_fx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as attend

import cp_inductor
from tests.support.ranks import world_mesh

HEADS, DIM = 2, 8


def step(tokens: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two layers of attention, their loss, and the gradients of their weights."""
    hidden = tokens
    for weight in weights:
        parts = (hidden @ weight).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        out = attend(*parts, is_causal=True)
        hidden = hidden + out.transpose(1, 2).flatten(-2)
    loss = hidden.square().sum()
    return loss, *torch.autograd.grad(loss, weights)


def count(gm: fx.GraphModule, targets: Any) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def trace_step() -> tuple[fx.GraphModule, Tensor, list[Tensor], tuple[Tensor, ...]]:
    """Return the graph of the step over this rank's tokens, which are given as well as the weights.

    Last is what the step returns for all tokens on one process.
    """
    generator, width = torch.Generator().manual_seed(0), HEADS * DIM
    tokens = torch.randn(2, 8 * dist.get_world_size(), width, generator=generator)
    weights = [torch.randn(width, 3 * width, generator=generator) / 4 for _ in range(2)]
    weights = [weight.requires_grad_() for weight in weights]
    shard = tokens.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()
    with cp_inductor.context_parallel(world_mesh()):
        gm = make_fx(step, tracing_mode="fake")(shard, weights)
    return gm, shard, weights, step(tokens, weights)


def assert_sums(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that what the ranks return adds up to what one process does."""
    for actual, right in zip(found, expected, strict=True):
        total = actual.detach().clone()
        dist.all_reduce(total)
        assert (total - right).abs().max() <= 1e-5 * right.abs().max()
