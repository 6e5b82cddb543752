"""Ops without a sharding rule over sharded tokens: results and gradients of one process.

A launch of ranks computes all rows of the table, in eager code; another compiles some of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
import cp_inductor.backend
from cp_inductor import CPError
from tests.support.ranks import on_ranks, run_ranks, world_mesh

BATCH, LENGTH, WIDTH, CLASSES = 2, 7, 8, 10
TOLERANCE = 1e-10  # float64, sums of a hundred numbers

# A row computes of hidden states (B, S, H), numbers of classes (B, S) and a mask (B, S).
Row = Callable[[Tensor, Tensor, Tensor], Tensor]


def write_by_mask(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Padding set to zero, in place."""
    y = x * 1
    y[mask] = 0.0
    return y


def mix_depths(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mixture of depths: the three best tokens pass through a layer."""
    weights, chosen = x[..., 0].topk(3, 1)
    index = chosen[..., None].expand(-1, -1, WIDTH)
    return x.scatter_add(1, index, x.gather(1, index).tanh() * weights[..., None])


def compute_where(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """As many tokens as the data says."""
    chosen = x[..., 0] > 0
    y = x * 1
    y[chosen] = y[chosen].tanh()
    return y


def route(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """A mixture of experts, each over its own tokens."""
    tokens = x.flatten(0, 1)
    expert = tokens.detach()[:, :3].argmax(-1)
    out = torch.zeros_like(tokens)
    for number in range(3):
        own = torch.where(expert == number)[0]
        out.index_add_(0, own, tokens[own] * (number + 1.0))
    return out.view_as(x)


def give_data(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    y = x * 2
    y.data = x.detach().roll(1, 1)
    return x * y


def places(*indices: int) -> Tensor:
    return torch.tensor(indices)


def rows(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64).cumsum(-1)


def of_channels(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    x = F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)
    return F.linear(x, rows(3, WIDTH))


def of_neighbours(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return F.linear(F.max_pool1d(x.transpose(1, 2), 3, 2).transpose(1, 2), rows(3, WIDTH))


ROWS: dict[str, Row] = {
    "one_hot": lambda x, ids, mask: F.one_hot(ids, CLASSES) * x[..., :1],
    "one_hot of as many as there are": lambda x, ids, mask: F.one_hot(ids) * x[..., :1],
    "logsigmoid": lambda x, ids, mask: F.logsigmoid(x),
    "prelu": lambda x, ids, mask: F.prelu(x.transpose(1, 2), rows(WIDTH)).transpose(1, 2),
    "hardtanh": lambda x, ids, mask: F.hardtanh(x, -0.3, 0.4),
    "bce": lambda x, ids, mask: F.binary_cross_entropy_with_logits(x[..., 0], mask.to(x.dtype)),
    "bce weighted": lambda x, ids, mask: F.binary_cross_entropy_with_logits(
        x, (x > 0).to(x.dtype), rows(WIDTH), pos_weight=rows(WIDTH)
    ),
    "masked_scatter": lambda x, ids, mask: x.masked_scatter(
        mask[..., None].expand_as(x), rows(6, 8)
    ),
    "masked_scatter of states": lambda x, ids, mask: x.masked_scatter(mask[..., None], x * 2),
    "argmax": lambda x, ids, mask: x.argmax(1),
    "data": give_data,
    "pool to one": lambda x, ids, mask: F.adaptive_avg_pool1d(x.mT, 1)[..., 0],
    "convolution over rows": lambda x, ids, mask: (
        F.conv1d(x.flatten(0, 1)[:, None], rows(1, 1, 3), padding=1).view_as(x).sum(1)
    ),
    "last that is no padding": lambda x, ids, mask: x[
        torch.arange(BATCH), (torch.arange(LENGTH) * (ids != 3)).argmax(-1)
    ],
    "gather of the largest": lambda x, ids, mask: x.gather(
        1, (ids == ids.amax(1, keepdim=True)).int().argmax(-1)[:, None, None].expand(-1, 1, WIDTH)
    ).squeeze(1),
    "x[mask]": lambda x, ids, mask: x[mask],
    "x[mask] = 0": write_by_mask,
    "masked_select": lambda x, ids, mask: x.masked_select(mask[..., None]),
    "nonzero": lambda x, ids, mask: mask.nonzero(),
    "unique": lambda x, ids, mask: ids.unique(),
    "index_add": lambda x, ids, mask: x.index_add(1, places(0, 2, 6), rows(2, 3, 8)),
    "index_add_": lambda x, ids, mask: (x * 1).index_add_(1, places(0, 2, 6), rows(2, 3, 8)),
    "index_add_ of tokens": lambda x, ids, mask: torch.zeros_like(x).index_add_(
        1, places(0, 2, 3, 6, 5, 1, 1), x
    ),
    "index_copy_": lambda x, ids, mask: (x * 1).index_copy_(1, places(0, 2, 6), rows(2, 3, 8)),
    "scatter_": lambda x, ids, mask: (x * 1).scatter_(1, ids[..., None] % LENGTH, 0.5),
    "scatter_reduce": lambda x, ids, mask: torch.zeros_like(x).scatter_reduce(
        1, (ids % LENGTH)[..., None].expand_as(x), x, "amax"
    ),
    "bincount": lambda x, ids, mask: torch.bincount(ids.flatten(), minlength=12),
    "searchsorted": lambda x, ids, mask: torch.searchsorted(rows(7), x),
    "repeat_interleave": lambda x, ids, mask: x.repeat_interleave(2, 1),
    "repeat_interleave by data": lambda x, ids, mask: x.repeat_interleave(ids[0] % 3, 1),
    "flatten(1)": lambda x, ids, mask: x.flatten(1) @ rows(LENGTH * WIDTH, 3),
    "token shift": lambda x, ids, mask: F.pad(x, (0, 0, 1, -1)) * x,
    "unbind": lambda x, ids, mask: x.unbind(1)[5],
    "unfold": lambda x, ids, mask: x.unfold(1, 3, 2),
    "batch_norm": of_channels,
    "max_pool1d": of_neighbours,
    "movedim": lambda x, ids, mask: x.movedim(1, 0).sin(),
    "pixel_shuffle": lambda x, ids, mask: F.pixel_shuffle(x[:, None].repeat(1, 4, 1, 1), 2),
    "cdist": lambda x, ids, mask: torch.cdist(x, x + 1),
    "ctc_loss": lambda x, ids, mask: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), places(1, 2, 3, 4).view(2, 2), (7, 7), (2, 2)
    ),
    "quantile": lambda x, ids, mask: x.quantile(0.3, 1),
    "unsqueeze_": lambda x, ids, mask: (x * 1).unsqueeze_(1).transpose_(1, 2),
    "tril_": lambda x, ids, mask: (x * 1).tril_(),
    "1 << ids": lambda x, ids, mask: ids << 1,
    "mixture of depths": mix_depths,
    "as many as the data says": compute_where,
    "mixture of experts": route,
}
# Those that one graph can hold.
COMPILED = (
    *("logsigmoid", "bce", "bce weighted", "masked_scatter", "last that is no padding"),
    "gather of the largest",
    *("index_add_ of tokens", "flatten(1)", "batch_norm", "scatter_reduce", "pixel_shuffle"),
)


class Model(nn.Module):
    """A layer, and a row of the table behind it."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.row = nn.Linear(WIDTH, WIDTH).double(), row

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return self.row(self.layer(x), ids, mask)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    ids = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    ids[1, 5], ids[0, 6] = CLASSES - 1, 3  # the largest is on one rank alone
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 1:4] = mask[1, 3:6] = True
    return [x, ids, mask]


def run(model: nn.Module, given: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the result and the gradients of the input and of all weights."""
    given[0].requires_grad_()
    result = model(*given)
    if result.is_floating_point():
        (result * result.detach().cos()).sum().backward()
    return result, [given[0].grad, *(parameter.grad for parameter in model.parameters())]


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differs(name: str, mesh: DeviceMesh, is_compiled: bool) -> str | None:
    """Return how a row over shards differs from one process; None if it does not."""
    expected, gradients = run(Model(ROWS[name]), inputs())
    model: nn.Module = cp_inductor.parallelize(Model(ROWS[name]), mesh)
    if is_compiled:
        model.compile(backend="cp_aot_eager", fullgraph=True, dynamic=False)
    shards: list[Tensor] = [distribute_tensor(one, mesh, [Shard(1)]) for one in inputs()]
    with implicit_replication():
        result, found = run(model, shards)
    for what, actual, wanted in zip(
        ["the result", "the gradient of x", "of a weight", "of a bias"],
        map(whole, [result, *found]),
        [expected, *gradients],
        strict=True,
    ):
        if actual is None or wanted is None:
            if actual is not wanted:
                return f"{name}: {what} is missing on one side"
        elif actual.shape != wanted.shape or (actual - wanted).abs().max() > TOLERANCE:
            return f"{name}: {what} is another"
    return None


def table_gradients() -> list[float]:
    """Return how far gradients of a table are off; of the same sizes, they are counted or not."""
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(1, 1), mesh)
    ids = inputs()[1]
    shards = distribute_tensor(ids, mesh, [Shard(1)])
    off = []
    for is_counted in (False, True, False, True):
        one = rows(CLASSES, WIDTH).requires_grad_()
        F.embedding(ids, one, scale_grad_by_freq=is_counted).square().sum().backward()
        other = distribute_tensor(rows(CLASSES, WIDTH), mesh, [Replicate()]).requires_grad_()
        F.embedding(shards, other, scale_grad_by_freq=is_counted).square().sum().backward()
        assert one.grad is not None and isinstance(other.grad, DTensor)
        off.append(float((one.grad - whole(other.grad)).abs().max()))
    return off


def check(names: list[str], is_compiled: bool) -> list[str]:
    mesh = world_mesh()
    cp_inductor.shard(inputs()[0], mesh)  # from now on, means are over all tokens
    said = []
    for name in names:
        torch._dynamo.reset()
        difference = differs(name, mesh, is_compiled)
        said += [difference] if difference is not None else []
    return said


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_and_gradients(world_size: int) -> None:
    for said in run_ranks(world_size, check, list(ROWS), False):
        assert said == []


@pytest.mark.slow
def test_compiled() -> None:
    for said in run_ranks(2, check, list(COMPILED), True):
        assert said == []


@pytest.mark.slow
@on_ranks(2)
def test_the_sequence_stays_sharded() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x, ids, mask = (distribute_tensor(one, mesh, [Shard(1)]) for one in inputs())
    x.requires_grad_()
    with implicit_replication():
        # What computes elements alone gathers nothing, forward and backward.
        for name in ("one_hot", "logsigmoid", "prelu", "hardtanh"):
            x.grad = None
            row = ROWS[name](x, ids, mask)
            row.sum().backward()
            assert row.placements == x.grad.placements == (Shard(1),), name
        # A result of the shape of the tokens is sharded as they are.
        assert ROWS["masked_scatter"](x, ids, mask).placements == (Shard(1),)
        assert ROWS["x[mask]"](x, ids, mask).placements == (Replicate(),)


@pytest.mark.slow
@on_ranks(2)
def test_what_is_refused() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x = distribute_tensor(inputs()[0], mesh, [Shard(1)])
    with implicit_replication():
        with pytest.raises(
            CPError, match=r"a plain tensor of shape \(2, 7, 8\); make it from a DT"
        ):
            torch.zeros(2, 9, 8, dtype=x.dtype)[:, :LENGTH].add_(x)
        with pytest.raises(CPError, match=r"as_strided.*use unfold or slices"):
            x.as_strided((2, 3), (1, 2))
        before = x.full_tensor()
        with pytest.raises(CPError, match=r"a plain tensor of shape \(2, 7, 8\); distribute it"):
            x.data = inputs()[0] + 1
        assert torch.equal(x.full_tensor(), before)
        # What is wrong on one process has the error of one process.
        with pytest.raises(RuntimeError, match="Number of elements of source") as raised:
            x.masked_scatter(x > 0, rows(2))
        assert not isinstance(raised.value, CPError)


@pytest.mark.slow
@on_ranks(2)
def test_draws_are_those_of_the_first_rank() -> None:
    """Ranks that are seeded otherwise hold parts of what the first one drew."""
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    rates = inputs()[0].exp()
    expected = torch.poisson(rates, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(dist.get_rank())
    drawn = torch.poisson(distribute_tensor(rates, mesh, [Shard(1)]))
    assert isinstance(drawn, DTensor)
    assert drawn.placements == (Shard(1),)
    assert torch.equal(drawn.full_tensor(), expected)


def check_log() -> list[str]:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("cp_inductor")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        x = distribute_tensor(torch.randn(1, 31, 3), mesh, [Shard(1)])
        for _ in range(2):
            x.renorm(2, 1, 1.0)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return said


@pytest.mark.slow
def test_a_gather_is_logged_once() -> None:
    first, other = run_ranks(2, check_log)
    assert len(first) == 1
    assert "aten.renorm.default (test_on_whole.py:" in first[0]
    assert "372 bytes" in first[0]
    assert other == []


@pytest.mark.slow
@on_ranks(2)
def test_outputs_of_linear_layers_go_into_graphs() -> None:
    """A linear layer's output is a view of what torch places as _StridedShard."""
    mesh = world_mesh()
    layer = nn.Linear(WIDTH, WIDTH).double()
    expected = layer(inputs()[0]).flatten(0, 1).sin()
    cp_inductor.parallelize(layer, mesh)
    states = layer(distribute_tensor(inputs()[0], mesh, [Shard(1)]))
    flat = torch.compile(lambda x: x.flatten(0, 1).sin(), backend="cp_aot_eager", fullgraph=True)
    torch.testing.assert_close(flat(states).full_tensor(), expected)


@pytest.mark.slow
def test_rows_that_are_looked_up_often_are_counted_on_all_ranks() -> None:
    """DTensor counted each rank's own: gradients were off by their own size."""
    for off in run_ranks(2, table_gradients):
        assert max(off) < TOLERANCE


@pytest.mark.slow
@on_ranks(2)
def test_flattened_labels_are_gathered_in_graphs() -> None:
    """Labels that are flattened are placed as _StridedShard, which graphs must gather."""
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(1, 1), mesh)
    x, ids, _ = inputs()

    def loss(x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(x.flip(1).flatten(0, 1), ids.flatten() % WIDTH)

    compiled = torch.compile(loss, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    shards = [distribute_tensor(one, mesh, [Shard(1)]) for one in (x, ids)]
    found: Tensor = compiled(*shards)
    torch.testing.assert_close(whole(found), loss(x, ids))


@pytest.mark.slow
@on_ranks(2)
def test_a_view_that_the_local_tensor_does_not_allow_is_a_copy() -> None:
    """A gathered tensor has other strides than DTensor says: what is a view there is none here."""
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(1, 1), mesh)
    x = inputs()[0]

    def normalize(x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, 2), (x.shape[1],)).square().sum(0)

    ours = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    theirs = x.clone().requires_grad_()
    weights = torch.arange(x[0].numel(), dtype=x.dtype).view(x.shape[2], -1)
    with implicit_replication():
        (normalize(ours) * weights).sum().backward()
    (normalize(theirs) * weights).sum().backward()
    torch.testing.assert_close(whole(ours.grad), theirs.grad)
