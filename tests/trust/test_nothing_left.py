"""What a refusal or a crash in compilation leaves behind, which is nothing; and `reset`.

Everything of the process that a compile touches is compared object by object: tables of DTensor and
of Inductor, flags, modes, process groups, the environment, the model and its optimizer.
"""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._inductor import codecache
from torch.distributed.device_mesh import DeviceMesh

import cp_inductor
import cp_inductor.backend.compile
from cp_inductor.backend import captured
from cp_inductor.passes import pipeline
from cp_inductor.passes.pipeline import Lowering, PostGrad
from cp_inductor.plan import Recipe
from cp_inductor.trust import agreement, claims
from tests.support.combinations import AOT, COMPILED, EAGER
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.torch_state import state_of_torch

C10D = dist.distributed_c10d


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query * self.scale, key, value, is_causal=True)
        return out.square().mean()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a compile might change, by name; objects stand for themselves."""
    world = C10D._world
    found: dict[str, Any] = {
        **state_of_torch(),
        "groups": {name: dict(getattr(world, name)) for name in ("pg_map", "pg_names")},
        "number of groups": world.group_count,
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR")},
        "modes": (
            torch.overrides._get_current_function_mode_stack(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        ),
        "random": torch.get_rng_state().tolist(),
        "optimizer's groups": [list(map(id, group["params"])) for group in optimizer.param_groups],
        "optimizer's state": dict(optimizer.state),
    }
    for name, module in model.named_modules():
        members = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
        found[f"module {name}"] = {k: v for k, v in members.items() if k != "_compiled_call_impl"}
        found[f"hooks of {name}"] = [dict(v) for v in vars(module).values() if isinstance(v, dict)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(tensor), tensor.tolist(), tensor.requires_grad, tensor._version)
        found[f"gradient of {name}"] = None if tensor.grad is None else tensor.grad.tolist()
        # Dynamo marks what it has seen as an input that stays where it is.
        attributes = {k: v for k, v in vars(tensor).items() if not k.startswith("_dynamo_")}
        found[f"attributes of {name}"] = attributes
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        now = after[name]
        if isinstance(value, dict):
            changed = [k for k in {**value, **now} if value.get(k) is not now.get(k)]
            changed = [k for k in changed if not _is_equal(value.get(k), now.get(k))]
            assert not changed, (name, changed)
        else:
            assert _is_equal(value, now), (name, value, now)


def _is_equal(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


class Crash(Exception):
    """What no code expects."""


OURS = cp_inductor.backend.compile
lower = captured.lower


def lower_the_forward_alone(lowering: Lowering) -> None:
    lower(lowering)
    if lowering.kind == "backward":
        raise Crash


crash = partial(mock.patch.object, side_effect=Crash)
PLACES: dict[str, Any] = {
    "in the trace": lambda: mock.patch.object(Model, "forward", lambda model, x: x.mm(x)),
    "where it is refused": lambda: cp_inductor.config.patch(strategy="heads"),  # there is one
    "while attentions are found": lambda: crash(pipeline, "find_attention"),
    "while they are captured": lambda: crash(pipeline, "capture_attention"),
    "while they are lowered": lambda: crash(captured, "lower"),
    "while it is interrupted": lambda: crash(captured, "lower", side_effect=KeyboardInterrupt),
    "behind the lowering of the backward": lambda: mock.patch.object(
        captured, "lower", lower_the_forward_alone
    ),
    "in Inductor": lambda: crash(OURS, "compile_fx_inner"),
    "in Inductor's passes": lambda: crash(PostGrad, "__call__"),
    "in generating code": lambda: crash(codecache.PyCodeCache, "write"),
}
OF_INDUCTOR = ("in Inductor", "in Inductor's passes", "in generating code")


@pytest.mark.parametrize(
    "place",
    [pytest.param(name, marks=pytest.mark.slow if name in OF_INDUCTOR else ()) for name in PLACES],
)
def test_a_failed_compile_leaves_nothing(place: str) -> None:
    form = COMPILED if place in OF_INDUCTOR else AOT
    with fake_mesh(1, 3) as mesh:
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(1, 4, 16)
        warm_up(model, x)
        run = torch.compile(model, backend=form, fullgraph=True, options={"mesh": mesh})
        before = snapshot(model, optimizer)
        with PLACES[place](), pytest.raises((Exception, KeyboardInterrupt)) as caught:
            run(x).backward()
        chain = [caught.value, caught.value.__cause__, caught.value.__context__]
        meant = Crash | KeyboardInterrupt | TorchRuntimeError | cp_inductor.UnsupportedStrategy
        assert any(isinstance(e, meant) or "Crash" in str(e) for e in chain)
        assert_same(before, snapshot(model, optimizer))
        torch._dynamo.reset()  # which refuses if a compile is pending


def warm_up(model: nn.Module, x: Tensor) -> None:
    """Let torch set up what it sets up once in a process."""
    torch._dynamo.reset()
    torch.compile(lambda t: t + 1, backend="aot_eager")(x)
    torch.compile(lambda t: t + 1, backend=COMPILED)(x)
    torch._dynamo.reset()


# --- Reset ------------------------------------------------------------------------------------


def attend(mesh: DeviceMesh, form: str, run: Any) -> list[float]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(1, 4 * mesh.size(), 16)
    shard = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    if form == EAGER:
        with cp_inductor.context_parallel(mesh):
            loss = model(shard)
    else:
        loss = run(model, shard)
    loss.backward()
    grad = model.project.weight.grad
    return [loss.item(), grad.sum().item()]


@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
def test_reset_drops_all_and_nothing_breaks(form: str) -> None:
    cp_inductor.reset()  # of groups of tests before
    mesh = world_mesh()
    run: Any = None
    if form != EAGER:
        run = torch.compile(
            lambda model, x: model(x), backend=form, fullgraph=True, options={"mesh": mesh}
        )
    results = [attend(mesh, form, run)]
    (known,) = [one for one in agreement._agreed_in.values() if one is not None]
    held = weakref.ref(known)
    assert claims.describe_attention.cache_info().currsize > 0
    Recipe.parse(Recipe(2, 8, 8, 1, 1, 16, 4, "causal", strategy="rows", stages=1).format())
    del known
    cp_inductor.reset()
    gc.collect()
    assert not agreement._agreed_in and held() is None
    assert (
        Recipe._parse.cache_info().currsize == claims.describe_attention.cache_info().currsize == 0
    )
    # The group goes on, and so does what was compiled; the ranks compare again.
    results += [attend(mesh, form, run), attend(mesh, form, run)]
    assert len(agreement._agreed_in) == 1
    assert results[0] == results[1] == results[2]


@on_ranks(2)
def test_groups_that_are_gone_leave_no_threads_and_no_descriptors() -> None:
    """Compile in one new group after the other; count threads and descriptors after each."""
    counts = []
    for _ in range(4):
        group = dist.new_group(list(range(dist.get_world_size())))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        run = torch.compile(
            lambda model, x: model(x), backend=AOT, fullgraph=True, options={"mesh": mesh}
        )
        attend(mesh, AOT, run)
        dist.barrier()
        dist.destroy_process_group(group)
        del group, mesh, run
        torch._dynamo.reset()
        cp_inductor.reset()
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    # torch begins one thread of a pool late; groups that leave one would leave three.
    assert counts[3][0] <= counts[0][0] + 1 and counts[3][1] <= counts[0][1], counts
