"""Two runs give the same bits, forward and backward: nothing is added in the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor.ops.attention import attention
from cp_inductor.ops.plan_batch import plan_batch
from cp_inductor.plan.strategies import TABLE
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch
from tests.support.ranks import run_ranks
from tests.support.reference import make_qkv, shard

# In all of them, every rank sends and receives, and has several partials to combine.
WORLD, LENGTH, RUNS = 4, 101, 3
STRATEGIES = ("auto", *TABLE, "heads2+blocks")


def bits_of(tensors: Sequence[Tensor]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def leaves_of(rank: int) -> list[Tensor]:
    """Return query, key, value and the gradient of the output, of this rank."""
    whole = make_qkv(LENGTH, batch=1, num_heads=8, num_kv_heads=4)
    return [shard(tensor, rank, WORLD).clone() for tensor in whole]


def run_strategies(form: str, is_asked: bool) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    *leaves, grad_out = leaves_of(rank)
    for leaf in leaves:
        leaf.requires_grad_()
    torch.use_deterministic_algorithms(is_asked)
    try:
        for strategy in STRATEGIES:
            for is_causal in (True, False):
                torch._dynamo.reset()

                def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = is_causal) -> Tensor:
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=is_causal, enable_gqa=True
                    )

                call = attend if form == "eager" else torch.compile(attend, backend=form)
                found = set()
                buffer = torch.arange(LENGTH)
                with (
                    cp_inductor.config.patch(strategy=strategy),
                    cp_inductor.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
                ):
                    for run in range(RUNS):
                        if run == rank % RUNS:
                            torch.mm(torch.rand(300, 300), torch.rand(300, 300))  # late
                        out = call(*leaves)
                        grads = torch.autograd.grad(out, leaves, grad_out)
                        found.add(tuple(bits_of((out, *grads))))
                assert len(found) == 1, f"{strategy}, is_causal={is_causal}"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.parametrize(("form", "is_asked"), [("eager", False), ("cp_aot_eager", True)])
def test_every_strategy(form: str, is_asked: bool) -> None:
    run_ranks(WORLD, run_strategies, form, is_asked)


def run_batch_plan(stages: int, is_asked: bool) -> None:
    rule = "(k - q <= 0) & Eq(t0(b, k), t0(b, q))"
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    *leaves, grad_out = leaves_of(rank)
    for leaf in leaves:
        leaf.requires_grad_()
    tables = [(torch.arange(LENGTH) // 17)[None]]
    torch.use_deterministic_algorithms(is_asked)
    try:
        found = set()
        for _ in range(RUNS):
            lengths = (1, LENGTH, LENGTH, 8, 4, stages)
            sizes, numbers = plan_batch(tables, rule, *lengths, torch.device("cpu"), name)
            this = Attention(PerBatch(rule, stages), ANY_RANK, None, "flash_cpu", name)
            out, _ = attention(*leaves, [*tables, sizes, numbers], *this.arguments)
            found.add(tuple(bits_of((out, *torch.autograd.grad(out, leaves, grad_out)))))
        assert len(found) == 1
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "is_asked"), [(1, False), (3, True)])
def test_plans_at_run_time(stages: int, is_asked: bool) -> None:
    run_ranks(WORLD, run_batch_plan, stages, is_asked)
