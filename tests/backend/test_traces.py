"""What of ours is in place while Dynamo traces: for our backends all of it, for others nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cp_inductor.backend import cp_aot_eager
from cp_inductor.torch_private.traces import traces
from tests.support.torch_state import state_of_torch

OURS, TORCHS = "cp_aot_eager", "aot_eager"


def compiled(function: Callable[..., Any], backend: Any = OURS) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize("backend", [OURS, TORCHS])
def test_only_our_compiles_have_handlers(backend: str) -> None:
    """What a function sees that runs while Dynamo traces."""
    seen = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        seen.append(traces.is_ours)
        return len(DTensor._op_dispatcher._custom_op_handlers)

    before = state_of_torch()
    num_handlers = compiled(lambda x: x * look(), backend)(torch.ones(()))
    assert seen == [backend == OURS]
    assert (num_handlers > len(before["DTensor's handlers"])) == (backend == OURS)
    assert state_of_torch() == before


@pytest.mark.parametrize("is_inner", [True, False], ids=["theirs in ours", "ours in theirs"])
def test_a_compile_within_another(is_inner: bool) -> None:
    before, in_theirs, seen = state_of_torch(), [], []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        in_theirs.append(state_of_torch())
        return gm.forward

    inner = torch.compile(doubled, backend=record if is_inner else OURS)

    @torch.compiler.assume_constant_result
    def compile_another() -> float:
        seen.append(traces.is_ours)
        value = inner(torch.ones(())).item()
        seen.append(traces.is_ours)
        return float(value)

    def function(x: Tensor) -> Tensor:
        return x * compile_another()

    assert compiled(function, OURS if is_inner else record)(torch.ones(())).item() == 2
    assert seen == [is_inner, is_inner]
    assert in_theirs == [before]
    assert state_of_torch() == before


THROUGH_INDUCTOR = pytest.param((OURS, "cp_inductor", TORCHS), marks=pytest.mark.slow)


@pytest.mark.parametrize("backends", [(OURS, TORCHS), THROUGH_INDUCTOR])
def test_threads_that_compile_at_once(backends: tuple[str, ...]) -> None:
    """Each its own function, forward and backward; afterwards torch is as it was."""
    torch._dynamo.reset()
    before, num_threads = state_of_torch(), 6
    ready = threading.Barrier(num_threads)

    def train(number: int) -> None:
        run = torch.compile(
            lambda x: (x.sin() * number).sum(), backend=backends[number % len(backends)]
        )
        x = torch.linspace(-1, 1, 7 + number, dtype=torch.float64, requires_grad=True)
        ready.wait()
        run(x).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, number * x.detach().cos())

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(train, range(num_threads)))  # raises what one has raised
    assert state_of_torch() == before


def test_another_thread_is_not_in_our_compile(mesh: DeviceMesh) -> None:
    """It computes with DTensors meanwhile, as torch does."""
    sharded = distribute_tensor(torch.ones(1, 2, 8, 4), mesh, [Shard(2)])

    def compute() -> tuple[Any, ...]:
        return traces.is_ours, sharded[:, :1].exp().placements

    with traces.switched(True), ThreadPoolExecutor(1) as thread:
        assert traces.is_ours
        assert thread.submit(compute).result() == (False, (Shard(2),))


def test_a_backend_that_calls_ours() -> None:
    """Nothing tells Dynamo of it; our state is in place from where ours is called."""
    seen = []

    def around(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(traces.is_ours)
        return cp_aot_eager(gm, inputs)

    assert compiled(doubled, around)(torch.ones(())).item() == 2
    assert seen == [False]
    assert not traces.is_ours
