"""What is found, what is left alone, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor.dtensor.recipe import _keep
from cp_inductor.graph.nodes import source_line
from cp_inductor.plan import Recipe, forward_plan, resolve
from cp_inductor.region import regions
from cp_inductor.tiles.kernel_table import choose_kernel
from tests.support.graphs import (
    attend_causal,
    attend_full,
    lowered_graphs,
    recorded_capture,
    targets,
)
from tests.support.ranks import fake_rank
from tests.support.reference import make_qkv

ATTENTION = "cp_inductor.attention.default"
RANK, WORLD_SIZE = 1, 4

pytestmark = pytest.mark.usefixtures("ring")


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_rank(RANK, WORLD_SIZE):
        yield


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("cp",))


@pytest.fixture
def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def on(mesh: DeviceMesh, *placements: Placement, **shape: Any) -> list[Tensor]:
    """Query, key and value on a mesh."""
    shape = {"seq_len": 8, **shape}
    return [distribute_tensor(t, mesh, placements) for t in make_qkv(**shape)[:3]]


def captured(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
) -> list[str]:
    """The ops of the only Dynamo graph after capture; nothing is run."""
    with recorded_capture() as graphs:
        lowered_graphs(function, *args, options=options)
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


def refuse(
    error: type[cp_inductor.CPError],
    *words: str,
    function: Callable[..., Any],
    args: list[Any],
    options: dict[str, Any] | None = None,
) -> None:
    for backend in ("cp_inductor", "cp_aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True, options=options)
        with pytest.raises(error) as caught:
            compiled(*args)
        assert type(caught.value).__name__ == error.__name__
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert caught.value.site and caught.value.remedy


def under_a_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = query.new_zeros(query.shape[2], query.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def without_head_dim(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_full(query[:, 0], key[:, 0], value[:, 0])


def of_three_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_causal(query[:, :3], key[:, :3], value[:, :3])


MESHES: dict[str, Callable[[], object]] = {
    "line": lambda: init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("cp",)),
    "grid": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")),
    "out of order": lambda: DeviceMesh("cpu", [0, 2, 1, 3], mesh_dim_names=("cp",)),
    "without this rank": lambda: DeviceMesh("cpu", [0, 2]),
    "none": lambda: "cp",
}


@pytest.mark.parametrize(
    ("error", "words", "function", "mesh", "options"),
    [
        (
            cp_inductor.UnsupportedAttention,
            "sdpa_0 (test_find_attention.py:|attn_mask=None|DTensors (any mask)",
            *(under_a_mask, "line", {}),
        ),
        (
            cp_inductor.UnsupportedAttention,
            "(batch, heads, sequence, head dim)|unsqueeze",
            *(without_head_dim, "line", {}),
        ),
        (
            cp_inductor.UnevenSequence,
            "3 of 10 tokens on rank 1|a query of 8|seq_len",
            *(attend_causal, "line", {"seq_len": 10}),
        ),
        (
            cp_inductor.UnsupportedStrategy,
            "sdpa_0|'heads', which cannot|use strategy='blocks'",
            *(of_three_heads, "line", {"strategy": "heads"}),
        ),
        (cp_inductor.UnsupportedPlacement, 'a 1-D mesh|mesh["cp"]', attend_causal, "grid", {}),
        (cp_inductor.UnsupportedPlacement, "a DeviceMesh, got 'cp'", attend_causal, "none", {}),
        (
            cp_inductor.UnsupportedPlacement,
            "ascending ranks|[0, 2, 1, 3]",
            *(attend_causal, "out of order", {}),
        ),
        (cp_inductor.ProcessGroupError, "global rank 1", attend_causal, "without this rank", {}),
    ],
)
def test_refused_of_plain_tensors(
    error: Any, words: str, function: Callable[..., Tensor], mesh: str, options: dict[str, Any]
) -> None:
    options = {**options, "mesh": MESHES[mesh]()}
    tensors = list(make_qkv(8)[:3])
    refuse(error, *words.split("|"), function=function, args=tensors, options=options)


@pytest.mark.parametrize(("dim", "other"), [(0, 1), (1, 0)])
def test_refused_mask_that_counts_what_is_sharded(
    mesh_2d: DeviceMesh, dim: int, other: int
) -> None:
    """A rank would count its heads, or batch entries, from 0."""
    sizes = {0: 2, 1: 4}

    def counting(dim: int) -> Callable[..., Tensor]:
        def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            index = torch.arange(sizes[dim]).view(-1 if dim == 0 else 1, -1 if dim else 1, 1, 1)
            mask = torch.arange(8)[None] + index <= torch.arange(8)[:, None] + 3
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        return model

    refuse(
        cp_inductor.UnsupportedAttention,
        "the index of a head or batch entry",
        "read values that depend on the head from a tensor",
        function=counting(dim),
        args=on(mesh_2d, Shard(dim), Shard(2), batch=sizes[0], num_heads=sizes[1]),
    )
    torch._dynamo.reset()
    leaves = on(mesh_2d, Shard(other), Shard(2), batch=sizes[0], num_heads=sizes[1])
    assert ATTENTION in captured(counting(dim), *leaves)


def test_stages_are_kept_as_far_as_the_budget_goes() -> None:
    recipe = Recipe(4, 4096, 4096, 4, 4, 16, 2, "full", strategy="rows", stages=3)
    recipe = resolve(recipe, site="test")
    plan, batch = forward_plan(recipe), 2
    received = [
        max(
            batch * sum(plan.num_bytes(t) for t in stage.fetch if t.destination == rank)
            for rank in range(4)
        )
        for stage in plan.stages
    ]
    assert received[0] == 0 and min(received[1:]) > 0
    for num_kept in range(1, len(received) + 1):
        budget = max(1, sum(received[:num_kept]))
        assert _keep(recipe, budget, batch=batch).keep == num_kept
        assert _keep(recipe, budget + 1, batch=batch).keep == num_kept


def test_refused_strategy_under_a_mask_tensor(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    mask = distribute_tensor(torch.zeros(8, 8), mesh, [Replicate()])
    refuse(
        cp_inductor.UnsupportedStrategy,
        "'blocks'",
        "whose rows stay with their queries",
        function=model,
        args=[*on(mesh, Shard(2)), mask],
        options={"strategy": "blocks"},
    )


def test_refused_different_meshes(mesh: DeviceMesh, mesh_2d: DeviceMesh) -> None:
    axis = cp_inductor.dtensor.axis.axis_of_tensors
    query, _, value = on(mesh, Shard(2))
    other = distribute_tensor(make_qkv(8)[1], mesh_2d, [Replicate(), Shard(2)])
    # DTensor itself refuses to mix meshes once traced; the rule holds in eager too.
    with pytest.raises(cp_inductor.UnsupportedPlacement, match="on one mesh"):
        axis(query, other, value, site="here")
    with pytest.raises(cp_inductor.UnsupportedPlacement, match="key a plain tensor"):
        axis(query, make_qkv(8)[1], value, site="here")


def test_refused_sequence_on_two_axes(mesh_2d: DeviceMesh) -> None:
    args = on(mesh_2d, Shard(2), Shard(2))
    words = ("sharded on one mesh axis", "shard it on 2 axes", "flatten")
    refuse(cp_inductor.UnsupportedPlacement, *words, function=attend_causal, args=args)


def test_refused_heads_sharded_unlike_on_shards_of_a_named_mesh(mesh_2d: DeviceMesh) -> None:
    query, key, value = (distribute_tensor(t, mesh_2d["dp"], [Shard(1)]) for t in make_qkv(8)[:3])
    whole = key.redistribute(placements=[Replicate()])
    grouped = make_qkv(8, num_kv_heads=1)[1]
    for args in (
        [query, whole, whole],
        [t.redistribute(placements=[Shard(3)]) for t in (query, key, value)],
        [query, *[distribute_tensor(grouped, mesh_2d["dp"], [Shard(1)])] * 2],
    ):
        refuse(
            cp_inductor.UnsupportedPlacement,
            "batch or heads, the same",
            function=attend_full,
            args=args,
            options={"mesh": mesh_2d["cp"]},
        )


def test_refused_without_a_process_group(mesh: DeviceMesh) -> None:
    dist.destroy_process_group()
    try:
        refuse(
            cp_inductor.ProcessGroupError,
            "init_process_group",
            function=attend_causal,
            args=list(make_qkv(8)[:3]),
            options={"mesh": mesh},
        )
    finally:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.to(torch.float8_e4m3fn), r"got torch\.float8_e4m3fn"),
        (lambda t: t.to("meta"), "on meta"),
    ],
)
def test_refused_kernels(change: Callable[[Tensor], Tensor], words: str) -> None:
    tensors = [change(tensor) for tensor in make_qkv(8)[:3]]
    with pytest.raises(cp_inductor.UnsupportedKernel, match=words):
        choose_kernel(*tensors, dtype=tensors[0].dtype, site="here")


def test_refused_value_head_dim() -> None:
    """For SDPA, a pass pads it before: tests/passes/test_align_attention.py."""
    query, key, value, _ = make_qkv(8, head_dim=16)
    with pytest.raises(cp_inductor.UnsupportedKernel, match=r"16, 16 and 8; pad value"):
        choose_kernel(query, key, value[..., :8], dtype=query.dtype, site="here")


def test_refused_graph_break_between_plain_shards(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query * 2
        torch._dynamo.graph_break()
        return attend_causal(query, key, value)

    compiled = torch.compile(model, backend="cp_aot_eager", options={"mesh": mesh})
    with pytest.raises(cp_inductor.UnsupportedAttention, match="graph break"):
        compiled(*make_qkv(8)[:3])


def test_refused_opaque_attention(mesh: DeviceMesh) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    layer.requires_grad_(False)
    compiled = torch.compile(layer, backend="cp_aot_eager", options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.UnsupportedAttention, match="within the local shard only") as e:
        compiled(torch.randn(2, 4, 16))
    assert e.value.got.startswith("_transformer_encoder_layer_fwd, ")
    assert "set_fastpath_enabled(False)" in e.value.remedy


# Torch's, of its own attention, while Dynamo looks for shapes.
@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
@pytest.mark.parametrize("num_dims", [4, 5])
def test_refused_vmap(num_dims: int, mesh: DeviceMesh) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(x)

    x = torch.randn(3, 2, 4, 6, 8)[(0,) * (5 - num_dims)]
    compiled = torch.compile(run, backend="cp_aot_eager", options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.UnsupportedAttention, match="no transform of torch") as e:
        compiled(x)
    assert "test_find_attention.py" in e.value.site
    assert "q.flatten(0, 1)" in e.value.remedy
    # Where a compile breaks the graph, eager says it.
    for function in (run, torch.compile(run, backend="cp_aot_eager")):
        with (
            cp_inductor.context_parallel(mesh),
            pytest.raises((cp_inductor.UnsupportedAttention, torch._dynamo.exc.TorchRuntimeError)),
        ):
            function(x)


def test_refused_kernel_called_by_name(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return out[0]

    compiled = torch.compile(model, backend="cp_aot_eager", options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.UnsupportedAttention, match="within the local shard only"):
        compiled(*make_qkv(8)[:3])


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


def test_a_site_is_the_users_line() -> None:
    node = fx.Graph().placeholder("query")
    frames = [("/home/me/model.py", 41), (regions.__file__, 152)]
    node.meta["stack_trace"] = "\n".join(f'File "{path}", line {line}' for path, line in frames)
    assert source_line(node) == "model.py:41"
    node.meta["stack_trace"] = ""
    assert source_line(node) == "source unknown"
