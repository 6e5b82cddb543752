"""What is found, what is left alone, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor.dtensor.recipe import _keep
from cp_inductor.plan import Recipe, forward_plan, resolve
from cp_inductor.plan.ir import Transfers
from cp_inductor.tiles.kernel_table import choose_kernel
from tests.support.graphs import (
    attend_causal,
    attend_full,
    lowered_graphs,
    recorded_capture,
    targets,
)
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv, on_mesh

ATTENTION = "cp_inductor.attention.default"

pytestmark = pytest.mark.usefixtures("ring")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1, 4) as mesh:
        yield mesh


@pytest.fixture
def mesh_2d(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "cp"))


def on(mesh: DeviceMesh, *placements: Placement, **shape: Any) -> list[Tensor]:
    """Query, key and value on a mesh."""
    return on_mesh(make_qkv(**{"seq_len": 8, **shape})[:3], mesh, *placements)


def captured(function: Callable[..., Any], *args: Any) -> list[str]:
    """The ops of the only Dynamo graph after capture; nothing is run."""
    with recorded_capture() as graphs:
        lowered_graphs(function, *args)
    (gm,) = graphs
    return [target for module in gm.modules() for target in targets(module.graph)]


@pytest.mark.parametrize(
    ("attend", "placements", "lengths"),
    [
        *((attend_causal, (one, Shard(2)), {}) for one in (Shard(0), Shard(1), Replicate())),
        *((attend_causal, (Shard(2), one), {}) for one in (Shard(0), Shard(1), Replicate())),
        (attend_causal, (Shard(-2),), {}),
        (attend_causal, (Shard(2),), {"kv_len": 12}),
        (attend_full, (Shard(2),), {"kv_len": 13}),
        (attend_causal, (Shard(2),), {"seq_len": 10}),
    ],
)
def test_found_of_dtensors(
    mesh: DeviceMesh,
    mesh_2d: DeviceMesh,
    attend: Callable[..., Tensor],
    placements: tuple[Placement, ...],
    lengths: dict[str, int],
) -> None:
    tensors = on(mesh_2d if len(placements) == 2 else mesh, *placements, **lengths)
    assert captured(attend, *tensors).count(ATTENTION) == 1


def test_what_is_not_sharded_along_the_sequence_is_left_alone(mesh: DeviceMesh) -> None:
    query, key, value, _ = make_qkv(8)
    for tensors in (on(mesh, Shard(1)), on(mesh, Replicate()), [query, key, value]):
        torch._dynamo.reset()
        with recorded_capture() as graphs:
            out = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)(*tensors)
        assert out.shape == query.shape
        assert targets(graphs[0].graph) == ["<built-in function scaled_dot_product_attention>"]
    assert "sites_found" not in counters["cp_inductor"]


# Refusals: each by its class, with the site, what was expected, what came, and the remedy.


def under_a_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = query.new_zeros(query.shape[2], query.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def counting(dim: int) -> Callable[..., Tensor]:
    """Of a mask that counts what may be sharded a rank would count its part from 0."""

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        index = torch.arange((2, 4)[dim]).view(-1 if dim == 0 else 1, -1 if dim else 1, 1, 1)
        mask = torch.arange(8)[None] + index <= torch.arange(8)[:, None] + 3
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return model


def broken(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = query * 2
    torch._dynamo.graph_break()
    return attend_causal(query, key, value)


def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return out


def vmapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    return layer.requires_grad_(False)


def compiled(function: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
    """Call what the backend makes of a function, whose options are those of the compile."""
    torch._dynamo.reset()
    how: dict[str, Any] = {"fullgraph": function is not broken, "options": options or None}
    return torch.compile(function, backend="cp_inductor", **how)(*args)


# A call -> the class of its error: parts of the text.
REFUSALS = """
compiled(under_a_mask, *qkv, mesh=mesh) -> UnsupportedAttention: sdpa_0 (test_find_attention.py: | \
attn_mask=None | DTensors (any mask)
compiled(attend_full, q[:, 0], k[:, 0], v[:, 0], mesh=mesh) -> UnsupportedAttention: (batch, \
heads, sequence, head dim) | unsqueeze
compiled(attend_causal, *qkv, mesh=mesh, seq_len=10) -> UnevenSequence: 3 of 10 tokens on rank 1 | \
a query of 8 | seq_len
compiled(attend_causal, q[:, :3], k[:, :3], v[:, :3], mesh=mesh, strategy="heads") -> \
UnsupportedStrategy: sdpa_0 | 'heads', which cannot | use strategy='blocks'
compiled(attend_causal, *qkv, mesh=grid) -> UnsupportedPlacement: a 1-D mesh | mesh["cp"]
compiled(attend_causal, *qkv, mesh="cp") -> InvalidArgument: a DeviceMesh of one axis, got a str
compiled(attend_causal, *qkv, mesh=DeviceMesh("cpu", [0, 2, 1, 3], mesh_dim_names=("cp",))) -> \
UnsupportedPlacement: ascending ranks | [0, 2, 1, 3]
compiled(attend_causal, *qkv, mesh=DeviceMesh("cpu", [0, 2])) -> ProcessGroupError: global rank 1
compiled(counting(0), *on(grid, Shard(0), Shard(2))) -> UnsupportedAttention: the index of a head \
or batch entry | read values that depend on the head from a tensor
compiled(counting(1), *on(grid, Shard(1), Shard(2))) -> UnsupportedAttention: the index of a head o
compiled(masked, *on(mesh, Shard(2)), zeros, strategy="blocks") -> UnsupportedStrategy: 'blocks' | \
whose rows stay with their queries
axis(x, distribute_tensor(k, grid, [Replicate(), Shard(2)]), x, site="") -> UnsupportedPlacement: \
on one mesh
axis(x, k, x, site="") -> UnsupportedPlacement: key a plain tensor
compiled(attend_causal, *on(grid, Shard(2), Shard(2))) -> UnsupportedPlacement: sharded on one \
mesh axis | shard it on 2 axes | flatten
compiled(attend_full, h, whole, whole, mesh=grid["cp"]) -> UnsupportedPlacement: batch or heads, th
compiled(attend_full, *[distribute_tensor(t, grid["dp"], [Shard(3)]) for t in qkv], \
mesh=grid["cp"]) -> UnsupportedPlacement: batch or heads, the same
compiled(attend_full, h, *[distribute_tensor(k[:, :1], grid["dp"], [Shard(1)])] * 2, \
mesh=grid["cp"]) -> UnsupportedPlacement: batch or heads, the same
choose_kernel(*[e := q.to(torch.float8_e4m3fn)] * 3, dtype=e.dtype, site="") -> UnsupportedKernel: \
got torch.float8_e4m3fn
choose_kernel(*[q.to("meta")] * 3, dtype=q.dtype, site="") -> UnsupportedKernel: on meta
choose_kernel(q, k, v[..., :8], dtype=q.dtype, site="") -> UnsupportedKernel: 20, 20 and 8; pad val
compiled(broken, *qkv, mesh=mesh) -> UnsupportedAttention: graph break
compiled(encoder(), torch.randn(2, 4, 16), mesh=mesh) -> UnsupportedAttention: within the local \
shard only | got _transformer_encoder_layer_fwd, | set_fastpath_enabled(False)
compiled(by_name, *qkv, mesh=mesh) -> UnsupportedAttention: within the local shard only
compiled(vmapped, torch.randn(3, 2, 4, 6, 8), mesh=mesh) -> UnsupportedAttention: no transform of \
torch | test_find_attention.py: | q.flatten(0, 1)
compiled(vmapped, torch.randn(2, 4, 6, 8), mesh=mesh) -> UnsupportedAttention: no transform of torc
"""


# Torch's, of its own attention, while Dynamo looks for shapes.
@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
@pytest.mark.parametrize("row", REFUSALS.split("\n")[1:-1])
def test_refusals(mesh: DeviceMesh, mesh_2d: DeviceMesh, row: str) -> None:
    call, _, said = row.partition(" -> ")
    error, _, parts = said.partition(": ")
    q, k, v, _ = make_qkv(8)
    h = distribute_tensor(q, mesh_2d["dp"], [Shard(1)])
    names: dict[str, Any] = {**globals(), "mesh": mesh, "grid": mesh_2d, "qkv": [q, k, v]}
    names |= {"q": q, "k": k, "v": v, "x": distribute_tensor(q, mesh, [Shard(2)]), "h": h}
    names |= {"whole": h.redistribute(placements=[Replicate()])}
    names |= {"zeros": distribute_tensor(torch.zeros(8, 8), mesh, [Replicate()])}
    names |= {"axis": cp_inductor.dtensor.axis.axis_and_placements, "choose_kernel": choose_kernel}
    with pytest.raises(getattr(cp_inductor, error)) as refused:
        eval(call, names)
    kind = type(refused.value)
    assert (kind.__module__, kind.__name__) == ("cp_inductor.errors", error)
    assert [part for part in parts.split(" | ") if part not in str(refused.value)] == []
    assert refused.value.remedy


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_what_vmap_breaks_eager_code_refuses(mesh: DeviceMesh) -> None:
    for function in (vmapped, torch.compile(vmapped, backend="cp_aot_eager")):
        with (
            cp_inductor.context_parallel(mesh),
            pytest.raises((cp_inductor.UnsupportedAttention, torch._dynamo.exc.TorchRuntimeError)),
        ):
            function(torch.randn(3, 2, 4, 6, 8))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_mask_may_count_what_is_whole(mesh_2d: DeviceMesh, dim: int) -> None:
    assert ATTENTION in captured(counting(dim), *on(mesh_2d, Shard(1 - dim), Shard(2)))


def test_stages_are_kept_as_far_as_the_budget_goes() -> None:
    recipe = Recipe(4, 4096, 4096, 4, 4, 16, 2, "full", strategy="rows", stages=3)
    recipe = resolve(recipe, site="test")
    plan, batch = forward_plan(recipe), 2
    received = [
        max(
            batch
            * plan.bytes_of(Transfers.of(t for t in stage.fetch if t.destination == rank)).sum()
            for rank in range(4)
        )
        for stage in plan.stages
    ]
    assert received[0] == 0 and min(received[1:]) > 0
    for num_kept in range(1, len(received) + 1):
        budget = max(1, sum(received[:num_kept]))
        assert _keep(recipe, budget, batch=batch).keep == num_kept
        assert _keep(recipe, budget + 1, batch=batch).keep == num_kept


def test_refused_without_a_process_group(mesh: DeviceMesh) -> None:
    dist.destroy_process_group()
    try:
        with pytest.raises(cp_inductor.ProcessGroupError, match="init_process_group"):
            compiled(attend_causal, *make_qkv(8)[:3], mesh=mesh)
    finally:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def test_the_packet_of_an_op_is_found(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value)
        return out

    torch.compile(model, backend="cp_aot_eager", options={"mesh": mesh})(*make_qkv(8)[:3])
    assert counters["cp_inductor"]["sites_rewritten"] == 1


def test_one_refusal_leaves_the_whole_graph_alone(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attend_causal(query, key, value)
        local = query.new_zeros(query.shape[2], query.shape[2])
        return F.scaled_dot_product_attention(out, key, value, attn_mask=local)

    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        try:
            return cp_inductor.backend.cp_aot_eager(gm, inputs, **kwargs)
        finally:  # Dynamo may clear a graph once its backend has failed
            seen.extend(targets(gm.graph))

    query, key, value, _ = make_qkv(8)
    with pytest.raises(cp_inductor.UnsupportedAttention, match="sdpa_1"):
        torch.compile(model, backend=backend, options={"mesh": mesh})(query, key, value)
    assert seen == ["<built-in function scaled_dot_product_attention>"] * 2
    assert counters["cp_inductor"]["sites_refused"] == 1
    assert dist.is_initialized()


def test_every_error_is_a_cp_error() -> None:
    for name in cp_inductor.__all__:
        value = getattr(cp_inductor, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        if is_error and not issubclass(value, Warning):
            assert issubclass(value, cp_inductor.CPError)
