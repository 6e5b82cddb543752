"""Numbers that are made of all shards: read by Python, written to, reduced again, under every mode.

Each program is compared with one process in float64. A launch of ranks runs all of a table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import cp_inductor
import cp_inductor.backend
from cp_inductor import UnsupportedWrite
from tests.support.ranks import forget_compiles, run_ranks, world_mesh

TOLERANCE = 1e-10  # float64
LENGTHS = (8, 9)  # DTensor keeps partials of even shards alone

Number = Callable[[Tensor], Tensor]

# One number of x (B, S, H), of which each rank would hold a part.
NUMBERS: dict[str, Number] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "amax": lambda x: x.abs().amax(),
    "min": lambda x: x.min(),
    "norm": lambda x: x.norm(),
    "norm of one": lambda x: x.norm(p=1),
    "count": lambda x: (x > 0).sum(),
    "product": lambda x: (x * 0.1 + 1).prod(),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > -9).all(),
    "element": lambda x: x[0, 5, 1],
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "einsum": lambda x: torch.einsum("bsd,bsd->", x, x),
    "of a product": lambda x: (x[0].T @ x[0])[0, 0],
    "argmax": lambda x: x[0, :, 0].argmax(),
    "logsumexp": lambda x: x[0, :, 0].logsumexp(0),
    "deviation": lambda x: x.std(),
    "foreach norm": lambda x: torch._foreach_norm([x, x * 2])[1],
}
# How Python reads it.
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda number: number.item(),
    "int": int,
    "float": float,
    "bool": bool,
    "if": lambda number: 1.0 if number > 0.5 else 2.0,
    "loop": lambda number: sum(1 for _ in range(min(int(number), 4))),
    "tensor": lambda number: torch.tensor(number.item()).item(),
    "format": lambda number: float(f"{number.item():.6f}"),
}


def run_number(x: Tensor, number: Number, read: Callable[[Tensor], Any]) -> Tensor:
    return (x * float(read(number(x)))).square().mean()


def run_checkpointed(x: Tensor, number: Number, read: Callable[[Tensor], Any]) -> Tensor:
    return checkpoint(run_number, x, number, read, use_reentrant=False)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def states(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, 4, generator=generator, dtype=torch.float64)


def assert_same(label: object, compute: Callable[[Tensor], Tensor], length: int, run: Any) -> None:
    """Compare what is computed of sharded states, and its gradient, with one process."""
    leaf = states(length).requires_grad_()
    shards = distribute_tensor(states(length), world_mesh(), [Shard(1)]).requires_grad_()
    expected, actual = compute(leaf), run(shards)
    torch.testing.assert_close(
        whole(actual), expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{label}: {text}"
    )
    if torch.is_grad_enabled():
        expected.backward()
        actual.backward()
        assert isinstance(shards.grad, DTensor) and leaf.grad is not None
        torch.testing.assert_close(
            shards.grad.full_tensor(), leaf.grad, msg=lambda text: f"{label}, gradient: {text}"
        )


def check_numbers() -> None:
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    for length in LENGTHS:
        for name, number in NUMBERS.items():
            for how, read in READS.items():
                for mode in modes if how == "item" else modes[:1]:
                    run = run_checkpointed if mode is modes[0] else run_number
                    with mode(), implicit_replication():
                        program = partial(run, number=number, read=read)
                        assert_same((name, how, length, mode.__name__), program, length, program)


@pytest.mark.slow
def test_python_reads_the_number_of_the_whole() -> None:
    run_ranks(2, check_numbers)


@pytest.mark.long
def test_python_reads_the_number_of_three() -> None:
    run_ranks(3, check_numbers)


def check_compiled_numbers(backend: str, is_full: bool, names: tuple[str, ...]) -> None:
    for name in names:
        for how in ("item", "float") if is_full else ("item", "if"):
            torch._dynamo.reset()

            program = partial(run_number, number=NUMBERS[name], read=READS[how])
            compiled = torch.compile(program, backend=backend, fullgraph=is_full, dynamic=False)
            with implicit_replication():
                for length in LENGTHS:
                    forget_compiles()  # each call makes a mesh of its own, equal to the last
                    assert_same((name, how, length), program, length, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [True, False])
def test_compiled_code_reads_the_number_of_the_whole(is_full: bool) -> None:
    run_ranks(2, check_compiled_numbers, "cp_aot_eager", is_full, ("count", "amax"))


@pytest.mark.long
def test_compiled_code_reads_all_numbers() -> None:
    run_ranks(2, check_compiled_numbers, "cp_aot_eager", True, tuple(NUMBERS))
    run_ranks(2, check_compiled_numbers, "cp_inductor", True, ("count", "mean"))


def pool(x: Tensor) -> Tensor:
    kept = (x[..., :1] > -0.5).double()
    count = kept.sum(1)
    count.clamp_(min=1)
    return (x * kept).sum(1) / count


# What meets sums, concatenations, writes and losses once it is reduced.
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "norms summed": lambda x: x.norm(dim=1).sum(-1).square().mean(),
    "norms beside means": lambda x: torch.cat([x.norm(dim=1), x.mean(1)], -1).square().sum(),
    "maxima beside means": lambda x: (x.masked_fill(x > 1, -9).amax(1) + x.mean(1)).square().sum(),
    "products": lambda x: (x * 0.3 + 1).prod(1).sum().exp(),
    "normalized": lambda x: F.normalize(x.mean(1), dim=-1)[0].pow(3).sum(),
    "similar": lambda x: F.cosine_similarity(x.mean(1)[:1], x.mean(1)[1:], dim=-1).mean(),
    "pooled": lambda x: F.cross_entropy(pool(x) @ pool(x).T, torch.arange(2)),
    "gated": lambda x: F.glu(x.mean(1)).square().sum(),
    "gated product": lambda x: F.glu(x[0].T @ x[0]).square().sum(),
    "filled": lambda x: (x[0].T @ x[0]).masked_fill(x[0, :4] > 0, 2.0).square().sum(),
    "variance": lambda x: x.var(1).sqrt().sum(),
    "below the largest": lambda x: (x - x.amax()).square().sum(),
    "over no dims, which are all": lambda x: x.sum([], keepdim=True).square().sum(),
}


def check_reduced(backend: str | None) -> None:
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for name, program in REDUCED.items():
        torch._dynamo.reset()
        run = program
        if backend:
            run = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
        for length in LENGTHS:
            forget_compiles()  # each call makes a mesh of its own, equal to the last
            with implicit_replication():
                assert_same((name, length), program, length, run)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cp_aot_eager"])
def test_what_is_reduced_may_be_reduced_again(backend: str | None) -> None:
    run_ranks(2, check_reduced, backend)


def classes(x: Tensor) -> Tensor:
    labels = x.detach()[..., 0].abs().mul(2).long().clamp(max=3)
    return labels.masked_fill(x.detach()[..., 1] > 0.7, -100)


def spread(x: Tensor) -> Tensor:
    return x.log_softmax(-1).transpose(1, 2)


# Losses that torch makes of other ops, which DTensor would take as they are under inference_mode.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "classes": lambda x: F.cross_entropy(x.transpose(1, 2), classes(x)),
    "weighted classes": lambda x: F.cross_entropy(
        x.transpose(1, 2), classes(x), weight=torch.arange(1.0, 5.0, dtype=x.dtype)
    ),
    "smoothed classes": lambda x: F.cross_entropy(
        x.flatten(0, 1), classes(x).flatten(), label_smoothing=0.1
    ),
    "soft classes": lambda x: F.cross_entropy(x.transpose(1, 2), x.softmax(-1).transpose(1, 2)),
    "likelihood": lambda x: F.nll_loss(spread(x), classes(x)),
    "by a count": lambda x: (
        F.cross_entropy(x.flatten(0, 1), classes(x).flatten(), reduction="sum")
        / (classes(x) != -100).sum().item()
    ),
    "l1": lambda x: F.l1_loss(x, x * 2 + 1),
    "triplet": lambda x: F.triplet_margin_loss(x, x * 2, x + 1),
    "margin": lambda x: F.margin_ranking_loss(x[..., 0], x[..., 1], x[..., 2].sign()),
    "poisson": lambda x: F.poisson_nll_loss(x, x.detach().abs()),
    "cosine": lambda x: F.cosine_embedding_loss(
        x.flatten(0, 1), x.flatten(0, 1) * 2 + 1, x.detach()[..., 0].flatten().sign()
    ),
    "alignment": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), torch.tensor([[1, 2], [2, 3]]), (x.shape[1],) * 2, (2, 2)
    ),
    "covariance": lambda x: torch.cov(x.flatten(0, 1).T).square().sum(),
}


def check_losses() -> None:
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for name, loss in LOSSES.items():
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for length in LENGTHS:
                with mode(), implicit_replication():
                    assert_same((name, mode.__name__, length), loss, length, loss)


@pytest.mark.slow
def test_losses_are_the_same_in_every_mode() -> None:
    run_ranks(2, check_losses)


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda t: t[:, 1:], lambda t: t[:, ::2], lambda t: t[:, 0], lambda t: t[0]),
    *(lambda t: t.detach(), lambda t: t[0].t(), lambda t: t.permute(1, 0, 2)),
    *(lambda t: t[:, :, None], lambda t: t[None].expand(3, -1, -1, -1), lambda t: t[:1].squeeze()),
)


def check_views_of_inputs() -> None:
    """Under inference_mode, views of tensors that were made outside are read, not written to."""
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for length in LENGTHS:
        x = states(length)
        shards = distribute_tensor(x, world_mesh(), [Shard(1)])
        with torch.inference_mode():
            for view in VIEWS:
                assert torch.equal(whole(view(shards)), view(x))
            for write in (
                lambda t: t[:, 3:5].fill_(0.5),
                lambda t: t.__setitem__((slice(None), 3), 0.5),
                lambda t: t[0][3:5].zero_(),
                lambda t: t[:, 3:5][0].zero_(),
            ):
                with pytest.raises(UnsupportedWrite, match="which DTensor has copied"):
                    write(shards.clone())


@pytest.mark.slow
def test_views_under_inference_mode() -> None:
    run_ranks(2, check_views_of_inputs)


# Writes to a gradient as a backward leaves it.
WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "fill_": lambda p: p.grad.fill_(0.25),
    "add_": lambda p: p.grad.add_(1.0),
    "sign_": lambda p: p.grad.sign_(),
    "clamp_": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1e-3, foreach=True),
    "mul_": lambda p: p.grad.mul_((p.detach() > 0).to(p.dtype)),
    "to a row": lambda p: p.grad.__setitem__(0, 0.5),
    "to a view": lambda p: p.grad.t().add_(1.0),
    "to what shares": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "copy_": lambda p: p.grad.copy_(p.grad.abs()),
    "normal_": lambda p: (torch.manual_seed(3), p.grad.normal_()),
    "a fused optimizer": lambda p: torch.optim.AdamW([p], fused=True).step(),
}


def check_writes() -> None:
    for name, write in WRITES.items():
        written = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 3, bias=False).double()
            x = states(9)
            if is_sharded:
                model = cp_inductor.parallelize(model, world_mesh())
                x = distribute_tensor(x, world_mesh(), [Shard(1)])
            with implicit_replication():
                model(x).square().sum().backward()
                write(model.weight)
            assert model.weight.grad is not None
            written.append((whole(model.weight.grad), whole(model.weight.detach())))
        torch.testing.assert_close(written[1], written[0], msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_written_to_as_wholes(world_size: int) -> None:
    run_ranks(world_size, check_writes)


def drawn() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    yield "dropout", lambda x: F.dropout(x, 0.4)
    yield "rand_like", torch.rand_like
    yield "normal_", lambda x: torch.empty_like(x).normal_()
    yield "bernoulli", lambda x: torch.bernoulli(x.sigmoid())
    yield "exponential_", lambda x: torch.empty_like(x).exponential_()
    yield "multinomial", lambda x: torch.multinomial(x.exp().flatten(0, 1), 2)


def check_draws(backend: str | None) -> None:
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for name, draw in drawn():
        if backend and name in ("normal_", "exponential_", "multinomial"):  # refused there
            continue
        torch._dynamo.reset()
        run = torch.compile(draw, backend=backend, fullgraph=True) if backend else draw
        for length in LENGTHS:
            x = states(length)
            torch.manual_seed(0)
            expected = draw(x), torch.rand(2)  # what follows is drawn alike as well
            torch.manual_seed(0)
            actual = run(distribute_tensor(x, world_mesh(), [Shard(1)])), torch.rand(2)
            assert torch.equal(whole(actual[0]), expected[0]), (name, length)
            assert torch.equal(actual[1], expected[1]), (name, length)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cp_aot_eager"])
def test_shards_draw_their_part_of_the_whole(backend: str | None) -> None:
    run_ranks(3, check_draws, backend)


ORDERED = """
import torch, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import cp_inductor
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
cp_inductor.parallelize(torch.nn.Linear(1, 1), mesh)
x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
product = x @ x.T  # a sum of the ranks
for compute in (F.glu, torch.tanh, lambda y: torch.where(y > 0, y, x @ x.T), torch.atleast_1d):
    print(compute(product).placements, compute(product.clone()).placements)
"""


@pytest.mark.slow
def test_placements_do_not_depend_on_hashes() -> None:
    launched = [
        subprocess.Popen(
            [sys.executable, "-c", ORDERED],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1")
    ]
    printed = {process.communicate()[0] for process in launched}
    assert len(printed) == 1 and "Replicate" in printed.pop()
