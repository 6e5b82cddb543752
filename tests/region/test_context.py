"""The drop-in for torch's context_parallel: buffers, whole models, checkpoints, eager pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import cp_inductor
from tests.support import combinations as cases
from tests.support.comms import Counts
from tests.support.graphs import attend_causal
from tests.support.ranks import fake_rank, on_ranks, run_ranks
from tests.support.reference import attend, check_shards, make_qkv, shard

# Imported once and for all: a patch of torch.nn.functional would not reach it.
from torch.nn.functional import scaled_dot_product_attention as imported_attention  # isort: skip


# Buffers


def test_buffers_are_shards_inside_and_as_they_were_outside(mesh: DeviceMesh) -> None:
    ids, table = torch.arange(22).view(2, 11), torch.arange(12.0).view(6, 2).t()
    row, stride = ids[0], table.stride()
    context = cp_inductor.context_parallel(
        mesh, buffers=[ids, table], buffer_seq_dims=[1, -1], no_restore_buffers=set()
    )
    for _ in range(2):
        with context, cp_inductor.per_rank():
            assert ids.tolist() == [[6, 7, 8, 9, 10], [17, 18, 19, 20, 21]]
            assert table.tolist() == [[6, 8, 10], [7, 9, 11]]
            assert row.tolist() == list(range(11))
        assert (
            torch.equal(ids, torch.arange(22).view(2, 11)) and ids[0].data_ptr() == row.data_ptr()
        )
        assert table.shape == (2, 6) and table.stride() == stride


@pytest.mark.parametrize("made_in", [False, True], ids=["plain", "inference"])
@pytest.mark.parametrize("entered_in", [False, True], ids=["plain", "inference"])
def test_tensors_of_inference_mode_stay_so_and_others_do_not_become_so(
    mesh: DeviceMesh, made_in: bool, entered_in: bool
) -> None:
    with torch.inference_mode(made_in):
        table, positions = torch.arange(8.0), torch.arange(8.0)
    context = cp_inductor.context_parallel(
        mesh, buffers=[table, positions], buffer_seq_dims=[0, 0], no_restore_buffers={positions}
    )
    with torch.inference_mode(entered_in), context, cp_inductor.per_rank():
        assert table.tolist() == positions.tolist() == [4, 5, 6, 7]
        assert table.is_inference() == positions.is_inference() == made_in
    assert table.tolist() == list(range(8)) and positions.tolist() == [4, 5, 6, 7]
    assert positions.untyped_storage().nbytes() == 4 * positions.itemsize  # nothing of the whole
    assert table.is_inference() == positions.is_inference() == made_in
    if not made_in:
        weight = torch.ones(8, requires_grad=True)
        (weight * table).sum().backward()
        assert torch.equal(weight.grad, table)


def test_nested_and_entered_again(mesh: DeviceMesh) -> None:
    ids, positions = torch.arange(8), torch.arange(8)
    outer = cp_inductor.context_parallel(mesh, buffers=[ids], buffer_seq_dims=[0])
    buffers = [ids, positions, positions]
    inner = cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0, 0, 0])
    with outer, outer, inner, cp_inductor.per_rank():
        assert ids.tolist() == positions.tolist() == [4, 5, 6, 7]
    assert ids.tolist() == positions.tolist() == list(range(8))

    @outer
    def function() -> list[int]:
        with cp_inductor.per_rank():
            return ids.tolist()

    assert function() == [4, 5, 6, 7]
    assert len(ids) == 8


def test_an_error_restores(mesh: DeviceMesh) -> None:
    ids = torch.arange(8)
    with (
        pytest.raises(KeyError),
        cp_inductor.context_parallel(mesh, buffers=[ids], buffer_seq_dims=[0]),
    ):
        raise KeyError
    assert len(ids) == 8
    query = torch.rand(1, 2, 4, 8)
    with Counts() as counts:
        F.scaled_dot_product_attention(query, query, query)
    assert counts.get_total_counts() == 0


def test_a_buffer_that_is_written_to(mesh: DeviceMesh) -> None:
    """As DDP does to those of a module, unless it is told not to."""
    table, other = torch.arange(8), torch.arange(8)
    kwargs = {"buffers": [table, other], "buffer_seq_dims": [0, 0], "no_restore_buffers": {other}}
    context = cp_inductor.context_parallel(mesh, **kwargs)
    with pytest.raises(cp_inductor.UnsupportedBuffer, match="broadcast_buffers=False"), context:
        table.add_(1)
    assert table.tolist() == list(range(8))
    with context:
        other.add_(1)
    assert other.tolist() == [7, 8]
    # Inputs and labels of one tensor, as in training code.
    inputs, labels = table[:-1], table[1:]
    both = cp_inductor.context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[0, 0])
    with both, cp_inductor.per_rank():
        assert inputs.tolist() == [4, 5, 6] and labels.tolist() == [5, 6, 7]
    assert inputs.tolist() == [*range(7)] and labels.tolist() == [*range(1, 8)]
    with pytest.raises(cp_inductor.UnsupportedBuffer, match="broadcast_buffers=False"), both:
        labels.add_(1)


class Mask(Tensor):
    pass


def region_of(mesh: DeviceMesh, function: Any = None, *given: Any, **how: Any) -> None:
    """Enter a region of a mesh, and call a function in it."""
    with cp_inductor.context_parallel(mesh, **how):
        if function is not None:
            function(*given)


def masked(mask: Tensor, query: Tensor, *key_and_value: Tensor, **how: Any) -> Tensor:
    key, value = key_and_value or (query, query)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)


def checkpointed_attention(query: Tensor) -> Tensor:
    return checkpoint(F.scaled_dot_product_attention, query, query, query, use_reentrant=False)


def begins_in_a_checkpoint(region: Any) -> Callable[[Tensor], Tensor]:
    """Return a model whose region Dynamo would have to enter in a body that it traces apart."""

    def attend(query: Tensor) -> Tensor:
        with region:
            return F.scaled_dot_product_attention(query, query, query)

    return lambda query: checkpoint(attend, query, use_reentrant=False)


def given_no_tensor(query: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a model with a body of which nothing could be marked: it closes over its query."""
    body = partial(F.scaled_dot_product_attention, query, query, query)
    return lambda number: number + checkpoint(body, use_reentrant=False)


# A call -> the class of its error: parts of the text.
REFUSALS = """
region(buffers=[x]) -> ValueError: 0 dims for 1 buffers
region(buffers=[x], buffer_seq_dims=[2]) -> ValueError: buffer 0 | 2
region(buffers=[x], buffer_seq_dims=[0], no_restore_buffers={y}) -> ValueError: among buffers
region(buffers=[nn.Parameter(x)], buffer_seq_dims=[0]) -> ValueError: leave it out
region(buffers=[x.clone().requires_grad_()], buffer_seq_dims=[0]) -> ValueError: leave it out
region(buffers=[distribute_tensor(x, mesh)], buffer_seq_dims=[0]) -> ValueError: leave it out
region(buffers=[x], buffer_seq_dims=["1"]) -> ValueError: a dim of a tensor of shape (4, 8) | got 1
region(buffers=[x], buffer_seq_dims=[1.0]) -> ValueError: a dim of a tensor of shape | got 1.0
region(buffers=[x], buffer_seq_dims=[True]) -> ValueError: a dim of a tensor of shape | got True
region(buffers=[x], buffer_seq_dims=[None]) -> ValueError: a dim of a tensor of shape | got None
region(buffers=x, buffer_seq_dims=[0]) -> ValueError: buffers=[tensor]
region(buffers=[x], buffer_seq_dims=0) -> ValueError: buffer_seq_dims=[0]
region_of("cp") -> InvalidArgument: expected a DeviceMesh | a str, 'cp'
region_of(DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("cp", "tp"))) -> UnsupportedPlacement: 1-D m
region(buffers=[torch.rand(7), torch.rand(8)], buffer_seq_dims=[0, 0]) -> UnevenSequence: [7, 8] | p
region(masked, None, q[:, :, :2], buffers=[torch.rand(7)], buffer_seq_dims=[0]) -> UnevenSequence: \
a shard of another length, (2,)
cp_inductor.shard(x, "cp") -> InvalidArgument: expected a DeviceMesh
cp_inductor.shard(x, DeviceMesh("cpu", [[0, 1]])) -> UnsupportedPlacement: 1-D mesh
cp_inductor.shard(x, mesh, 2) -> InvalidArgument: shard: expected a dim of | (4, 8) | got 2
cp_inductor.shard(shards, mesh, 0) -> InvalidArgument: expected a plain tensor
cp_inductor.unshard(shards, 5) -> InvalidArgument: unshard: expected a dim
cp_inductor.unshard(x, 0) -> InvalidArgument: expected a DTensor
cp_inductor.context_parallel_unshard(mesh, [x], [-3]) -> InvalidArgument: expected a dim
cp_inductor.context_parallel_unshard(mesh, [x], [0, 0]) -> InvalidArgument: 2 dims for 1 buffers
region(lambda: masked(m, q, is_causal=True)) -> UnsupportedAttention: include causality in the mask
region(masked, m.expand(3, 8, 8), q) -> UnsupportedAttention: broadcasts to (1, 2, 8, 8)
region(masked, m[:4, :4], q) -> UnsupportedAttention: over the whole sequence, (8, 8)
region(masked, bias, q) -> UnsupportedAttention: an attn_mask without a gradient
region(masked, m, q, q[:, :1], q[:, :1]) -> UnsupportedAttention: enable_gqa=True
region(masked, m.as_subclass(Mask), q) -> UnsupportedAttention: a Mask
region(nn.MultiheadAttention(8, 2), q[0], q[0], q[0]) -> UnsupportedAttention: need_weights=False
region(flex.flex_attention, q, q, q) -> UnsupportedAttention: compile the function that calls
region(compiled_mask, m[:4, :4], q) -> Unsupported: an attn_mask over the whole sequence
region(compiled_mask, bias, q) -> Unsupported: an attn_mask without a gradient
region(whole_graph(given_no_tensor(leaf)), x[0, 0]) -> Unsupported: expected a tensor among the arg
region(torch.compile(checkpointed_attention, backend="aot_eager"), leaf) -> UnsupportedAttention: \
backend='cp_inductor'
whole_graph(begins_in_a_checkpoint(cp_inductor.context_parallel(mesh)))(q) -> Unsupported: how to \
enter a `context_parallel`
whole_graph(begins_in_a_checkpoint(cp_inductor.local_attention()))(q) -> Unsupported: Unsafe side ef
"""


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("row", REFUSALS.split("\n")[1:-1])
def test_refusals(mesh: DeviceMesh, row: str) -> None:
    call, _, said = row.partition(" -> ")
    error, _, parts = said.partition(": ")
    if not torch.__version__.startswith("2.13."):  # torch 2.15 refuses the checkpoint itself
        parts = parts.replace("how to enter a `context_parallel`", "torch.utils.checkpoint")
    x, m = torch.rand(4, 8), torch.ones(8, 8, dtype=torch.bool)
    names: dict[str, Any] = {**globals(), **vars(cp_inductor), "Unsupported": Unsupported}
    names |= {"mesh": mesh, "region": partial(region_of, mesh), "x": x, "y": torch.rand(4, 8)}
    names |= {"q": torch.rand(1, 2, 4, 8), "m": m, "bias": torch.rand(8, 8, requires_grad=True)}
    names |= {"shards": cp_inductor.shard(x, mesh, 0), "ValueError": ValueError, "flex": flex}
    names["whole_graph"] = partial(torch.compile, backend=cases.AOT, fullgraph=True)
    names["compiled_mask"] = names["whole_graph"](masked)
    names["leaf"] = torch.rand(1, 2, 4, 8, requires_grad=True)
    with pytest.raises(names[error]) as refused:
        eval(call, names)
    assert isinstance(refused.value, (cp_inductor.CPError, Unsupported))
    assert [part for part in parts.split(" | ") if part not in str(refused.value)] == []
    assert x.shape == (4, 8)


# Whole models


def check_step(
    mesh: DeviceMesh, model: cases.Decoder, run: nn.Module, batch: tuple[Tensor, ...]
) -> None:
    """Train on shards, the backward behind the region: all is as on one process."""
    alone = cases.make_model(num_layers=len(model.layers))
    expected = alone(*batch[:2])
    F.cross_entropy(expected.mT, batch[2], reduction="sum").backward()
    with cases.shards_of(batch, mesh) as buffers:
        ids, positions, labels = (tensor.clone() for tensor in buffers)
        logits = run(ids, positions)
        # Shards differ in length: the sum.
        part = F.cross_entropy(logits.mT, labels, reduction="sum")
    (mesh.size() * part).backward()
    assert all(map(torch.equal, buffers, batch))
    (logits,) = cp_inductor.context_parallel_unshard(mesh, [logits], [1])
    torch.testing.assert_close(logits, expected)
    cases.assert_grads(cases.averaged_grads(model, mesh["cp"]), cases.grads_of(alone))


def check_model(form: str, length: int, kind: str = "") -> None:
    model = cases.make_model(num_layers=cases.layers_of(form))
    if kind == "break inside":
        for block in model.layers:
            block.out.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    if kind == "one block in eager":
        first = model.layers[0]
        first.forward = torch.compiler.disable(first.forward)
    mesh = cases.make_mesh(dist.get_world_size(), names=("cp",))
    run = cases.compiled(model, form, fullgraph=not kind)
    with torch.compiler.set_stance("force_eager" if kind == "force_eager" else "default"):
        check_step(mesh, model, run, cases.make_batch(length=length))
    cases.assert_rewritten(cases.EAGER if kind == "force_eager" else form)


@cases.combination("context_parallel: buffers sharded in place", *cases.FORMS)
def test_model(form: str) -> None:
    # What is compiled takes its time: the odd length alone, and C++ on fewer ranks.
    for length in (12, 11) if form == cases.EAGER else (11,):
        run_ranks(2 if form == cases.COMPILED else 3, check_model, form, length)


def check_one_attention(form: str, attention: Callable[..., Tensor], **sizes: Any) -> None:
    """One attention, its backward after the context was left."""

    def model(*tensors: Tensor) -> Tensor:
        return attention(*tensors, is_causal=True, enable_gqa=True)

    region = cp_inductor.context_parallel(cases.make_mesh(2, names=("cp",)))
    whole = make_qkv(10, num_kv_heads=2, **sizes)
    check_shards(cases.compiled(model, form), whole, region, is_causal=True)


@pytest.mark.parametrize("form", [cases.EAGER, cases.AOT])
def test_attention_that_was_imported_before(form: str) -> None:
    run_ranks(2, check_one_attention, form, imported_attention)


@on_ranks(2)
def test_sizes_for_which_sdpa_calls_no_flash_kernel() -> None:
    check_one_attention(cases.EAGER, F.scaled_dot_product_attention, head_dim=1)
    check_one_attention(cases.EAGER, F.scaled_dot_product_attention, batch=0)


@pytest.mark.parametrize("form", [cases.EAGER, cases.AOT])
@on_ranks(3)
def test_a_length_that_the_outer_knows(form: str) -> None:
    """A nested context brings a length of its own; the attention is over that of the outer."""
    mesh = cases.make_mesh(3, names=("cp",))
    whole = make_qkv(11, num_kv_heads=2)  # as shards of 4, 4 and 3
    outer = {"buffers": [torch.arange(11)], "buffer_seq_dims": [0]}
    inner = {"buffers": [torch.arange(20)], "buffer_seq_dims": [0]}  # as shards of 7, 7 and 6
    context = cp_inductor.context_parallel

    def run(*pieces: Tensor) -> Tensor:
        with context(mesh, **outer), context(mesh, **inner):
            return cases.compiled(attend_causal, form)(*pieces)

    check_shards(run, whole, is_causal=True)


def checkpointed(model: cases.Decoder, kind: str) -> nn.Module:
    """Put every block under a checkpoint, by one of torch's ways."""
    if kind == "composable":
        for layer in model.layers:
            composable_checkpoint(layer)
        return model
    impl = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT
    cases.checkpoint_layers(model, checkpoint_impl=impl)
    return checkpoint_wrapper(model) if kind == "nested" else model


@pytest.mark.parametrize(
    "kind", ["reentrant", "non-reentrant", "nested", "composable", "compiled blocks"]
)
@on_ranks(3)
def test_recomputation_behind_the_context(kind: str) -> None:
    """The forward runs again in a backward behind the context, and still over all shards."""
    model = cases.make_model()
    if kind == "compiled blocks":
        for block in model.layers:
            block.compile(backend=cases.AOT, fullgraph=True)
    # As 4, 4 and 3 tokens.
    batch = cases.make_batch(length=11)
    check_step(cases.make_mesh(3, names=("cp",)), model, checkpointed(model, kind), batch)
    cases.assert_rewritten(cases.AOT if kind == "compiled blocks" else cases.EAGER)


# Eager between compiled pieces


@cases.combination(
    "graph breaks, disabled functions, set_stance('force_eager')",
    cases.AOT,
    cases.COMPILED,
    eager=cases.NOTHING,
)
def test_eager_between_graphs(form: str) -> None:
    kinds = ["break inside", "one block in eager", "force_eager"]
    for kind in kinds[:1] if form == cases.COMPILED else kinds:
        run_ranks(2, check_model, form, 12, kind)


@on_ranks(2)
def test_compiled_code_knows_where_it_runs() -> None:
    """One compiled function, in the region and out of it, over sequences of several lengths."""
    mesh = cases.make_mesh(2, names=("cp",))
    rank = dist.get_rank()
    torch.manual_seed(rank)

    def model(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    run = cases.compiled(model, cases.AOT, fullgraph=True, dynamic=False)
    for length in (10, None, 11, 9, None, 10):
        query = make_qkv(length or 10)[0]
        piece = shard(query, rank, 2).contiguous()
        if length is None:
            expected = model(piece)
            out = run(piece)
        else:
            expected = shard(model(query), rank, 2)
            buffers = [torch.zeros(length)]
            with cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0]):
                out = run(piece)
        torch.testing.assert_close(out, expected)


# Masks and dropout


def make_masks(length: int) -> dict[str, Tensor]:
    scores = torch.randn(1, 4, length, length, generator=torch.Generator().manual_seed(9))
    bias, places = scores.masked_fill(scores > 1, -torch.inf), torch.arange(length)
    return {
        "pairs": (scores[0, 0] > 0) & (places > 0)[:, None],  # the first query sees nothing
        "bias of heads": bias,
        "padding": (places < torch.tensor([[7], [11]]))[:, None, None],
        "bias": bias[:, :1],
    }


@pytest.mark.parametrize("form", [cases.EAGER, pytest.param(cases.AOT, marks=pytest.mark.slow)])
@on_ranks(3)
def test_masks_of_the_whole_sequence(form: str) -> None:
    mesh = cases.make_mesh(3, names=("cp",))
    whole = make_qkv(11, num_kv_heads=2)
    for kind, mask in [*make_masks(11).items()][: None if form == cases.EAGER else 2]:
        named = {"allowed" if mask.dtype == torch.bool else "bias": mask}
        run = partial(cases.compiled(masked, form, fullgraph=True), mask, enable_gqa=True)
        buffers = {"buffers": [torch.arange(11)], "buffer_seq_dims": [0]}
        check_shards(run, whole, cp_inductor.context_parallel(mesh, **buffers), kind, **named)


@pytest.mark.parametrize("form", [cases.EAGER, cases.AOT])
@on_ranks(2)
def test_mask_objects(form: str) -> None:
    """Under torch's mask objects, which hold no data; values have fewer features than queries."""
    mesh = cases.make_mesh(2, names=("cp",))
    generator = torch.Generator().manual_seed(5)
    for num_keys, make in ((10, causal_upper_left), (14, causal_lower_right)):
        sizes = ((10, 8), (num_keys, 8), (num_keys, 5), (10, 5))
        whole = [torch.randn(2, 4, *size, generator=generator).double() for size in sizes]
        run = partial(cases.compiled(masked, form, fullgraph=True), make(10, num_keys))
        allowed = torch.ones(10, num_keys, dtype=torch.bool).tril(num_keys - 10)
        check_shards(run, whole, cp_inductor.context_parallel(mesh), allowed=allowed)


@on_ranks(2)
def test_autocast_over_a_mask() -> None:
    """What autocast casts is computed as if it had come so."""
    mesh = cases.make_mesh(2, names=("cp",))
    pieces = [shard(tensor, dist.get_rank(), 2) for tensor in make_qkv(10)[:3]]
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    for kwargs in ({"attn_mask": mask}, {"dropout_p": 0.5, "is_causal": True}):
        results = []
        for dtype, is_cast in ((torch.float32, True), (torch.bfloat16, False)):
            torch.manual_seed(4)
            leaves = [piece.to(dtype, copy=True).requires_grad_() for piece in pieces]
            with (
                cp_inductor.context_parallel(mesh),
                torch.autocast("cpu", torch.bfloat16, enabled=is_cast),
            ):
                out = F.scaled_dot_product_attention(*leaves, **kwargs)
                out.backward(torch.ones_like(out))
            results.append([out.detach(), *(leaf.grad.bfloat16() for leaf in leaves)])
        assert results[0][0].dtype == torch.bfloat16
        assert all(map(torch.equal, *results))


def test_a_mask_beside_a_length_that_is_a_symbol(mesh: DeviceMesh) -> None:
    """Dynamo writes no symbol into an error, and finds no number among symbols."""
    query = torch.rand(1, 2, 4, 8)
    torch._dynamo.maybe_mark_dynamic(query, 2)
    mask = torch.rand(8, 8) < 0.5
    part = mask[:4, :4]
    with cp_inductor.context_parallel(mesh):
        run = torch.compile(masked, backend=cases.AOT, fullgraph=True)
        assert run(mask, query).shape == query.shape
        torch._dynamo.reset()
        words = "an attn_mask over the whole sequence, got one"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            run(part, query)


def test_groups_of_heads_that_ranks_part() -> None:
    """12 query heads and 3 key heads over 2 ranks: 6 query heads would meet 2 key heads."""
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))

        def heads(number: int, local: int) -> DTensor:
            shape = torch.Size((1, number, 4, 8))
            stride = torch.empty(shape).stride()
            part = torch.zeros(1, local, 4, 8)
            return DTensor.from_local(
                part, mesh["tp"], [Shard(1)], run_check=False, shape=shape, stride=stride
            )

        query, key = heads(12, 6), heads(3, 2)
        refused = pytest.raises(
            cp_inductor.UnsupportedPlacement, match=r"12 query heads .*3 key heads"
        )
        with cp_inductor.context_parallel(mesh["cp"]), refused:
            F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


# --- Attention that is left alone on purpose, whatever is around it.


def both(query: Tensor) -> tuple[Tensor, Tensor]:
    """The same attention twice, once left alone."""
    with cp_inductor.local_attention():
        local = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    return local, F.scaled_dot_product_attention(query, query, query, is_causal=True)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, kind) for form in (cases.EAGER, cases.AOT) for kind in ("context", "dtensor")),
        (cases.AOT, "mesh"),
    ],
)
@on_ranks(2)
def test_attention_left_alone(form: str, kind: str) -> None:
    mesh = cases.make_mesh(2, names=("cp",))
    rank = dist.get_rank()
    query = make_qkv(10)[0]
    piece = shard(query, rank, 2).contiguous()
    options = {"mesh": mesh} if kind == "mesh" else {}
    run = cases.compiled(both, form, fullgraph=True, options=options)
    if kind == "context":
        with cp_inductor.context_parallel(mesh):
            local, out = run(piece)
    else:
        local, out = run(distribute_tensor(query, mesh, [Shard(2)]) if kind == "dtensor" else piece)
    if kind == "dtensor":
        assert isinstance(local, DTensor) and local.placements == (Shard(2),)
        local, out = local.to_local(), out.to_local()
    expected = attend(query, query, query, is_causal=True)
    alone = attend(piece, piece, piece, is_causal=True)
    torch.testing.assert_close(local, alone.float())
    torch.testing.assert_close(out, shard(expected, rank, 2).float())
    assert rank == 0 or not torch.allclose(local, out)


def checkpoint_alone(query: Tensor) -> Tensor:
    with cp_inductor.local_attention():
        return checkpoint(F.scaled_dot_product_attention, *[query] * 3, use_reentrant=False)


def test_what_cannot_be_left_alone_is_refused(mesh: DeviceMesh) -> None:
    query = distribute_tensor(torch.rand(1, 2, 8, 8), mesh, [Shard(2)])
    attention = nn.MultiheadAttention(8, 2)

    with cp_inductor.local_attention(), pytest.raises(cp_inductor.UnsupportedAttention):
        F.multi_head_attention_forward(query, query, query, 8, 2, *[None] * 9)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass their to_local"):
        torch.compile(checkpoint_alone, backend=cases.AOT, fullgraph=True)(query)
    # For plain tensors it holds in there, too.
    with cp_inductor.local_attention():
        piece = torch.rand(4, 2, 8)
        attention(piece, piece, piece, need_weights=False)


@pytest.mark.parametrize("form", [cases.EAGER, cases.AOT])
@on_ranks(2)
def test_a_checkpoint_left_alone(form: str) -> None:
    """The body of a checkpoint is traced out of reach of regions: left alone all the same."""
    mesh = cases.make_mesh(2, names=("cp",))
    query = make_qkv(10)[0]
    piece = shard(query, dist.get_rank(), 2).contiguous().requires_grad_()

    with cp_inductor.context_parallel(mesh):
        out = cases.compiled(checkpoint_alone, form, fullgraph=True)(piece)
    out.sum().backward()
    torch.testing.assert_close(out, attend(piece, piece, piece).float())
