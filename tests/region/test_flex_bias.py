"""What a score_mod adds and learns: gradients of the tensors that it has captured.

Held against flex_attention of torch in float64 on one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import flex_gradients_on_cpu
from cp_inductor.ops.attention import attention_of
from tests.support.graphs import captured_graph
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import assert_all_close, assert_close, make_qkv, on_mesh, shard

AOT = "cp_aot_eager"
LENGTH, BATCH, HEADS, BUCKETS = 22, 2, 4, 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read in torch 2.13"),
]

SHAPES: dict[str, tuple[int, ...]] = {
    "slope": (HEADS,),
    "buckets": (BUCKETS, HEADS),
    "of pairs": (LENGTH, LENGTH),
    "of all": (BATCH, HEADS, LENGTH, LENGTH),
    "keys": (BATCH, LENGTH),
    "window": (2 * LENGTH - 1,),
}


def bucket(distance: Tensor) -> Tensor:
    """As T5 does it."""
    near = BUCKETS // 2
    far = near + (distance.clamp(min=1).float() / near).log() / math.log(LENGTH / near) * near
    return torch.where(distance < near, distance, far.long().clamp(max=BUCKETS - 1)).clamp(min=0)


# What becomes of a score s, by what is learned, t.
SCORES: dict[str, Callable[..., Tensor]] = {
    "slope": lambda t, s, b, h, q, k: s + t[h] * (k - q),
    "buckets": lambda t, s, b, h, q, k: t[bucket(q - k), h] + s,
    "of pairs": lambda t, s, b, h, q, k: s - t[q, k],
    "of all": lambda t, s, b, h, q, k: s + t[b, h, q, k],
    "keys": lambda t, s, b, h, q, k: s + torch.tanh(t[b, k]),
    "window": lambda t, s, b, h, q, k: torch.where(
        q - k < 7, s + t[q - k + LENGTH - 1], -float("inf")
    ),
}


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attends(nn.Module):
    """Attends with a bias that is learned."""

    def __init__(self, kind: str, dtype: torch.dtype, has_checkpoint: bool = False) -> None:
        super().__init__()
        self.kind, self.has_checkpoint = kind, has_checkpoint
        generator = torch.Generator().manual_seed(5)
        values = torch.randn(SHAPES[kind], generator=generator, dtype=torch.float64)
        self.learned = nn.Parameter(values.to(dtype))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend, under a causal mask but for one kind."""
        mask = None
        if self.kind != "of pairs":
            mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
        if self.has_checkpoint:
            args = (query, key, value, mask)
            out: Tensor = checkpoint(self.attend, *args, use_reentrant=False)
            return out
        return self.attend(query, key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None) -> Tensor:
        """Attend once."""
        change, learned = SCORES[self.kind], self.learned

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return change(learned, s, b, h, q, k)

        out: Any = flex_attention(query, key, value, score, mask, enable_gqa=True)
        return out


def qkv_of(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return make_qkv(LENGTH, dtype=dtype, num_heads=HEADS, num_kv_heads=2, batch=BATCH, head_dim=16)


def results(
    model: nn.Module, whole: tuple[Tensor, ...], region: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    """Return output, and gradients of query, key, value and what is learned."""
    with region or nullcontext():  # which has cut its buffers, and knows where their tokens are
        *leaves, grad_out = (tensor.detach().clone() for tensor in whole)
        for leaf in leaves:
            leaf.requires_grad_()
        out = model(*leaves)
    grads = torch.autograd.grad(out, [*leaves, *model.parameters()], grad_out)
    return [out.detach(), *grads]


# Parallelized, with weights that are plain or, on two axes, are not; or shards in a region or of a
# mesh, where what is learned is the same on every rank; or DTensors beside such a weight.
HOW = ("parallelized", "batch", "heads", "DTensors", "region", "mesh")


def run(
    kind: str,
    dtype: torch.dtype = torch.float64,
    backend: str = AOT,
    how: str = "parallelized",
    has_checkpoint: bool = False,
) -> None:
    """Compare output and gradients, of what is learned as well, with those of one process."""
    whole, mesh, places = qkv_of(dtype), world_mesh(), [Shard(2)]
    sharded = [shard(tensor, dist.get_rank(), dist.get_world_size()) for tensor in whole]
    options: dict[str, Any] = {}
    region: AbstractContextManager[Any] | None = None
    with flex_gradients_on_cpu():
        torch._dynamo.reset()
        wide = tuple(tensor.double() for tensor in whole)
        expected = results(Attends(kind, dtype).double(), wide)
        torch._dynamo.reset()
        counters.clear()
        model = Attends(kind, dtype, has_checkpoint)
        if how == "parallelized":
            cp_inductor.parallelize(model, mesh)
        elif how == "region":
            sharded[:3] = [tensor.clone() for tensor in whole[:3]]
            region = cp_inductor.context_parallel(
                mesh, buffers=sharded[:3], buffer_seq_dims=[2, 2, 2]
            )
        elif how == "mesh":
            options = {"mesh": mesh}
        elif how != "DTensors":  # one is sharded on the other axis, the weight on the sequence's
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "cp"))
            of_weight = [Replicate(), Shard(0)]
            learned = distribute_tensor(model.learned.detach(), mesh, of_weight)
            model.learned = nn.Parameter(learned)
            places = [Shard(0 if how == "batch" else 1), Shard(2)]
        compiled = torch.compile(
            model, backend=backend, fullgraph=True, dynamic=False, options=options
        )
        rank, world_size, is_plain = dist.get_rank(), dist.get_world_size(), how in HOW[-2:]
        if is_plain:
            found = results(compiled, tuple(sharded), region)
            dist.all_reduce(found[-1])
            expected[:-1] = (shard(tensor, rank, world_size) for tensor in expected[:-1])
        else:
            with implicit_replication():
                found = results(compiled, tuple(on_mesh(whole, mesh, *places)))
    assert_all_close(found, expected, dtype, f"{how}, {kind}")
    assert counters["cp_inductor"]["sites_rewritten"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kinds", "how"),
    [
        (2, ("of pairs",), {"how": "DTensors"}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (3, ("slope", "keys", "window"), {}),
                (2, ("window",), {"dtype": torch.bfloat16}),
                (2, ("window",), {"has_checkpoint": True}),
                (2, ("buckets",), {"backend": "cp_inductor"}),
                (2, ("of pairs",), {"how": "region"}),
                (2, ("of pairs",), {"how": "mesh"}),
                (4, ("of all",), {"how": "batch"}),
                (4, ("of all",), {"how": "heads"}),
            )
        ),
    ],
)
@on_ranks("world_size")
def test_gradients(world_size: int, kinds: tuple[str, ...], how: dict[str, Any]) -> None:
    for kind in kinds:
        run(kind, **how)


@pytest.mark.long
@on_ranks(2)
def test_functions_are_told_apart_by_caches() -> None:
    """Two graphs differ by nothing but the body of their score_mod."""
    mesh = world_mesh()
    whole = make_qkv(LENGTH, dtype=torch.float32, num_heads=HEADS, batch=1, head_dim=16)[:3]
    table = torch.randn(2 * LENGTH, generator=torch.Generator().manual_seed(6))

    def attend(sign: int, sides: list[Tensor], learned: Tensor) -> Any:
        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + learned[q - k + LENGTH] if sign > 0 else s + learned[k - q + LENGTH]

        return flex_attention(*sides, score)

    for sign in (1, -1):
        torch._dynamo.reset()
        expected = attend(sign, list(whole), table)
        compiled = torch.compile(attend, backend="cp_inductor", fullgraph=True, dynamic=False)
        with implicit_replication(), flex_gradients_on_cpu():
            sides = [distribute_tensor(side, mesh, [Shard(2)]) for side in whole]
            out = compiled(sign, sides, table.clone().requires_grad_())
        assert_close(out.full_tensor().detach(), expected, torch.float32, str(sign))


# --- Graphs -----------------------------------------------------------------------------------


# What is captured on rank 1 of 3: a rule, and the shape of a bias that has the rank's own rows.
CAPTURED = {
    "slope": ("k-q<=0;x0(0,h,q,k);float32", (1, HEADS, 8, LENGTH)),
    "of pairs": ("True;x0(0,0,q,k);float32", (1, 1, 8, LENGTH)),
    "keys": ("k-q<=0;x0(b,0,q,k);float32", (BATCH, 1, 8, LENGTH)),
    "window": ("(k-q<=0)&((-k+q-6<=0)|(-k+q+1<=0));x0(0,0,q,k);float32", (1, 1, 8, LENGTH)),
}


def test_the_bias_is_a_tensor_of_own_rows() -> None:
    """What is more than a sum is refused, says tests/passes/test_flex_attention.py."""
    models = [Attends(kind, torch.bfloat16) for kind in CAPTURED]

    def run_all(*heads: Tensor) -> list[Tensor]:
        return [model(*heads) for model in models]

    with fake_mesh(1, 3) as mesh, flex_gradients_on_cpu():
        graph = captured_graph(run_all, *on_mesh(qkv_of(torch.bfloat16)[:3], mesh, Shard(2)))
    found = [(node, this) for node in graph.graph.nodes if (this := attention_of(node))]
    for (node, this), (rule, shape) in zip(found, CAPTURED.values(), strict=True):
        assert this.rule.format() == rule and this.has_bias
        (bias,) = (table.meta["example_value"] for table in node.args[3][: len(this.rule.tables)])
        assert (tuple(bias.shape), bias.dtype) == (shape, torch.float32)
