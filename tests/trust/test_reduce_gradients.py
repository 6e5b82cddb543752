"""Gradients of plain parameters, summed over the ranks of a sequence; and who forgets it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import cp_inductor
from cp_inductor import RanksDisagree, UnsupportedPlacement, reduce_gradients, shard
from tests.support.combinations import Decoder, make_batch, mean_loss, shards_of, warnings_of
from tests.support.ranks import on_ranks, world_mesh


class Model(Decoder):
    """Has tied weights, and a layer that no token reads."""

    def __init__(self) -> None:
        super().__init__(num_layers=1, dim=16, is_tied=True)
        self.unused = nn.Linear(3, 3)


def make_model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(5)
    return Model().to(dtype)


def backward(run: Callable[..., Tensor], mesh: DeviceMesh) -> None:
    """Run the README's step in a region."""
    with shards_of(make_batch(), mesh) as (ids, positions, labels):
        (mean_loss(run(ids, positions), labels) / mesh.size()).backward()


# --- Sums --------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_step_in_a_region_has_the_gradients_of_one_process() -> None:
    mesh, model, alone = world_mesh(), make_model(), make_model()
    ids, positions, labels = make_batch()
    mean_loss(alone(ids, positions), labels).backward()
    backward(model, mesh)
    reduce_gradients(model, mesh)
    assert model.unused.weight.grad is None
    for (name, parameter), known in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, known.grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("bucket_bytes", [32 << 20, 64])
@on_ranks(2)
def test_every_kind_of_gradient_is_summed_in_its_dtype(bucket_bytes: int) -> None:
    from cp_inductor.region import reduce_gradients as module

    module.BUCKET_BYTES = bucket_bytes
    mesh, rank = world_mesh(), dist.get_rank()
    model = nn.ParameterDict()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        for shape in ((), (3,), (4, 5), (0, 2)):
            model[f"{str(dtype)[6:]}_{len(shape)}_{shape[:1]}"] = nn.Parameter(
                torch.ones(shape, dtype=dtype)
            )
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, 2.0**rank)
    model["columns"] = nn.Parameter(torch.ones(4, 6).t())
    model["columns"].grad = (torch.arange(24.0).reshape(4, 6) + rank).t()
    model["some"] = nn.Parameter(torch.ones(2))
    if rank == 1:
        model["some"].grad = torch.ones(2)
    model["none"] = nn.Parameter(torch.ones(2))
    model["frozen"] = nn.Parameter(torch.ones(2), requires_grad=False)
    model["sharded"] = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    model["sharded"].grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    before = {name: p.grad for name, p in model.items()}
    reduce_gradients(model, mesh)
    for name, parameter in model.items():
        grad = parameter.grad
        if name in ("none", "frozen"):
            assert grad is None
            continue
        assert isinstance(grad, Tensor) and grad.dtype == parameter.dtype
        assert name == "some" or grad is before[name]
        if name == "columns":
            assert torch.equal(grad, (2 * torch.arange(24.0).reshape(4, 6) + 1).t())
        elif isinstance(grad, DTensor):
            assert torch.equal(grad.full_tensor(), torch.ones(4))
        else:
            assert torch.equal(grad, torch.full_like(parameter, 1.0 if name == "some" else 3.0))


@pytest.mark.slow
@on_ranks(4)
def test_what_others_reduce_is_left_alone() -> None:
    """On a mesh of (dp, cp): what is reduced over dp alone is summed over cp, other is left."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), dist.get_rank()
    by_dp = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    by_all = DistributedDataParallel(nn.Linear(2, 2))
    sharded = nn.Linear(2, 2, bias=False)
    fully_shard(sharded, mesh=mesh["dp"])
    # Shards over dp, and replicates over cp: it reduces over both.
    hybrid = FullyShardedDataParallel(
        nn.Linear(2, 2),
        device_mesh=DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicas", "shards")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    for model in (by_dp, by_all, sharded, hybrid):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter.detach(), 2.0**rank)
        reduce_gradients(model, mesh["cp"])
    of_dp = 2.0**rank + 2.0 ** (rank ^ 1)
    for model, value in (
        (by_dp, of_dp),
        (by_all, 2.0**rank),
        (sharded, of_dp),
        (hybrid, 2.0**rank),
    ):
        for parameter in model.parameters():
            grad = parameter.grad
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
            assert torch.equal(grad, torch.full_like(grad, value)), model
    with pytest.raises(
        UnsupportedPlacement, match=r"expected an nn.Module and a 1-D DeviceMesh, got"
    ):
        reduce_gradients(by_dp, mesh)
    flat = mesh["dp", "cp"]._flatten("all")
    with pytest.raises(
        UnsupportedPlacement, match=r"module.weight: .* over all of the ranks \[0, 1,"
    ):
        reduce_gradients(by_dp, flat)


@on_ranks(2)
def test_parameters_that_differ_are_refused_on_all_ranks() -> None:
    mesh, is_odd = world_mesh(), dist.get_rank() == 1
    models: dict[str, nn.Module] = {
        r"parameter 0: a.weight: torch.float32 \[2, 2\] on rank 0, b.weight: .* on rank 1": (
            nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ba" if is_odd else "ab")})
        ),
        r"parameter 0: 0.weight: torch.float32 \[2, 2\] on rank 0, .* \[3, 2\] on rank 1": (
            nn.Sequential(nn.Linear(2, 3 if is_odd else 2))
        ),
        "parameters: 4 on rank 0, 6 on rank 1": nn.Sequential(
            *(nn.Linear(2, 2) for _ in range(2 + is_odd))
        ),
        "parameters: 2 on rank 0, 0 on rank 1": nn.Linear(2, 2).requires_grad_(not is_odd),
        "expected dense gradients on all ranks, got sparse ones": nn.Embedding(3, 2),
    }
    for words, model in models.items():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if is_odd and isinstance(model, nn.Embedding):
            model.weight.grad = torch.ones(3, 2).to_sparse()
        with pytest.raises((RanksDisagree, UnsupportedPlacement), match=words):
            reduce_gradients(model, mesh)


# --- Sums of sums ------------------------------------------------------------------------------


class Weights(nn.Module):
    """The first rank uses both weights, and the other ranks use one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = (nn.Parameter(torch.ones(3).double()) for _ in range(2))

    def forward(self, x: float) -> Tensor:
        used = self.shared + self.expert if dist.get_rank() == 0 else self.shared
        return used.sum() * x


@pytest.mark.parametrize("form", ["none", "zeros", "buckets"])
@pytest.mark.parametrize("axes", [("cp",), ("cp", "dp")])
@on_ranks(2)
def test_gradients_are_summed_anew_after_zero_grad(form: str, axes: tuple[str, ...]) -> None:
    mesh, model = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")), Weights()
    run: nn.Module = model
    if form == "buckets":  # gradients are the same tensors in all steps
        run = DistributedDataParallel(
            model,
            process_group=mesh["dp"].get_group(),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
    for step in range(3):
        for x in (1.0, step):
            run(x).backward()
        for axis in axes:
            reduce_gradients(model, mesh[axis])
        assert torch.equal(model.shared.grad, torch.full((3,), 2.0 + 2 * step).double())
        assert torch.equal(model.expert.grad, torch.full((3,), 1.0 + step).double())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.autograd.grad(run(2.0), model.shared)  # is no gradient of the parameter
        model.zero_grad(set_to_none=form != "zeros")


@on_ranks(2)
def test_sums_are_not_summed_again() -> None:
    mesh = world_mesh()

    def add(model: nn.Module) -> None:
        model(1.0).backward()

    def clip_and_add(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        add(model)

    def zero_one_and_add(model: nn.Module) -> None:
        model.shared.grad = None  # the sum of the other is met on the first rank alone
        add(model)

    for between in (lambda model: None, add, clip_and_add, zero_one_and_add):
        model = Weights()
        add(model)
        reduce_gradients(model, mesh)
        between(model)
        with pytest.raises(UnsupportedPlacement, match="hold what reduce_gradients summed before"):
            reduce_gradients(model, mesh)
        model.zero_grad()
        add(model)
        reduce_gradients(model, mesh)
        assert torch.equal(model.shared.grad, torch.full((3,), 2.0).double())


# --- Who forgets it ----------------------------------------------------------------------------


def forget(model: nn.Module, mesh: DeviceMesh) -> None:
    pass


def clip(model: nn.Module, mesh: DeviceMesh) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def loop(model: nn.Module, mesh: DeviceMesh) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group())


def loop_and_clip(model: nn.Module, mesh: DeviceMesh) -> None:
    loop(model, mesh)
    clip(model, mesh)


def flat_buffer(model: nn.Module, mesh: DeviceMesh) -> None:
    held = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in held])
    dist.all_reduce(flat, group=mesh.get_group())
    for parameter, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def _train(reduce: Callable[..., None], form: str, num_backwards: int) -> list[str]:
    cp_inductor.reset()  # another case may have been judged in this process
    mesh, model = world_mesh(), make_model(torch.float32)
    run: nn.Module = model
    if form == "ddp":
        run = DistributedDataParallel(
            model, process_group=mesh.get_group(), find_unused_parameters=True
        )
    if form == "options":
        options = {"mesh": mesh}
        run = torch.compile(model, backend="cp_aot_eager", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(3):
            for _ in range(num_backwards):
                if form == "options":
                    ids, positions, labels = (shard(one, mesh).to_local() for one in make_batch())
                    mean_loss(run(ids, positions), labels).backward()
                else:
                    backward(run, mesh)
            reduce(model, mesh)
            optimizer.step()
            optimizer.zero_grad()

    found = warnings_of(train)
    assert not optimizers._global_optimizer_pre_hooks, "what was judged is looked at no more"
    return found


# How gradients are reduced, of what form, and how often a step differentiates.
FORGETS: list[tuple[Callable[..., None], str, int]] = [
    *((forget, "region", 1), (clip, "region", 2)),
    *((forget, "options", 2), (clip, "options", 1)),
]
REDUCES: list[tuple[Callable[..., None], str, int]] = [
    *((loop, "region", 1), (loop_and_clip, "region", 2), (flat_buffer, "region", 1)),
    *((reduce_gradients, "region", 2), (loop, "options", 2), (reduce_gradients, "options", 1)),
    *((forget, "ddp", 1), (clip, "ddp", 2)),
]


@pytest.mark.slow
@on_ranks(2)
def test_gradients_that_nobody_sums_are_warned_of_once_by_name() -> None:
    for reduce, form, num_backwards in FORGETS:
        found = _train(reduce, form, num_backwards)
        if dist.get_rank() == 0:
            names = r"tokens\.weight(, (positions|layers\.0\.\w+)\.weight){3} and \d+ more"
            assert re.search(f"gradients of {names} are of each rank", found[0]), found
            remedy = "call cp_inductor.reduce_gradients(model, mesh) after the backward"
            assert remedy in found[0]
        assert len(found) == (dist.get_rank() == 0)


@pytest.mark.slow
@on_ranks(2)
def test_whoever_sums_gradients_hears_nothing() -> None:
    for reduce, form, num_backwards in REDUCES:
        assert _train(reduce, form, num_backwards) == []
