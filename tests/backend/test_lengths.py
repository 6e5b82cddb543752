"""Lengths that change from call to call: one graph for all that divide by the ranks.

More than 90 s of CPU with its long cases: each case compiles on every rank, up to four.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing import assert_close

from cp_inductor import UnsupportedAttention, prepared, reset
from tests.support.packed import (
    difference,
    in_documents,
    make_batch,
    make_model,
    shards_of,
    train_step,
)
from tests.support.ranks import fake_rank, run_ranks, world_mesh
from tests.support.reference import full

EVEN = (96, 180, 48, 306)
UNEVEN = (97, 181, 49, 115)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "world_size", "backend", "lengths", "num_graphs"),
    [
        ("llama", 1, 2, "cp_aot_eager", EVEN, 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("llama", 2, 3, "cp_aot_eager", UNEVEN, 1),
                ("llama", 2, 2, "cp_aot_eager", EVEN + UNEVEN, 2),
                ("llama", 2, 2, "cp_inductor", EVEN + UNEVEN, 2),
                ("mistral", 2, 2, "cp_aot_eager", EVEN, 1),
                ("qwen3", 2, 2, "cp_aot_eager", EVEN, 1),
            )
        ),
    ],
)
def test_a_model_over_many_lengths(
    name: str,
    layers: int,
    world_size: int,
    backend: str,
    lengths: tuple[int, ...],
    num_graphs: int,
) -> None:
    """Batches behind the first of a graph are planned ahead."""
    for graphs, num_prepared in run_ranks(world_size, _train, name, layers, backend, lengths):
        assert graphs == num_graphs
        assert num_prepared == len(lengths) - num_graphs


def _train(name: str, layers: int, backend: str, lengths: tuple[int, ...]) -> tuple[int, int]:
    reset()  # other tests were here before, and batches would be prepared for their models as well
    mesh = world_mesh()
    model, reference = make_model(name, layers), make_model(name, layers)
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
    return counters["stats"]["unique_graphs"], found["plans_prepared"]


def test_logits_of_all_tokens_stay_shards() -> None:
    """What transformers' models cut, x[:, slice(0, None)], is the whole dim, of whatever length."""
    weight = torch.randn(5, 8, requires_grad=True)
    project = torch.compile(
        lambda x: F.linear(x[:, slice(0, None), :], weight), backend="cp_aot_eager", fullgraph=True
    )
    with fake_rank(0, 2), implicit_replication():
        x = distribute_tensor(torch.randn(1, 96, 8), init_device_mesh("cpu", (2,)), [Shard(1)])
        torch._dynamo.mark_dynamic(x, 1)
        leaf = x.requires_grad_()
        out = project(leaf)
        out.sum().backward()
        assert out.placements == leaf.grad.placements == (Shard(1),)


# --- Masks that depend on the length ------------------------------------------------------------


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


def _attend(
    function: Callable[..., Tensor], lengths: tuple[int, ...]
) -> tuple[list[float | str], int]:
    mesh = world_mesh()
    compiled = torch.compile(function, backend="cp_aot_eager", fullgraph=True)
    torch.manual_seed(7)
    found: list[float | str] = []
    for length in lengths:
        whole = [torch.randn(1, heads, length, 8).double() for heads in (4, 2, 2, 4)]
        documents = (torch.rand(1, length) < 0.1).cumsum(-1)
        try:
            found.append(difference(function, compiled, whole, [documents], mesh, is_dynamic=True))
        except UnsupportedAttention as error:
            found.append(str(error))
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_mask_that_is_another_beyond_some_length() -> None:
    """If a mask differs at each length, each length has its graph; or else both sides."""
    for found, num_graphs in run_ranks(2, _attend, partial(before, 10), (96, 180)):
        assert max(found) < 1e-12
        assert num_graphs == 2
    lengths = (96, 180, 1000, 1002, 64)
    for found, num_graphs in run_ranks(2, _attend, partial(before, 500), lengths):
        assert max(found) < 1e-12
        assert num_graphs == 2


@pytest.mark.slow
def test_a_mask_that_is_another_at_a_length_between_is_refused() -> None:
    for found, num_graphs in run_ranks(2, _attend, unlike_at_some, (96, 196, 180)):
        right, refused, again = found
        assert max(right, again) < 1e-12
        assert "another one at 196 queries and 196 keys" in refused
        assert "dynamic=False" in refused
        assert num_graphs == 1


def falling(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Attend in documents, with scores that fall with the distance, as in ALiBi."""
    place = torch.arange(query.shape[2], device=query.device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=query.dtype, device=query.device)
    bias = slopes[:, None, None] * (place[None] - place[:, None])
    mask = (documents[:, None, :, None] == documents[:, None, None]) & (place <= place[:, None])
    bias = bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


@pytest.mark.slow
def test_a_mask_with_numbers_of_its_own_is_read_when_the_graph_runs() -> None:
    """Below autograd, where graphs run, `torch.tensor` is another op than above it."""
    for found, num_graphs in run_ranks(2, _attend, falling, (96, 180, 48)):
        assert max(found) < 1e-12
        assert num_graphs == 1


# --- Other axes, and other orders ---------------------------------------------------------------


def _begin(
    compiled: Callable[..., Tensor], mesh: DeviceMesh, length: int, places: list[Any]
) -> Callable[[], float]:
    """Run the forward; return what runs the backward, and says how far off both are."""
    query, grad_out = (torch.randn(2, 4, length, 8).double() for _ in range(2))
    whole = [query, *(torch.randn(2, 2, length, 8).double() for _ in range(2))]
    documents = (torch.rand(2, length) < 0.1).cumsum(-1)
    leaves = [one.clone().requires_grad_() for one in whole]
    expected = in_documents(*leaves, documents)
    expected.backward(grad_out)
    # A table has the batch and the tokens of (batch, heads, tokens, features).
    of_table = [{0: Shard(0), 1: Replicate(), 2: Shard(1)}[place.dim] for place in places]
    shards = [distribute_tensor(one, mesh, places).requires_grad_() for one in whole]
    table = distribute_tensor(documents, mesh, of_table)
    for one in shards:
        torch._dynamo.maybe_mark_dynamic(one, 2)
    torch._dynamo.maybe_mark_dynamic(table, 1)
    with implicit_replication():
        out = compiled(*shards, table)
    assert isinstance(out, DTensor) and list(out.placements) == places

    def end() -> float:
        out.backward(distribute_tensor(grad_out, mesh, places))
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(shards, leaves, strict=True))]
        return max(float((full(a) - b).abs().max()) for a, b in pairs)

    return end


def _end_in_order(lengths: tuple[int, ...], order: tuple[int, ...]) -> tuple[float, int]:
    mesh = world_mesh()
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    ends = [_begin(compiled, mesh, length, [Shard(2)]) for length in lengths]
    worst = max(ends[place]() for place in order)
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_backwards_in_another_order_than_forwards() -> None:
    """As where gradients are accumulated, and losses are summed up before the backward."""
    for worst, num_graphs in run_ranks(2, _end_in_order, (96, 180, 48), (2, 0, 1)):
        assert worst < 1e-12
        assert num_graphs == 1


def _attend_beside(names: tuple[str, str], places: list[Any]) -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    worst = max(_begin(compiled, mesh, length, places)() for length in (96, 97, 180, 33))
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "places"),
    [
        (("cp", "tp"), [Shard(2), Shard(1)]),
        (("tp", "cp"), [Shard(1), Shard(2)]),
        (("dp", "cp"), [Shard(0), Shard(2)]),
    ],
)
def test_lengths_beside_another_axis(names: tuple[str, str], places: list[Any]) -> None:
    for worst, num_graphs in run_ranks(4, _attend_beside, names, places):
        assert worst < 1e-12
        assert num_graphs == 2


def _attend_in_replicas(of_replicas: tuple[tuple[int, ...], ...]) -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    lengths = of_replicas[mesh["dp"].get_local_rank()]
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    worst = max(_begin(compiled, mesh["cp"], length, [Shard(2)])() for length in lengths)
    dist.barrier()
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_replicas_with_lengths_of_their_own() -> None:
    """One compiles while the other does not."""
    found = run_ranks(4, _attend_in_replicas, ((96, 180, 97, 48), (97, 181, 33, 64)))
    assert all(worst < 1e-12 and num_graphs == 2 for worst, num_graphs in found)


def _attend_where_one_has_least(lengths: tuple[int, ...]) -> float:
    mesh = world_mesh()
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    return max(_begin(compiled, mesh, length, [Shard(2)])() for length in lengths)


@pytest.mark.long
def test_one_rank_alone_holds_one_token_or_none() -> None:
    """The last of four ranks has one of 13 and of 10 tokens, none of 9, and none of 5."""
    assert max(run_ranks(4, _attend_where_one_has_least, (97, 13, 10, 9, 5, 181))) < 1e-12


# --- Two lengths ----------------------------------------------------------------------------------


def across(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    """Attend within the keys, then from the queries to them, under the padding of the keys."""
    mask = padding[:, None, None]
    key = F.scaled_dot_product_attention(key, key, value, attn_mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _attend_across(lengths: tuple[tuple[int, int], ...]) -> tuple[float, int]:
    mesh = world_mesh()
    compiled = torch.compile(across, backend="cp_aot_eager", fullgraph=True)
    torch.manual_seed(7)
    worst = 0.0
    for num_queries, num_keys in lengths:
        lengths_of = (num_queries, num_keys, num_keys, num_queries)
        whole = [torch.randn(1, 2, length, 8).double() for length in lengths_of]
        padding = torch.rand(1, num_keys) < 0.7
        found = difference(across, compiled, whole, [padding], mesh, is_dynamic=True)
        worst = max(worst, found)
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_mask_of_the_keys_serves_queries_of_two_lengths() -> None:
    """As an encoder-decoder's does; its table is a DTensor whose shards differ in length."""
    for worst, num_graphs in run_ranks(2, _attend_across, ((97, 65), (181, 65))):
        assert worst < 1e-12
        assert num_graphs == 1


# --- What DTensor chooses is remembered -----------------------------------------------------------


def _count_choices(monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor]) -> int:
    """Compile a function of 97 tokens whose number is a symbol; return what DTensor chose anew."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    cls, name = type(propagator), "propagate_op_sharding_non_cached"
    choose, chosen = getattr(cls, name), []

    def count(self: Any, schema: Any) -> Any:
        chosen.append(str(schema))
        return choose(self, schema)

    monkeypatch.setattr(cls, name, count)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch._dynamo.reset()
    local = torch.linspace(-1, 1, 49 * 4).view(1, 49, 4)
    states = DTensor.from_local(local, mesh, [Shard(1)], shape=(1, 97, 4), stride=(388, 4, 1))
    torch._dynamo.mark_dynamic(states, 1)
    compiled = torch.compile(function, backend="cp_aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(states).to_local(), function(local))
    assert name not in vars(propagator), "DTensor chooses by itself when the compile is over"
    return sum("s" in one.partition("(")[2] for one in chosen)


def _layers(number: int, states: Tensor) -> Tensor:
    for _ in range(number):
        states = (states.view(1, -1, 2, 2).transpose(1, 2) * 2).sin().transpose(1, 2).flatten(2)
    return states


def test_what_dtensor_chose_is_remembered_within_a_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second and all further layers ask what the first did, but for strides of its input."""
    with fake_rank(0, 2):
        two, five = (_count_choices(monkeypatch, partial(_layers, number)) for number in (2, 5))
    assert two == five


def _zeros(states: Tensor) -> Tensor:
    """Return zeros of both signs, which DTensor makes of the arguments that it chose."""
    positive = states.new_full(states.shape, 0.0)
    return torch.copysign(torch.ones_like(states), states.new_full(states.shape, -0.0)) + positive


def test_numbers_that_are_equal_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_rank(0, 2):
        _count_choices(monkeypatch, _zeros)
