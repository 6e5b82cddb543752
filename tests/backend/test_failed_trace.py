"""Mistakes that Dynamo meets before any graph pass: the error says what to do, as ours do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor import (
    CPError,
    UnsupportedAttention,
    UnsupportedPlacement,
    context_parallel,
    explain,
    parallelize,
)
from tests.examples_of_models import mixed
from tests.support.ranks import fake_mesh

BACKENDS = ("cp_aot_eager", "cp_inductor")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(0, 2) as mesh:
        yield mesh


class WithPositions(nn.Module):
    """Makes its own positions, as most models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def fill_by_method(cache: Tensor, states: Tensor) -> Tensor:
    return cache.index_copy_(1, torch.arange(states.shape[1]), states).sin()


def fill_by_index(cache: Tensor, states: Tensor) -> Tensor:
    cache[:, : states.shape[1]] = states
    return cache.sin()


def attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **how)


def sharded(mesh: DeviceMesh, batch: int = 2, dim: int = 2) -> Tensor:
    return distribute_tensor(torch.zeros(batch, 4, 32, 8), mesh, [Shard(dim)])


def compiled(function: Callable[..., Any], backend: str = "cp_aot_eager", **options: Any) -> Any:
    return torch.compile(
        function, backend=backend, fullgraph=True, dynamic=False, options=options or None
    )


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("fill", [fill_by_method, fill_by_index])
def test_a_cache_that_is_allocated_ahead(
    mesh: DeviceMesh, fill: Callable[..., Tensor], is_dynamic: bool
) -> None:
    states = distribute_tensor(torch.zeros(1, 32, 8), mesh, [Shard(1)])
    if is_dynamic:
        torch._dynamo.mark_dynamic(states, 1)
    with (
        implicit_replication(),
        pytest.raises(UnsupportedPlacement, match=r"plain tensor of shape \(1, 64, 8\)") as raised,
    ):
        compiled(fill)(torch.zeros(1, 64, 8), states)
    assert "test_failed_trace.py:" in raised.value.site
    assert "DynamicCache" in raised.value.remedy


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_that_the_model_makes(mesh: DeviceMesh, backend: str) -> None:
    model = distribute_module(WithPositions(), mesh)
    ids = distribute_tensor(torch.zeros(1, 32, dtype=torch.int64), mesh, [Shard(1)])
    with pytest.raises(UnsupportedPlacement) as raised:
        compiled(model, backend)(ids)
    error = raised.value
    assert error.site.startswith("embedding (test_failed_trace.py:")
    assert "DTensors and arange of shape (32,)" in error.got
    assert "implicit_replication()" in error.remedy
    assert error.__cause__ is None  # no pages of torch's frames
    assert isinstance(error, TorchRuntimeError)  # whoever catches torch's error still does
    with implicit_replication():
        assert compiled(model)(ids).placements == (Shard(2),)


def test_plain_ids_of_a_distributed_model(mesh: DeviceMesh) -> None:
    ids = torch.zeros(1, 32, dtype=torch.int64)
    model = distribute_module(WithPositions(), mesh)
    with pytest.raises(UnsupportedPlacement) as raised:
        compiled(model)(ids)
    error = raised.value
    assert error.site.startswith("embedding (test_failed_trace.py:")
    assert error.got == "a plain tensor of shape (1, 32)"
    assert error.remedy.startswith("pass distribute_tensor(ids, mesh, [Shard(1)]), within")
    with implicit_replication():  # whole on every rank
        assert model(ids).shape == (1, 4, 32, 8)


def test_parts_of_positions_and_masks(mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    length, count = x.to_local().shape[2], x.shape[2]  # type: ignore[attr-defined]
    mask = torch.ones(length, count, dtype=torch.bool)
    part = distribute_tensor(torch.zeros(2, 4, length, 8), mesh, [Shard(2)])
    for call, other in (
        (torch.add, torch.zeros(length, 8)),
        (torch.add, part),
        (attend_masked, mask),
        (attend_masked, mask[:1, :length]),
    ):
        torch._dynamo.reset()
        words = (
            rf"positions, masks and the like of all {count} tokens, .* this rank has {length}, got"
        )
        with pytest.raises(UnsupportedPlacement, match=words), implicit_replication():
            compiled(call)(x, other)


def attend_masked(query: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def test_plain_weights_beside_shards(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedPlacement) as raised:
        compiled(nn.Linear(8, 8))(sharded(mesh))
    assert raised.value.remedy.startswith("call cp_inductor.parallelize(model, mesh) first")


def chosen_by_mask(x: Tensor) -> Tensor:
    return (x[x.sum(-1) > 0] * 2).softmax(0)


def chosen_and_written(x: Tensor) -> Tensor:
    x = x.clone()
    chosen = x.sum(-1) > 0
    x[chosen] = x[chosen] * 2
    return x


def dispatched(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    out = torch.zeros_like(flat)
    for expert in range(2):
        (token,) = torch.where(flat.sum(-1) > expert)
        out.index_add_(0, token, flat[token] * 2)
    return out.view_as(x)


@pytest.mark.parametrize("choose", [chosen_by_mask, chosen_and_written, dispatched])
def test_sizes_that_data_decides(mesh: DeviceMesh, choose: Callable[[Tensor], Tensor]) -> None:
    x = distribute_tensor(torch.zeros(2, 32, 8), mesh, [Shard(1)])
    with (
        implicit_replication(),
        pytest.raises(UnsupportedPlacement, match="a size that depends on data") as raised,
    ):
        compiled(lambda x: choose(x + 1).sin())(x)
    assert "test_failed_trace.py:" in raised.value.site
    assert "torch.where" in raised.value.remedy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_in_pass", [False, True], ids=["before it", "in a pass"])
def test_what_is_printed_is_about_the_program(
    mesh: DeviceMesh, backend: str, is_in_pass: bool
) -> None:
    """Frames of compilers, more than a hundred lines per rank, are shown by TORCHDYNAMO_VERBOSE."""

    def refuse() -> None:
        if is_in_pass:
            shards = [torch.zeros(1, 4, 64, 32)] * 3
            compiled(mixed, backend, mesh=mesh)(*shards)
        else:
            model = distribute_module(WithPositions(), mesh)
            ids = distribute_tensor(torch.zeros(1, 32, dtype=torch.int64), mesh, [Shard(1)])
            compiled(model, backend)(ids)

    def printed() -> str:
        with pytest.raises(CPError) as raised:
            refuse()
        return "".join(traceback.format_exception(raised.value))

    short = printed()
    assert "symbolic_convert" not in short
    assert len(short.splitlines()) < 40
    with torch._dynamo.config.patch(verbose=True):
        assert "symbolic_convert" in printed()


def test_a_gradient_that_eager_code_left(mesh: DeviceMesh) -> None:
    """torch says that it expected a SubclassSymbolicContext."""
    model = nn.Linear(8, 8)
    with implicit_replication():
        model(sharded(mesh)).sum().backward()
        with pytest.raises(UnsupportedPlacement) as raised:
            compiled(model)(sharded(mesh))
        message = str(raised.value)
        assert "got a plain parameter whose gradient is a DTensor" in message
        assert "cp_inductor.parallelize(model, mesh)" in message
        assert "SubclassSymbolicContext" not in message
        model.zero_grad()
        assert compiled(model)(sharded(mesh)).placements == (Shard(2),)


def test_explain_says_so_and_not_that_there_is_no_attention(mesh: DeviceMesh) -> None:
    model = distribute_module(WithPositions(), mesh)
    ids = distribute_tensor(torch.zeros(1, 32, dtype=torch.int64), mesh, [Shard(1)])
    report = explain(model, ids)
    assert not report.is_fine
    assert str(report).startswith("attentions unknown")
    assert "0 attentions" not in str(report)
    assert "implicit_replication()" in str(report)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_dropout_without_implicit_replication(mesh: DeviceMesh) -> None:
    parallelize(nn.Linear(2, 2), mesh)

    def model(q: Tensor) -> Tensor:
        return attend(q, q, q, is_causal=True, dropout_p=0.25)

    with pytest.raises(UnsupportedAttention, match=r"dropout_p=0\.25 .*implicit_replication"):
        compiled(model)(sharded(mesh))
    with implicit_replication():
        assert compiled(model)(sharded(mesh)).placements == (Shard(2),)


def test_batches_that_differ(mesh: DeviceMesh) -> None:
    query, key = sharded(mesh), sharded(mesh, batch=1)
    with pytest.raises(UnsupportedAttention, match=r"got 2 and 1; expand the smaller batch"):
        compiled(attend)(query, key, key)
    local = query.to_local(), key.to_local()  # type: ignore[attr-defined]
    with (
        pytest.raises(UnsupportedAttention, match=r"got 2 and 1; expand the smaller batch"),
        context_parallel(mesh),
    ):
        attend(local[0], local[1], local[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_and_is_causal(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    query, mask = sharded(mesh), torch.ones(32, 32, dtype=dtype)
    local = query.to_local()  # type: ignore[attr-defined]
    text = r"got is_causal=True and an attn_mask of shape \(32, 32\); include causality"
    for function, q in (
        (compiled(attend), query),
        (compiled(attend, mesh=mesh), local),
        (attend, query),
    ):
        with pytest.raises(UnsupportedAttention, match=text):
            function(q, q, q, attn_mask=mask, is_causal=True)
    with pytest.raises(UnsupportedAttention, match=text), context_parallel(mesh):
        attend(local, local, local, attn_mask=mask, is_causal=True)


def test_branches_in_an_eager_region(mesh: DeviceMesh) -> None:
    q = torch.zeros(2, 4, 16, 8)

    def branch(q: Tensor) -> Tensor:
        return attend(q, q, q, is_causal=True)

    with (
        pytest.raises(UnsupportedAttention, match=r"torch\.cond.*compile the function that calls"),
        context_parallel(mesh),
    ):
        torch.cond(torch.tensor(True), branch, torch.clone, (q,))


def test_seq_len_as_a_list(mesh: DeviceMesh) -> None:
    q = torch.zeros(2, 4, 16, 8)
    with pytest.raises(CPError, match=r"seq_len to be an integer .*got \[32\]"):
        compiled(attend, mesh=mesh, seq_len=[32])(q, q, q)


def test_other_failures_and_other_backends_keep_their_errors(mesh: DeviceMesh) -> None:
    one, other = torch.zeros(2, 3), torch.zeros(4, 5)
    with pytest.raises(TorchRuntimeError) as raised:
        compiled(torch.mm)(one, other)
    assert not isinstance(raised.value, CPError)
    with pytest.raises(TorchRuntimeError, match=r"got mixed torch\.Tensor and DTensor") as raised:
        compiled(torch.add, "eager")(torch.zeros(2, 4, 32, 8), sharded(mesh))
    assert not isinstance(raised.value, CPError)


def test_plain_tensors_of_dynamic_lengths(mesh: DeviceMesh) -> None:
    add = torch.compile(torch.add, backend="cp_aot_eager", fullgraph=True, dynamic=True)
    with pytest.raises(UnsupportedPlacement, match="implicit_replication"):
        add(torch.zeros(2, 4, 32, 8), sharded(mesh))
    with implicit_replication():
        assert add(torch.zeros(2, 4, 32, 8), sharded(mesh)).placements == sharded(mesh).placements
