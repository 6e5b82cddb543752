"""Lengths that change from call to call: one graph for all that divide by the ranks.

More than 90 s of CPU with its long cases: each case compiles on every rank, up to four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing import assert_close

import cp_inductor
from cp_inductor import UnsupportedAttention, prepared, reset
from tests.support.graphs import attend_causal
from tests.support.packed import (
    difference,
    in_documents,
    in_window,
    make_batch,
    make_model,
    shards_of,
    train_step,
)
from tests.support.ranks import fake_mesh, on_ranks, run_ranks, world_mesh
from tests.support.reference import check_shards, full, make_qkv, on_mesh, with_grads


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world_size", "backend", "lengths"),
    [
        ("mistral", 3, "cp_aot_eager", (97, 181, 49, 115)),  # a window; no length divides
        ("llama", 2, "cp_inductor", (96, 180, 48)),
    ],
)
@on_ranks("world_size")
def test_a_model_over_many_lengths(
    name: str, world_size: int, backend: str, lengths: tuple[int, ...]
) -> None:
    """One graph; batches behind the first are planned ahead."""
    reset()  # other tests were here before, and batches would be prepared for their models as well
    mesh = world_mesh()
    model, reference = make_model(name, layers=1), make_model(name, layers=1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = counters["cp_inductor"]
    for step, length in enumerate(lengths):
        batch = make_batch(step, length)
        sharded = shards_of(batch, mesh)
        for tensor in sharded.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        num_prepared = found["plans_prepared"]
        list(prepared([batch]))
        num_planned = found["batches_planned"]
        result = train_step(
            compiled, reference, batch, sharded, partial(assert_close, rtol=1e-6, atol=1e-7)
        )
        if found["plans_prepared"] > num_prepared:
            assert found["batches_planned"] == num_planned, "planned again"
        assert result.logits.placements == (Shard(1),)
    assert counters["stats"]["unique_graphs"] == 1
    assert found["plans_prepared"] == len(lengths) - 1


# --- One attention ------------------------------------------------------------------------------


def before(least: int, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend in documents, to keys of the first half, but of so many at the least."""
    length = query.shape[2]
    place = torch.arange(length, device=query.device)
    first = torch.sym_max(length // 2, least)
    mask = (documents[:, None, :, None] == documents[:, None, None]) & (place < first)
    mask = mask | (place[:, None] == place)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def unlike_at_some(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend in documents, and at every eleventh even length to the first keys as well."""
    length = query.shape[2]
    place = torch.arange(length, device=query.device)
    mask = documents[:, None, :, None] == documents[:, None, None]
    mask = mask | (place < torch.sym_max(length % 22 - 18, 0))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def falling(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend in documents, with scores that fall with the distance, as in ALiBi.

    Below autograd, where graphs run, `torch.tensor` is another op than above it.
    """
    place = torch.arange(query.shape[2], device=query.device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=query.dtype, device=query.device)
    bias = slopes[:, None, None] * (place[None] - place[:, None])
    mask = (documents[:, None, :, None] == documents[:, None, None]) & (place <= place[:, None])
    bias = bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def across(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend within the keys, then from the queries to them, under the padding of the keys.

    As an encoder-decoder does; its table is a DTensor whose shards differ in length.
    """
    mask = (documents % 3 < 2)[:, None, None]
    key = F.scaled_dot_product_attention(key, key, value, attn_mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def causal(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    return attend_causal(query, key, value)


def of_whole_length(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Read how long the whole is, as a mean does."""
    return attend_causal(query, key, value) * (10 / query.shape[2])


def behind_a_layer(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend behind a linear layer, which flattens the batch and the sequence."""
    width = query.shape[1] * query.shape[3]
    weight = torch.linspace(-1, 1, width * width, dtype=query.dtype).view(width, width)
    projected = F.linear(query.transpose(1, 2).flatten(2), weight)
    return attend_causal(projected.unflatten(2, (-1, 8)).transpose(1, 2), key, value)


Lengths = Sequence[int | tuple[int, int]]
ONE_AXIS: tuple[tuple[str, Placement], ...] = (("cp", Shard(2)),)


def _draw(length: int | tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """Return query, key, value and a gradient, and documents of the keys."""
    queries, keys = length if isinstance(length, tuple) else (length, length)
    shapes = ((4, queries), (2, keys), (2, keys), (4, queries))
    whole = [torch.randn(2, *shape, 8).double() for shape in shapes]
    return whole, (torch.rand(2, keys) < 0.1).cumsum(-1)


def _attend(
    function: Callable[..., Tensor],
    lengths: Lengths,
    axes: tuple[tuple[str, Placement], ...] = ONE_AXIS,
    *,
    is_marked: bool = True,
    dynamic: bool | None = None,
    of_replicas: tuple[Lengths, ...] = (),
) -> tuple[list[float | str], int]:
    """Return how far off each length is, or why it was refused, and the number of graphs."""
    names, placements = zip(*axes, strict=True)
    mesh: DeviceMesh = world_mesh()
    if of_replicas:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        lengths, mesh = of_replicas[both["dp"].get_local_rank()], both["cp"]
    elif len(axes) == 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    # A table has the batch and the tokens of (batch, heads, tokens, features).
    of_table = [{0: Shard(0), 1: Replicate(), 2: Shard(1)}[place.dim] for place in placements]
    compiled = torch.compile(function, backend="cp_aot_eager", fullgraph=True, dynamic=dynamic)
    torch.manual_seed(7)
    found: list[float | str] = []
    for length in lengths:
        whole, table = _draw(length)
        how = (mesh, placements, of_table)
        try:
            found.append(difference(function, compiled, whole, [table], *how, is_dynamic=is_marked))
        except UnsupportedAttention as error:
            found.append(str(error))
    return found, counters["stats"]["unique_graphs"]


WINDOWED = partial(in_window, window=5)
CHANGING = (24, 12, 15, 16)  # rank 0 holds 8 tokens of 15 and of 16, which look alike to Dynamo
UNMARKED: dict[str, Any] = {"is_marked": False}
# What attends, over which lengths, how, on how many ranks, and the number of graphs.
ATTENTIONS = {
    # If a mask differs at each length, each length has its graph; or else both sides.
    "another mask at each length": (partial(before, 10), (96, 180), {}, 2, 2),
    "another mask beyond one": (partial(before, 500), (96, 180, 1000, 1002, 64), {}, 2, 2),
    "numbers of its own": (falling, (96, 180, 48), {}, 2, 1),
    "queries of two lengths": (across, ((97, 65), (181, 65)), {}, 2, 1),
    # By itself, Dynamo makes symbols from the second length on.
    "unmarked": (causal, CHANGING, UNMARKED, 2, 3),
    "unmarked, static": (causal, CHANGING, {"dynamic": False}, 2, 2),
    "unmarked window": (WINDOWED, CHANGING, UNMARKED, 2, 4),
    "behind a layer, unmarked": (behind_a_layer, (12, 16, 15, 20), UNMARKED, 2, 3),
    # Rank 0 holds 11 tokens of 21 and of 22; Dynamo by itself would not look at the whole.
    "whole lengths": (of_whole_length, (21, 22, 21, 24, 23), {**UNMARKED, "dynamic": False}, 2, 4),
    # The last of three ranks has one of 7 tokens, and none of 4.
    "one token or none": (in_documents, (97, 7, 4, 181), {}, 3, 3),
    **{
        f"beside {names}": (in_documents, (97, 33), {"axes": axes}, 4, 1)
        for names, axes in (
            ("heads", (("cp", Shard(2)), ("tp", Shard(1)))),
            ("a batch", (("dp", Shard(0)), ("cp", Shard(2)))),
        )
    },
    # One compiles while the other does not.
    "replicas with lengths of their own": (
        *(in_documents, (), {"of_replicas": ((96, 97, 48), (97, 33, 64))}),
        *(4, 2),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ATTENTIONS)
def test_one_attention(name: str) -> None:
    function, lengths, how, ranks, expected = ATTENTIONS[name]
    results = run_ranks(ranks, partial(_attend, **how), function, lengths)
    assert max(max(found) for found, _ in results) < 1e-12
    # Ranks that always hold more than one token need a graph less.
    fewer = {expected - 1} if name == "one token or none" else set()
    assert {num_graphs for _, num_graphs in results} == {expected, *fewer}


@pytest.mark.long
def test_a_mask_that_is_another_at_a_length_between_is_refused() -> None:
    for found, num_graphs in run_ranks(2, _attend, unlike_at_some, (96, 196, 180)):
        right, refused, again = found
        assert max(right, again) < 1e-12
        assert "another one at 196 queries and 196 keys" in refused
        assert "dynamic=False" in refused
        assert num_graphs == 1


@pytest.mark.long
@on_ranks(2)
def test_backwards_in_another_order_than_forwards() -> None:
    """As where gradients are accumulated, and losses are summed up before the backward."""
    mesh, given = world_mesh(), [_draw(length) for length in (96, 180, 48)]
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    begun = []
    for whole, documents in given:
        *shards, grad = on_mesh(whole, mesh, Shard(2))
        table = distribute_tensor(documents, mesh, [Shard(1)])
        for tensor, dim in (*((one.requires_grad_(), 2) for one in shards), (table, 1)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with implicit_replication():
            begun.append((compiled(*shards, table), shards, grad))
    for place in (2, 0, 1):
        whole, documents = given[place]
        out, shards, grad = begun[place]
        expected = with_grads(partial(in_documents, documents=documents), whole)
        found = (out.detach(), *torch.autograd.grad(out, shards, grad))
        for one, other in zip(found, expected, strict=True):
            assert_close(full(one), other, rtol=0, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@on_ranks(2)
def test_one_graph_for_lengths_of_plain_shards() -> None:
    torch.compiler.set_default_backend("cp_aot_eager")
    torch.compiler.set_enable_guard_collectives(True)
    run = torch.compile(attend_causal, fullgraph=True, options={"mesh": world_mesh()})

    def marked(*leaves: Tensor) -> Tensor:
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf, 2)
        return run(*leaves)

    for length in (32, 40, 64, 122):
        check_shards(marked, make_qkv(length, batch=1, head_dim=16), is_causal=True)
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.set_default_backend(None)
    torch.compiler.set_enable_guard_collectives(False)


def first_token(x: Tensor) -> Tensor:
    pooled = x.sum(1) + ((x @ x.mT).tanh() @ x).sum(1)  # strides are squares of the length
    pooled += x[:, 0]
    pooled += F.embedding((x % 4).long()[:, 0], (x.mT @ x).tanh().sum(0)).sum(1)
    return x + pooled[:, None] + x[:, -1].unsqueeze(1)


@on_ranks(2)
def test_one_token_of_a_length_that_is_a_symbol() -> None:
    """It has numbers as sizes, and symbols as strides, which have no hash."""
    compiled = torch.compile(first_token, backend="cp_aot_eager", fullgraph=True)
    for length in (9, 16, 40):
        whole = torch.arange(12.0 * length).view(3, length, 4)
        (sharded,) = on_mesh([whole], world_mesh(), Shard(1))
        torch._dynamo.mark_dynamic(sharded, 1)
        results = []
        for function, x in ((compiled, sharded), (first_token, whole)):
            out = function(x.requires_grad_())
            results.append((out, *torch.autograd.grad(out, x, out.detach())))
        for found, expected in zip(*results, strict=True):
            assert_close(full(found), expected)


@on_ranks(2)
def test_a_length_that_does_not_divide_is_still_refused() -> None:
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)
    for length in (12, 14, 15):
        tensors = on_mesh(make_qkv(length)[:3], world_mesh(), Shard(2))
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 2)
        if length % 2:
            with pytest.raises(cp_inductor.UnevenSequence, match="length"):
                compiled(*tensors)
        else:
            compiled(*tensors)


@pytest.mark.parametrize("attend", [attend_causal, WINDOWED])
def test_a_symbol_that_became_a_number_is_guarded(attend: Any) -> None:
    """Rank 0 holds 8 of 15 and of 16 tokens; torch guards local sizes that became numbers."""

    def embed_and_attend(table: Any, ids: Any) -> Any:
        heads = F.embedding(ids, table)[:, None]
        return attend(heads, heads, heads)

    with fake_mesh(0, 2) as mesh:
        table = distribute_tensor(torch.zeros(4, 8), mesh, [Replicate()])
        run = torch.compile(embed_and_attend, backend="cp_aot_eager", fullgraph=True, dynamic=False)
        for length in (12, 15, 16):
            ids = torch.zeros(1, length, dtype=torch.int64)
            shards = distribute_tensor(ids, mesh, [Shard(1)])
            torch._dynamo.maybe_mark_dynamic(shards, 1)
            with implicit_replication():
                assert run(table, shards).shape == (1, 1, length, 8)


# --- What DTensor chooses is remembered within a compile ------------------------------------------


def _zeros(states: Tensor) -> Tensor:
    """Return zeros of both signs, which DTensor makes of the arguments that it chose."""
    positive = states.new_full(states.shape, 0.0)
    return torch.copysign(torch.ones_like(states), states.new_full(states.shape, -0.0)) + positive


def test_numbers_that_are_equal_are_not_taken_for_each_other() -> None:
    with fake_mesh(0, 2) as mesh:
        local = torch.linspace(-1, 1, 49 * 4).view(1, 49, 4)
        states = DTensor.from_local(local, mesh, [Shard(1)], shape=(1, 97, 4), stride=(388, 4, 1))
        torch._dynamo.mark_dynamic(states, 1)
        compiled = torch.compile(_zeros, backend="cp_aot_eager", fullgraph=True)
        assert_close(compiled(states).to_local(), _zeros(local))
    propagator = DTensor._op_dispatcher.sharding_propagator
    assert "propagate_op_sharding_non_cached" not in vars(propagator)
