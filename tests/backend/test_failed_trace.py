"""Mistakes that Dynamo meets before any graph pass: the error says what to do, as ours do."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
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

BACKENDS = ("cp_aot_eager", "cp_inductor")


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


def attend_masked(query: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


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


def branch(query: Tensor) -> Tensor:
    return attend(query, query, query, is_causal=True)


# Torch inlines a region that is called once.
nested = torch.compiler.nested_compile_region(lambda x: x * branch(x).sum())


def in_region(mesh: DeviceMesh, function: Callable[..., Any], *given: Any, **how: Any) -> Any:
    with context_parallel(mesh):
        return function(*given, **how)


def sharded(mesh: DeviceMesh, *shape: int, dim: int = 2, dtype: Any = None) -> DTensor:
    return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(dim)])


def compiled(function: Callable[..., Any], backend: str = "cp_aot_eager", **options: Any) -> Any:
    return torch.compile(
        function, backend=backend, fullgraph=True, dynamic=False, options=options or None
    )


def positioned(mesh: DeviceMesh, backend: str = "cp_aot_eager") -> Any:
    return compiled(distribute_module(WithPositions(), mesh), backend)


def names_of(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the names that rows use."""
    states = sharded(mesh, 2, 32, 8, dim=1)
    long = sharded(mesh, 2, 32, 8, dim=1)
    torch._dynamo.mark_dynamic(long, 1)
    add = torch.compile(torch.add, backend="cp_aot_eager", fullgraph=True, dynamic=True)
    x, one = sharded(mesh, 2, 4, 32, 8), sharded(mesh, 1, 4, 32, 8)
    return {
        **{"mesh": mesh, "x": x, "one": one, "local": x.to_local(), "states": states},
        **{"long": long, "add": add, "ids": sharded(mesh, 1, 32, dim=1, dtype=torch.int64)},
        **{"masked": {"attn_mask": torch.ones(32, 32), "is_causal": True}},
        **{"allowed": {"attn_mask": torch.ones(32, 32) > 0, "is_causal": True}},
    }


IS_2_13 = torch.__version__.startswith("2.13.")
# A call; behind -> the class of the error and parts of its text. Those that begin with "in: " are
# made in implicit_replication.
REFUSALS = """
positioned(mesh)(ids) -> UnsupportedPlacement: embedding (test_failed_trace.py: | DTensors and \
arange of shape (32,) | implicit_replication()
positioned(mesh, "cp_inductor")(ids) -> UnsupportedPlacement: arange of shape (32,)
positioned(mesh)(ids.full_tensor()) -> UnsupportedPlacement: embedding (test_failed_trace.py: | \
got a plain tensor of shape (1, 32); pass distribute_tensor(ids, mesh, [Shard(1)]), within
compiled(nn.Linear(8, 8))(x) -> UnsupportedPlacement: ; call cp_inductor.parallelize(model, mesh) f
add(torch.zeros(2, 4, 32, 8), x) -> UnsupportedPlacement: implicit_replication
compiled(attend)(x, one, one) -> UnsupportedAttention: got 2 and 1; expand the smaller batch
in_region(mesh, attend, local, local[:1], local[:1]) -> UnsupportedAttention: got 2 and 1; expand t
compiled(attend)(x, x, x, **masked) -> UnsupportedAttention: got is_causal=True and an \
attn_mask of shape (32, 32); include causality
compiled(attend)(x, x, x, **allowed) -> UnsupportedAttention: got is_causal=True and an attn_mask
compiled(attend, mesh=mesh)(local, local, local, **masked) -> UnsupportedAttention: got is_causal=Tr
compiled(attend, mesh=mesh)(local, local, local, **allowed) -> UnsupportedAttention: got is_causal=T
attend(x, x, x, **masked) -> UnsupportedAttention: got is_causal=True and an attn_mask
attend(x, x, x, **allowed) -> UnsupportedAttention: got is_causal=True and an attn_mask
in_region(mesh, attend, local, local, local, **masked) -> UnsupportedAttention: got is_causal=True
in_region(mesh, torch.cond, torch.tensor(True), branch, torch.clone, (local,)) -> \
UnsupportedAttention: torch.cond | compile the function that calls
compiled(lambda x: nested(nested(x)))(x) -> CPError: nested_compile_region
compiled(attend, mesh=mesh, seq_len=[32])(local, local, local) -> CPError: seq_len to be an \
integer | got [32]
in: compiled(fill_by_method)(torch.zeros(2, 64, 8), states) -> UnsupportedPlacement: plain tensor \
of shape (2, 64, 8) | test_failed_trace.py: | DynamicCache
in: compiled(fill_by_method)(torch.zeros(2, 64, 8), long) -> UnsupportedPlacement: DynamicCache
in: compiled(fill_by_index)(torch.zeros(2, 64, 8), states) -> UnsupportedPlacement: DynamicCache
in: compiled(fill_by_index)(torch.zeros(2, 64, 8), long) -> UnsupportedPlacement: DynamicCache
in: compiled(torch.add)(x, torch.zeros(16, 8)) -> UnsupportedPlacement: positions, masks and the \
like of all 32 tokens, | this rank has 16, got
in: compiled(torch.add)(x, sharded(mesh, 2, 4, 16, 8)) -> UnsupportedPlacement: this rank has 16, go
in: compiled(attend_masked)(x, torch.ones(16, 32) > 0) -> UnsupportedPlacement: this rank has 16, go
in: compiled(attend_masked)(x, torch.ones(1, 16) > 0) -> UnsupportedPlacement: this rank has 16, got
in: compiled(lambda x: chosen_by_mask(x + 1).sin())(states) -> UnsupportedPlacement: a size that \
depends on data | test_failed_trace.py: | torch.where
in: compiled(lambda x: chosen_and_written(x + 1).sin())(states) -> UnsupportedPlacement: a size that
in: compiled(lambda x: dispatched(x + 1).sin())(states) -> UnsupportedPlacement: a size that depends
"""


@pytest.mark.parametrize("row", REFUSALS.split("\n")[1:-1])
def test_refusals(mesh: DeviceMesh, row: str) -> None:
    call, _, said = row.partition(" -> ")
    name, _, parts = said.partition(": ")
    if call.startswith("attend(") and not IS_2_13:
        name, parts = "RuntimeError", "is_causal=True"  # torch 2.14 refuses it first in eager code
    within = implicit_replication() if call.startswith("in: ") else nullcontext()
    names = {**globals(), **names_of(mesh)}
    with within, pytest.raises(eval(name, names)) as refused:
        eval(call.removeprefix("in: "), names)
    assert [part for part in parts.split(" | ") if part not in str(refused.value)] == []


def test_what_is_said_of_positions_helps(first_mesh: DeviceMesh) -> None:
    names = names_of(first_mesh)
    ids, x = names["ids"], names["x"]
    with pytest.raises(UnsupportedPlacement) as raised:
        positioned(first_mesh)(ids)
    assert raised.value.__cause__ is None  # no pages of torch's frames
    assert isinstance(raised.value, TorchRuntimeError)  # whoever catches torch's error still does
    model = distribute_module(WithPositions(), first_mesh)
    with implicit_replication():
        assert positioned(first_mesh)(ids).placements == (Shard(2),)
        assert model(ids.full_tensor()).shape == (1, 4, 32, 8)  # whole on every rank
        assert names["add"](torch.zeros(2, 4, 32, 8), x).placements == x.placements
    report = explain(model, ids)
    assert not report.is_fine and str(report).startswith("attentions unknown")
    assert "0 attentions" not in str(report) and "implicit_replication()" in str(report)


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
            positioned(mesh, backend)(sharded(mesh, 1, 32, dim=1, dtype=torch.int64))

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
    """torch 2.13 says that it expected a SubclassSymbolicContext; 2.15 compiles the model."""
    model = nn.Linear(8, 8)
    refused = pytest.raises(UnsupportedPlacement) if IS_2_13 else nullcontext()
    with implicit_replication():
        model(sharded(mesh, 2, 4, 32, 8)).sum().backward()
        with refused as raised:
            compiled(model)(sharded(mesh, 2, 4, 32, 8))
        if raised is not None:
            message = str(raised.value)
            assert "got a plain parameter whose gradient is a DTensor" in message
            assert "cp_inductor.parallelize(model, mesh)" in message
            assert "SubclassSymbolicContext" not in message
        model.zero_grad()
        assert compiled(model)(sharded(mesh, 2, 4, 32, 8)).placements == (Shard(2),)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_dropout_without_implicit_replication(first_mesh: DeviceMesh) -> None:
    parallelize(nn.Linear(2, 2), first_mesh)

    def model(q: Tensor) -> Tensor:
        return attend(q, q, q, is_causal=True, dropout_p=0.25)

    with pytest.raises(UnsupportedAttention, match=r"dropout_p=0\.25 .*implicit_replication"):
        compiled(model)(sharded(first_mesh, 2, 4, 32, 8))
    with implicit_replication():
        assert compiled(model)(sharded(first_mesh, 2, 4, 32, 8)).placements == (Shard(2),)


def test_other_failures_and_other_backends_keep_their_errors(mesh: DeviceMesh) -> None:
    one, other = torch.zeros(2, 3), torch.zeros(4, 5)
    with pytest.raises(TorchRuntimeError) as raised:
        compiled(torch.mm)(one, other)
    assert not isinstance(raised.value, CPError)
    with pytest.raises(TorchRuntimeError, match=r"got mixed torch\.Tensor and DTensor") as raised:
        compiled(torch.add, "eager")(torch.zeros(2, 4, 32, 8), sharded(mesh, 2, 4, 32, 8))
    assert not isinstance(raised.value, CPError)
