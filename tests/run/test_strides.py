"""Tensors whose rows do not lie as kernels read them: every form attends to what they hold."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import lowering
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import cp_inductor
from cp_inductor.region.regions import SequenceRegion
from cp_inductor.tiles.kernel_table import ROWS_OF_TILES, get_kernel
from cp_inductor.tiles.kernels import Partial, TileCall, with_whole_rows
from cp_inductor.torch_private.first_dtensor import BACKWARD_OPS, FORWARD_OPS
from tests.support.graphs import attend_causal
from tests.support.random_attention import STRIDES
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    assert_close,
    assert_shards_close,
    attend_with_grads,
    make_qkv,
)


def overlapping_rows(tensor: Tensor) -> Tensor:
    """Each row is the one before, moved by one."""
    batch, num_heads, length, head_dim = tensor.shape
    width = length + head_dim - 1
    long = tensor.flatten()[: batch * num_heads * width].clone()
    return long.as_strided(tensor.shape, (num_heads * width, width, 1, 1))


KEPT = {name: STRIDES[name] for name in STRIDES if not name.startswith("expanded")}
# These hold other numbers than they are given.
LAYOUTS = {
    **KEPT,
    "expanded features": lambda tensor: tensor[..., :1].expand_as(tensor),
    "expanded tokens": STRIDES["expanded 2"],
    "overlapping rows": overlapping_rows,
}


# --- One tile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("which", "name"),
    [(which, name) for which in range(6) for name in LAYOUTS if which < 5 or name in KEPT],
)
def test_a_tile(name: str, which: int, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    query, key, value, grad_out = make_qkv(37, num_kv_heads=2, dtype=dtype)
    bias = torch.randn(2, 4, 37, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel = get_kernel("flash_cpu")
    tensors = [grad_out, query, key, value, bias]
    if which < len(tensors):
        tensors[which] = layout(tensors[which])
        grad_out, query, key, value, bias = tensors
    expected = attend_with_grads(query, key, value, grad_out, bias=bias)
    call = TileCall(query, key, value, bias=bias)
    out, lse = kernel.forward(call)
    if which == len(tensors):
        out = layout(out)
    grads = kernel.backward(call, grad_out, Partial(out, lse))
    assert_all_close((out, *grads), expected, dtype)


def test_what_lies_as_kernels_read_it_is_not_copied() -> None:
    batch, length, num_heads, head_dim = 2, 6, 3, 8
    fused = torch.randn(batch, length, 3, num_heads, head_dim)
    query, key, value = fused.permute(2, 0, 3, 1, 4)
    for tensor in (query, key[:, :, 2:5], value[..., :5], query[:1], key[:, :, :1], value[:0]):
        assert with_whole_rows(tensor)[0] is tensor
    expanded = torch.randn(1, 1, length, head_dim).expand(batch, num_heads, -1, -1)
    assert with_whole_rows(expanded)[0] is expanded
    one = torch.randn(batch, num_heads, length, 5)[..., 3:4]
    assert with_whole_rows(one)[0] is one


def test_strides_that_are_not_known_are_copied() -> None:
    def count_clones(tensor: Tensor) -> int:
        def run(given: Tensor) -> Tensor:
            return with_whole_rows(given)[0] + 1

        graph = torch.fx.experimental.proxy_tensor.make_fx(run, tracing_mode="symbolic")(tensor)
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        return len(nodes)

    tensor = torch.randn(2, 3, 6, 8)
    assert count_clones(tensor) == 0
    assert count_clones(tensor.transpose(1, 2).contiguous().transpose(1, 2)) == 0
    assert count_clones(STRIDES["tokens innermost"](tensor)) == 1


# --- Several ranks ----------------------------------------------------------------------------

LENGTH = 14


def of_contiguous(local: Tensor, mesh: Any, placement: Placement, length: int) -> DTensor:
    """Return a DTensor whose whole is said to have its features innermost, as kernels read it."""
    shape = torch.Size((*local.shape[:2], length, local.shape[3]))
    how: dict[str, Any] = {"shape": shape, "stride": torch.empty(shape).stride()}
    return DTensor.from_local(local, mesh, [placement], run_check=False, **how)


def attend_in(form: str, leaves: list[Tensor], mesh: Any) -> Tensor:
    where, how = form.split()
    model: Any = attend_causal
    if how == "compiled":
        options = {"mesh": mesh} if where == "mesh" else None
        model = torch.compile(model, backend="cp_aot_eager", fullgraph=True, options=options)
    if where == "DTensors":
        return model(*(of_contiguous(t, mesh, Shard(2), LENGTH) for t in leaves)).to_local()
    region: Any = SequenceRegion(mesh) if where == "region" else nullcontext()
    with region:
        return model(*leaves)


FORMS = ("DTensors eager", "region eager", "region compiled", "mesh compiled")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_shards(form: str) -> None:
    mesh, rank, world_size = world_mesh(), dist.get_rank(), dist.get_world_size()
    for name in LAYOUTS if "eager" in form else ["every second"]:
        layout = LAYOUTS[name]
        *whole, grad_out = make_qkv(LENGTH, num_kv_heads=2, dtype=torch.float64)
        leaves = [layout(t.chunk(world_size, 2)[rank]).requires_grad_() for t in whole]
        # Gradients of a sum are expanded, those of a transposed loss transposed: in compiled code
        # they lie otherwise than those that were traced.
        grads_out = [layout(grad_out.chunk(world_size, 2)[rank])]
        if form in ("region eager", "mesh compiled"):
            grads_out.append(torch.ones((), dtype=torch.float64).expand(leaves[0].shape))
        if form == "mesh compiled":
            for other in ("contiguous", "features outermost", "expanded features"):
                grads_out.append(LAYOUTS[other](grad_out.chunk(world_size, 2)[rank]))
        out = attend_in(form, leaves, mesh)
        for grad in grads_out:
            actual = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            held = [leaf.detach() for leaf in (*leaves, grad)]
            held = cp_inductor.context_parallel_unshard(mesh, held, [2] * 4)
            expected = attend_with_grads(*held, is_causal=True)
            assert_shards_close((out.detach(), *actual), expected, torch.float64, name)


# --- What is not sharded ----------------------------------------------------------------------


def test_attention_that_is_left_to_dtensor() -> None:
    """DTensor shows SDPA the strides of the whole, and gives the kernel the local part."""
    query, key, value, grad_out = make_qkv(9, dtype=torch.float64)
    expected = attend_with_grads(query, key, value, grad_out)
    with fake_mesh(0, 2) as mesh:

        def place(tensor: Tensor) -> DTensor:
            return of_contiguous(STRIDES["every second"](tensor), mesh, Replicate(), 9)

        placed = [place(tensor) for tensor in (query, key, value)]
        out, lse = FORWARD_OPS[0](*placed)
        grads = BACKWARD_OPS[0](place(grad_out), *placed, place(out.to_local()), lse, 0.0, False)
        for got, wanted in zip((out, *grads), expected, strict=True):
            assert_close(got.to_local(), wanted, torch.float64)


# --- Inductor ---------------------------------------------------------------------------------


class OfAConvolution(nn.Module):
    """Query, key and value are the channels of a convolution over features.

    Inductor lays channels out innermost: the features' stride is then 3, where it was 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        channels = self.conv(x.reshape(-1, 1, 1, x.shape[-1]))
        return attend_causal(*(channel.view(x.shape) for channel in channels.unbind(1)))


@pytest.mark.long
def test_layouts_that_inductor_changes() -> None:
    """Out and the gradients of the weights are those of eager code."""
    torch.manual_seed(0)
    model, x = OfAConvolution(), torch.randn(1, 2, 16, 8)
    with fake_mesh(0, 1) as mesh:
        compiled = torch.compile(
            model, backend="cp_inductor", fullgraph=True, options={"mesh": mesh}
        )
        results = list[tuple[Tensor, ...]]()
        for function in (model, compiled):
            out = function(x)
            grads = torch.autograd.grad(out.square().sum(), model.parameters())
            results.append((out.detach(), *grads))
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, torch.float32)


def test_the_last_stride_is_asked_for_in_our_compiles_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(lowering._maybe_layout_constraints)
    changed = set[Any]()

    def note(*args: Any, **kwargs: Any) -> Any:
        now = lowering._maybe_layout_constraints
        changed.update(op for op in now if now[op] is not before.get(op))
        raise NotImplementedError("of the test")

    monkeypatch.setattr("cp_inductor.backend.compile.compile_fx_inner", note)
    with fake_mesh(0, 1) as mesh:
        compiled = torch.compile(attend_causal, backend="cp_inductor", options={"mesh": mesh})
        tensors = [torch.randn(1, 2, 16, 8) for _ in range(3)]
        with pytest.raises(Exception, match="of the test"):
            compiled(*tensors)
    assert changed == set(ROWS_OF_TILES)
    assert lowering._maybe_layout_constraints == before
