"""Random numbers beside DTensors: drawn alike on all ranks, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import RanksDisagree
from cp_inductor.passes import note_draws
from tests.support.ranks import on_ranks, run_ranks, world_mesh
from tests.support.reference import with_grads

B, S, D = 3, 7, 4  # S does not divide by the ranks
TOLERANCE = 1e-12  # float64

Program = Callable[[Tensor, Tensor], Tensor]


def drop_path(x: Tensor, w: Tensor) -> Tensor:
    """As transformers draws."""
    kept = 0.5 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
    kept.floor_()
    return x.div(0.5) * kept * w


def drop_path_of_timm(x: Tensor, w: Tensor) -> Tensor:
    kept = x.new_empty((x.shape[0], 1, 1))
    kept.bernoulli_(0.5)
    return x * kept.div_(0.5) * w


def written_in_part(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.ones(B, 1, 1, dtype=x.dtype)
    scale[1:] = torch.randn(1, 1, dtype=x.dtype)
    return x * w * scale


def written_to(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.empty(B, 1, 1, dtype=x.dtype)
    view = scale.view(B)
    view.normal_()
    return x * w + scale


def plain_dropout(x: Tensor, w: Tensor) -> Tensor:
    return x * w * F.dropout(torch.ones(S, D, dtype=x.dtype), 0.5)


def dropout_of_whole(x: Tensor, w: Tensor) -> Tensor:
    return x + F.dropout(w.expand(B, S, D) * 1.0, 0.5)


def sampled(x: Tensor, w: Tensor) -> Tensor:
    tokens = torch.multinomial(torch.softmax(x.mean(1), -1), 2)
    return x * w + tokens.sum(-1)[:, None, None]


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        kept = torch.rand(B, 1, 1, dtype=x.dtype)
        return torch.tanh(x) * kept

    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out * w


PROGRAMS = (
    drop_path,
    drop_path_of_timm,
    written_in_part,
    written_to,
    plain_dropout,
    dropout_of_whole,
    sampled,
)
# In eager code the first rank draws for all where what is drawn is a DTensor. Plain draws are not
# compared there.
DRAWN_ONCE = (drop_path_of_timm, dropout_of_whole, sampled)


def both(mesh: DeviceMesh, program: Any, called: Any, seed: int, reference_seed: int) -> None:
    """Compare a program over shards, forward and backward, with one process."""
    generator = torch.Generator().manual_seed(1)
    x, w, grad_out = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((B, S, D), (D,), (B, S, D))
    )
    shards = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in (x, grad_out)]
    shards.insert(1, distribute_tensor(w, mesh, [Replicate()]))
    torch.manual_seed(seed)
    with implicit_replication():
        found = with_grads(called, shards)
    torch.manual_seed(reference_seed)
    for one, other in zip(found, with_grads(program, (x, w, grad_out)), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, rtol=TOLERANCE, atol=TOLERANCE)


def check_seeds(program: Program, backend: str | None) -> None:
    rank = dist.get_rank()
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    called: Any = program
    if backend is not None:
        called = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
    for seed in (5, 6):
        both(mesh, program, called, seed, seed)
    for seed in (5, 6):  # the last rank alone is seeded otherwise
        own = seed + 100 * (rank == dist.get_world_size() - 1)
        if backend is None:
            if program in DRAWN_ONCE:
                both(mesh, program, called, own, seed)
            continue
        with pytest.raises(RanksDisagree, match=r"test_draws\.py.*its numbers.*torch\.manual_seed"):
            both(mesh, program, called, own, seed)
    both(mesh, program, called, 5, 5)


@pytest.mark.parametrize("program", [*PROGRAMS, recomputed], ids=lambda program: program.__name__)
def test_in_eager_code_the_first_rank_draws_over_replicas(program: Program) -> None:
    run_ranks(2, check_seeds, program, None)


# Not `recomputed`: torch 2.13 cannot save the mesh, under its own aot_eager neither.
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_graphs_of_ranks_draw_alike_or_are_told(program: Program) -> None:
    run_ranks(3 if program is drop_path else 2, check_seeds, program, "cp_aot_eager")


@pytest.mark.long
@on_ranks(2)
def test_draws_through_inductor() -> None:
    """Inductor draws other numbers than eager code does, but the same on all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x = distribute_tensor(torch.ones(B, S, D), mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(torch.ones(D), mesh, [Replicate()])
    called = torch.compile(drop_path, backend="cp_inductor", fullgraph=True, dynamic=False)
    for is_alike in (True, False, True):
        torch.manual_seed(5 + (0 if is_alike else dist.get_rank()))
        with implicit_replication():
            if not is_alike:
                with pytest.raises(RanksDisagree, match=r"torch\.manual_seed"):
                    called(x, w)
                continue
            out = called(x, w)
            (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out.full_tensor(), out.full_tensor()[:, :1, :1].expand(B, S, D))
        assert torch.equal(grad.full_tensor(), out.full_tensor())


@on_ranks(2)
def test_draws_over_plain_shards_are_left_alone() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x = distribute_tensor(torch.ones(B, S, D), mesh, [Shard(1)])

    def beside(x: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        # A plain shard's own numbers, and a shard's that becomes a DTensor.
        own = F.dropout(plain, 0.5)
        local = DTensor.from_local(torch.rand(B, 4 - rank, D), mesh, [Shard(1)], run_check=False)
        return x * 2, own + torch.rand_like(plain) + local.to_local().sum()

    for called in (beside, torch.compile(beside, backend="cp_aot_eager", fullgraph=True)):
        torch.manual_seed(rank)
        with implicit_replication():
            called(x, torch.ones(B, 4 - rank, D))
    # Without the check DTensor's own numbers come out, each rank's.
    torch.manual_seed(rank)
    with implicit_replication(), cp_inductor.config.patch(check_agreement=False):
        w = distribute_tensor(torch.ones(D), mesh, [Replicate()])
        drop_path(x, w)
        torch.compile(drop_path, backend="cp_aot_eager", fullgraph=True)(x, w)


def drawn() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    yield "dropout", lambda x: F.dropout(x, 0.4)
    yield "rand_like", torch.rand_like
    yield "normal_", lambda x: torch.empty_like(x).normal_()
    yield "bernoulli", lambda x: torch.bernoulli(x.sigmoid())
    yield "rrelu", lambda x: F.rrelu(x, training=True)
    yield "exponential_", lambda x: torch.empty_like(x).exponential_()
    yield "multinomial", lambda x: torch.multinomial(x.exp().flatten(0, 1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cp_aot_eager"])
@on_ranks(3)
def test_shards_draw_their_part_of_the_whole(backend: str | None) -> None:
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for name, draw in drawn():
        if backend and name in ("normal_", "exponential_", "multinomial"):  # refused there
            continue
        torch._dynamo.reset()
        run = torch.compile(draw, backend=backend, fullgraph=True) if backend else draw
        for length in (9,) if backend else (8, 9):
            generator = torch.Generator().manual_seed(length)
            x = torch.randn(2, length, 4, generator=generator, dtype=torch.float64)
            torch.manual_seed(0)
            expected = draw(x), torch.rand(2)  # what follows is drawn alike as well
            torch.manual_seed(0)
            actual = run(distribute_tensor(x, world_mesh(), [Shard(1)])), torch.rand(2)
            assert torch.equal(actual[0].full_tensor(), expected[0]), (name, length)
            assert torch.equal(actual[1], expected[1]), (name, length)


def test_functions_that_draw_are_known() -> None:
    functions = note_draws._functions_that_draw()
    drawing = [torch.rand, torch.randn_like, torch.randint, torch.randperm, torch.normal]
    drawing += [torch.bernoulli, torch.poisson, torch.multinomial, F.dropout, F.dropout2d]
    drawing += [F.alpha_dropout, F.rrelu, F.gumbel_softmax, torch._standard_gamma, torch.binomial]
    drawing += [Tensor.bernoulli_, Tensor.uniform_, Tensor.exponential_, Tensor.multinomial]
    assert [function for function in drawing if function not in functions] == []
    assert not functions & {torch.arange, Tensor.add_, F.scaled_dot_product_attention, F.softmax}
