"""The op pair as an op: schema, fakes with true strides, autograd; and eager DTensor attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import lowering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor.ops.attention import attention, attention_backward
from cp_inductor.plan import Recipe, resolve
from cp_inductor.plan.strategies import TABLE
from cp_inductor.region.regions import SequenceRegion
from cp_inductor.run.attention import Attention
from cp_inductor.run.records import reads_shard
from cp_inductor.run.views import Views
from cp_inductor.tiles.kernel_table import ROWS_OF_TILES, get_kernel
from cp_inductor.tiles.kernels import Partial, TileCall, with_whole_rows
from cp_inductor.torch_private.first_dtensor import BACKWARD_OPS, FORWARD_OPS
from tests.support.comms import Counts
from tests.support.graphs import attend_causal
from tests.support.random_attention import STRIDES
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import (
    LAYOUTS,
    assert_all_close,
    assert_close,
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)


def local_leaves(**shape: object) -> tuple[list[Tensor], Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = make_qkv(5 * world_size, **shape)  # type: ignore[arg-type]
    *leaves, grad_out = (shard(tensor, rank, world_size).contiguous() for tensor in tensors)
    return [leaf.requires_grad_() for leaf in leaves], grad_out


def arguments_of(
    strategy: str, is_causal: bool, *, keep: int = 0, num_kv_heads: int = 2
) -> tuple[Any, ...]:
    world_size = dist.get_world_size()
    length, itemsize, rule = 5 * world_size, 4, "causal" if is_causal else "full"
    recipe = Recipe(
        world_size, length, length, 4, num_kv_heads, 20, itemsize, rule, strategy=strategy
    )
    recipe = replace(resolve(recipe, site="test"), keep=keep)
    how = (0.5, "flash_cpu", dist.group.WORLD.group_name, 0.0, False)
    return recipe.format(), dist.get_rank(), *how


# strategy, is_causal, is_transposed
WAYS = (("ring", True, True), ("blocks", True, False), ("blocks", False, True))


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.long)])
@on_ranks("world_size")
def test_opcheck(world_size: int) -> None:
    for strategy, is_causal, is_transposed in WAYS:
        leaves, grad_out = local_leaves(num_kv_heads=2)
        if is_transposed:
            leaves = [LAYOUTS["transposed"](leaf.detach()).requires_grad_() for leaf in leaves]
        arguments = arguments_of(strategy, is_causal, keep=int(is_transposed))
        torch.library.opcheck(attention, (*leaves, [], *arguments))
        with torch.no_grad():
            out, lse, *kept = attention(*leaves, [], *arguments)
        detached = [leaf.detach() for leaf in leaves]
        torch.library.opcheck(
            attention_backward, (grad_out, *detached, out, lse, [], kept, *arguments)
        )


@pytest.mark.parametrize("world_size", [4, 6, 8])
@pytest.mark.parametrize("strategy", [*TABLE, "heads2+blocks", "heads2_own+blocks", "auto"])
def test_what_is_kept_unasked_takes_the_place_of_the_shard(strategy: str, world_size: int) -> None:
    """Then the shard is not saved; so by default no strategy saves more than another."""
    length = 512 * world_size
    recipe = Recipe(world_size, length, length, 24, 24, 64, 2, "causal", strategy=strategy)
    recipe = resolve(recipe, site="test")
    for rank in range(world_size):
        this = Attention(recipe, rank, None, "flash_cpu", "a group")
        assert reads_shard(this) == (recipe.keep == 0)
    assert (recipe.keep > 0) == (recipe.strategy in ("heads", "heads_own_forward"))


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    leaves, grad_out = local_leaves()
    out, lse = attention(*leaves, [], *arguments_of("ring", True, num_kv_heads=4))
    assert lse.requires_grad
    (dq,) = torch.autograd.grad(out, leaves[:1], grad_out.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def sharded_leaves(
    placements: list[Placement], mesh_shape: tuple[int, ...], **shape: object
) -> tuple[list[DTensor], DTensor, tuple[Tensor, ...]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    whole = make_qkv(8, **shape)  # type: ignore[arg-type]
    *leaves, grad_out = on_mesh(whole, mesh, *placements)
    return [leaf.requires_grad_() for leaf in leaves], grad_out, whole


def check_eager(
    placements: list[Placement], mesh_shape: tuple[int, ...], num_exchanges: int
) -> None:
    """SDPA on DTensors, not compiled, against float64; it must issue the ring's collectives."""
    for is_causal in (True, False):
        leaves, grad_out, whole = sharded_leaves(placements, mesh_shape, num_kv_heads=2)
        counts = Counts()
        with counts:
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        assert counts.exchanges() == num_exchanges
        with counts:
            grads = torch.autograd.grad(out, leaves, grad_out)
        assert counts.exchanges() == counts.get_total_counts() == 2 * num_exchanges
        expected = attend_with_grads(*whole, is_causal=is_causal)
        assert {one.placements for one in (out, *grads)} == {tuple(placements)}
        assert_all_close((out.detach(), *grads), expected, torch.float32)


@on_ranks(2)
@cp_inductor.config.patch(strategy="ring")
def test_eager_dtensors() -> None:
    check_eager([Shard(2)], (2,), 1)
    check_eager([Shard(1)], (2,), 0)
    check_eager([Shard(0)], (2,), 0)
    check_eager([Replicate()], (2,), 0)


@on_ranks(4)
@cp_inductor.config.patch(strategy="ring")
def test_eager_dtensors_on_two_axes() -> None:
    check_eager([Shard(0), Shard(2)], (2, 2), 1)
    check_eager([Shard(2), Shard(1)], (2, 2), 1)
    check_eager([Replicate(), Shard(2)], (2, 2), 1)
    check_eager([Shard(0), Shard(1)], (2, 2), 0)


@on_ranks(3)
def test_eager_of_any_length() -> None:
    """Lengths that do not divide, in eager: ranks hold what DTensor gives them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for seq_len, strategy in ((7, "blocks"), (2, "auto"), (101, "blocks"), (101, "ring")):
        whole = make_qkv(seq_len, num_kv_heads=2)
        with cp_inductor.config.patch(strategy=strategy):
            found = with_grads(attend_causal, on_mesh(whole, mesh, Shard(2)))
        expected = attend_with_grads(*whole, is_causal=True)
        assert_all_close(found, expected, torch.float32, f"{strategy} {seq_len}")


@on_ranks(2)
def test_gradient_of_another_placement() -> None:
    """sum() hands back a replicated gradient; it is resharded, not taken for a shard."""
    leaves, _, whole = sharded_leaves([Shard(2)], (2,))
    F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    expected = attend_with_grads(*whole[:3], torch.ones_like(whole[0]), is_causal=True)
    for leaf, reference in zip(leaves, expected[1:], strict=True):
        assert_close(leaf.grad.full_tensor(), reference, torch.float32)


@on_ranks(2)
def test_eager_refusals() -> None:
    mesh = world_mesh()
    three = [distribute_tensor(t, mesh, [Shard(2)]) for t in make_qkv(8, num_heads=3)[:3]]
    # Dynamo propagates shapes through what is refused, and no graph is made of it all the same.
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    with cp_inductor.config.patch(strategy="heads"):
        for run in (F.scaled_dot_product_attention, compiled):
            with pytest.raises(Exception, match="3 query") as raised:
                run(*three)
            is_own = isinstance(raised.value, cp_inductor.UnsupportedStrategy)
            assert is_own == (run is not compiled)


# --- Tensors whose rows do not lie as kernels read them: every form attends to what they hold.


def overlapping_rows(tensor: Tensor) -> Tensor:
    """Each row is the one before, moved by one."""
    batch, num_heads, length, head_dim = tensor.shape
    width = length + head_dim - 1
    long = tensor.flatten()[: batch * num_heads * width].clone()
    return long.as_strided(tensor.shape, (num_heads * width, width, 1, 1))


KEPT = {name: STRIDES[name] for name in STRIDES if not name.startswith("expanded")}
# These hold other numbers than they are given.
ALL_LAYOUTS = {
    **KEPT,
    "expanded features": lambda tensor: tensor[..., :1].expand_as(tensor),
    "expanded tokens": STRIDES["expanded 2"],
    "overlapping rows": overlapping_rows,
}


# --- One tile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("which", "name"),
    [(which, name) for which in range(6) for name in ALL_LAYOUTS if which < 5 or name in KEPT],
)
def test_a_tile(name: str, which: int, dtype: torch.dtype) -> None:
    layout = ALL_LAYOUTS[name]
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
    for name in ALL_LAYOUTS if "eager" in form else ["every second"]:
        layout = ALL_LAYOUTS[name]
        *whole, grad_out = make_qkv(LENGTH, num_kv_heads=2, dtype=torch.float64)
        leaves = [layout(t.chunk(world_size, 2)[rank]).requires_grad_() for t in whole]
        # Gradients of a sum are expanded, those of a transposed loss transposed: in compiled code
        # they lie otherwise than those that were traced.
        grads_out = [layout(grad_out.chunk(world_size, 2)[rank])]
        if form in ("region eager", "mesh compiled"):
            grads_out.append(torch.ones((), dtype=torch.float64).expand(leaves[0].shape))
        if form == "mesh compiled":
            for other in ("contiguous", "features outermost", "expanded features"):
                grads_out.append(ALL_LAYOUTS[other](grad_out.chunk(world_size, 2)[rank]))
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


def test_a_wide_bias_is_not_rounded_where_no_template_serves() -> None:
    recipe = Recipe(2, 64, 64, 2, 2, 8, 2, "k-q<=0;x0(h)*(k-q);float32")
    described = Attention(resolve(recipe, site="test"), 0, None, "flash_cuda", "")
    shards = (torch.zeros(1, 2, 32, 8, dtype=torch.bfloat16),) * 3
    assert Views(described, shards, (torch.ones(2),), is_backward=False).needs_math
