"""Plain shards: what mixes tokens and is not attention is refused; all else is let through."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.backend.capture_graph import errors_unwrapped
from cp_inductor.dtensor.axis import axis_of_mesh
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.passes.check_sequence import check_sequence
from cp_inductor.passes.find_attention import find_attention
from cp_inductor.sequence.eager import forget_judgements
from cp_inductor.sequence.follow_ops import RULES
from cp_inductor.sequence.tracks import (
    COMPUTED,
    GIVEN,
    United,
    divide,
    expand,
    fresh,
    regroup,
    rescale,
    unite,
    window,
)
from cp_inductor.torch_private.dynamo import as_backend_error
from cp_inductor.torch_private.inductor import is_input_of_forward
from tests.ranks import fake_rank, run_ranks

BATCH, LENGTH, WIDTH, HEADS, CLASSES = 2, 6, 32, 2, 7
WHOLE = 16


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A rank whose tokens are not the first ones."""
    with fake_rank(1, 2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


@pytest.fixture
def first_mesh() -> Iterator[DeviceMesh]:
    """The first rank, which warns for all."""
    with fake_rank(0, 2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


class Model(nn.Module):
    """A block of a transformer, and something before or behind its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.pointwise = nn.Conv1d(WIDTH, WIDTH, 1)
        self.over_tokens = nn.Linear(LENGTH, LENGTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.group_norm = nn.GroupNorm(2, WIDTH)
        self.embed = nn.Embedding(WHOLE, WIDTH)
        self.learned = nn.Parameter(torch.randn(1, WHOLE, WIDTH))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.register_buffer("table", torch.randn(WHOLE, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


Piece = Callable[..., Tensor]


def check(function: Callable[..., object], mesh: DeviceMesh, *args: Tensor) -> int:
    """Check a function as a compile would, and stop there; return how many attentions it has."""
    numbers = []

    def stop(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        axis = axis_of_mesh(mesh, site="a test")
        sites = find_attention(gm, axis, PlanOptions.read({})[0])
        with errors_unwrapped():
            check_sequence(gm, sites, "contiguous")
        numbers.append(len(sites))
        raise as_backend_error(Stopped(site="", expected="", got="", remedy=""))

    torch._dynamo.reset()
    with suppress(Stopped):
        torch.compile(function, backend=stop, fullgraph=True, dynamic=False)(*args)
    return numbers[0]


class Stopped(cp_inductor.CPError):
    """All that a test wants to know is known."""


def check_piece(piece: Piece, mesh: DeviceMesh, *, is_before: bool = False) -> None:
    """Check a model that has a piece before or behind its attention."""
    model = Model()

    def run(x: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if is_before:
            out = model.attend(piece(model, x, labels, positions))
        else:
            out = piece(model, model.attend(x), labels, positions)
        # A loss may be made of whatever comes out.
        return out, out.mean()

    x = torch.randn(BATCH, LENGTH, WIDTH)
    labels = torch.randint(CLASSES, (BATCH, LENGTH))
    positions = torch.arange(LENGTH, 2 * LENGTH).expand(BATCH, LENGTH)
    assert check(run, mesh, x, labels, positions) == 1


def convolve(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    return model.conv(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2)


def shift(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def shift_by_writing(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return x + shifted


def attend_linearly(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    q, k, v = model.qkv(x).chunk(3, -1)
    return x + F.elu(q) @ (F.elu(k).transpose(1, 2) @ v)


def attend_by_hand(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    q, k, v = model.qkv(x).chunk(3, -1)
    return x + (q @ k.transpose(1, 2)).softmax(-1) @ v


def wrap_around(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (1, 1), mode="circular")
    return F.conv1d(padded, model.conv.weight[..., :3], groups=WIDTH).transpose(1, 2)


def loss_of_shifted(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    # As causal language models shift them.
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(model.head(x).flatten(0, 1), labels)


def recur(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    state, states = torch.zeros(BATCH, WIDTH), []
    for token in x.unbind(1):
        state = torch.tanh(model.out(state) + token)
        states.append(state)
    return torch.stack(states, 1)


MIXING: dict[str, Piece] = {
    "cumsum": lambda m, x, *_: x.cumsum(1),
    "cumsum_of_a_keyword": lambda m, x, *_: torch.cumsum(input=x, dim=-2),
    "conv": convolve,
    "shift": shift,
    "shift_by_writing": shift_by_writing,
    "roll": lambda m, x, *_: x + x.roll(1, 1),
    "roll_of_all": lambda m, x, *_: x.roll(1),
    "flip": lambda m, x, *_: x.flip(1),
    "sort": lambda m, x, *_: x.sort(1)[0],
    "order_by_score": lambda m, x, *_: x.gather(1, x.argsort(1)),
    "linear_attention": attend_linearly,
    "attention_by_hand": attend_by_hand,
    "softmax": lambda m, x, *_: x.softmax(1),
    "over_tokens": lambda m, x, *_: x + m.over_tokens(x.mT).mT,
    "minus_mean": lambda m, x, *_: x - x.mean(1, keepdim=True),
    "minus_mean_of_flat": lambda m, x, *_: x - x.flatten(0, 1).mean(0),
    "by_largest": lambda m, x, *_: x / x.abs().amax(),
    "by_norm": lambda m, x, *_: F.normalize(x, dim=1),
    "batch_norm": lambda m, x, *_: m.batch_norm(x.mT).mT,
    "group_norm": lambda m, x, *_: m.group_norm(x.mT).mT,
    "differences": lambda m, x, *_: x[:, 1:] - x[:, :-1],
    "windows": lambda m, x, *_: x.unfold(1, 2, 1).sum(-1),
    "wrap_around": wrap_around,
    "fourier": lambda m, x, *_: torch.fft.fft(x, dim=1).real,
    "with_the_first": lambda m, x, *_: x + x[:, :1],
    "with_the_last": lambda m, x, *_: x + x[:, -1, None],
    "triangle": lambda m, x, *_: x + torch.ones(LENGTH, LENGTH).tril() @ x,
    "recurrence": recur,
    "twice": lambda m, x, *_: torch.cat([x, x], 1),
}

# What stands behind the attention, and is only returned, is said; before it, it is refused.
ATTENDED: dict[str, Piece] = {
    "repeated": lambda m, x, *_: x.repeat(1, 2, 1),
    "tiled": lambda m, x, *_: torch.tile(x, (2, 1)),
    "expanded": lambda m, x, *_: x[:, None].expand(-1, 2, -1, -1).flatten(1, 2),
}


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_is_refused(name: str, is_before: bool, mesh: DeviceMesh) -> None:
    with pytest.raises(cp_inductor.SequenceMixed):
        check_piece(MIXING[name], mesh, is_before=is_before)


@pytest.mark.parametrize("name", ATTENDED)
def test_copies_that_attend_to_each_other_are_refused(name: str, mesh: DeviceMesh) -> None:
    with pytest.raises(cp_inductor.SequenceMixed, match="copies of all tokens"):
        check_piece(ATTENDED[name], mesh, is_before=True)


def test_what_one_branch_alone_leads_to_the_attention(mesh: DeviceMesh) -> None:
    """Both branches run along the same: of the labels nothing else says what they run along."""

    def branch(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
        return torch.cond(
            model.first.sum() > 0,
            lambda x, labels: x * 2,
            lambda x, labels: model.embed(labels).cumsum(1),
            (x, labels),
        )

    with pytest.raises(cp_inductor.SequenceMixed, match="cumsum"):
        check_piece(branch, mesh, is_before=True)


GOES_ON: dict[str, Piece] = {
    "pooling": lambda m, x, *_: m.head(x.mean(1)),
    "pooling_by_weights": lambda m, x, *_: m.head(
        torch.einsum("bs,bsd->bd", m.head(x)[..., 0].sigmoid(), x)
    ),
    "norm_of_mean": lambda m, x, *_: m.norm(x.mean(1)),
    "shifted_labels": loss_of_shifted,
    "labels_cut": lambda m, x, labels, *_: F.cross_entropy(
        m.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
    ),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_mean_that_is_no_loss_is_refused(name: str, mesh: DeviceMesh) -> None:
    with pytest.raises(cp_inductor.SequenceMixed):
        check_piece(GOES_ON[name], mesh)


def counted(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    ones = torch.ones_like(x[..., 0], dtype=torch.long)
    return x + model.embed(ones.cumsum(1) - 1)


def sines(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    frequencies = torch.arange(WIDTH) / WIDTH
    return x + torch.sin(torch.arange(x.shape[1])[:, None] * frequencies)


POSITIONS: dict[str, Piece] = {
    "arange": lambda m, x, *_: x + m.embed(torch.arange(x.shape[1])),
    "arange_from_0": lambda m, x, *_: x + m.embed(torch.arange(0, end=x.shape[1])),
    "arange_and_offset": lambda m, x, *_: x + m.embed(torch.arange(x.shape[1]) + 2),
    "counted": counted,
    "sines": sines,
    "parameter": lambda m, x, *_: x + m.learned[:, : x.shape[1]],
    "buffer": lambda m, x, *_: x * m.table[: x.shape[1]],
    "buffer_narrowed": lambda m, x, *_: x * m.table.narrow(0, 0, x.shape[1]),
    "class_token": lambda m, x, *_: torch.cat([m.first.expand(BATCH, -1, -1), x], 1),
    "padding": lambda m, x, *_: F.pad(x, (0, 0, 0, 2)),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_the_shard_are_refused(name: str, mesh: DeviceMesh) -> None:
    with pytest.raises(cp_inductor.SequenceMixed):
        check_piece(POSITIONS[name], mesh, is_before=True)


def rotate(model: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None].float() * (torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.cat([angles, angles], -1)
    one, other = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()


def rotate_complex(model: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None] * (torch.arange(WIDTH // 2) / WIDTH)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def choose_experts(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    weights, experts = model.head(x).softmax(-1).topk(2, -1)
    chosen = F.one_hot(experts, CLASSES) * weights[..., None]
    return x + chosen.sum(-2) @ model.head.weight


def loss(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def loss_in_chunks(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    pieces = zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True)
    total = sum(
        F.cross_entropy(model.head(a).flatten(0, 1), b.flatten(), reduction="sum")
        for a, b in pieces
    )
    return total / labels.numel()


def loss_of_some(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    losses = F.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none")
    counts = labels > 2
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def loss_by_index(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    flat = model.head(x).log_softmax(-1).view(-1, CLASSES)
    return -flat[torch.arange(flat.shape[0]), labels.flatten()].mean()


def loss_and_balance(model: Model, x: Tensor, labels: Tensor, *_: Tensor) -> Tensor:
    chances = model.head(x).softmax(-1)
    chosen = F.one_hot(chances.argmax(-1), CLASSES).float()
    balance = (chances.mean((0, 1)) * chosen.mean((0, 1))).sum()
    return loss(model, x, labels) + 0.01 * balance


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def checkpointed(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    return checkpoint(lambda y: F.gelu(model.out(y)), x, use_reentrant=False)


def write_in_chunks(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for start in range(0, LENGTH, 2):
        out[:, start : start + 2] = model.out(x[:, start : start + 2])
    return out


FINE: dict[str, Piece] = {
    "repeated_and_apart": lambda m, x, *_: x.repeat(1, 3, 1).unflatten(1, (3, -1)).sum(1),
    "written_whole": lambda m, x, *_: torch.zeros(BATCH, LENGTH, WIDTH).copy_(x),
    "written_in_chunks": write_in_chunks,
    "nothing": lambda m, x, *_: x,
    "mlp": lambda m, x, *_: F.gelu(m.out(m.norm(x))) + F.rms_norm(x, (WIDTH,)),
    "rotary": rotate,
    "rotary_complex": rotate_complex,
    "given_positions": lambda m, x, labels, positions: x + m.embed(positions),
    "positions_from_the_rank": lambda m, x, *_: x + m.embed(torch.arange(LENGTH) + LENGTH),
    "positions_in_a_range": lambda m, x, *_: x + m.embed(torch.arange(LENGTH, 2 * LENGTH)),
    "rows_from_the_rank": lambda m, x, *_: x + m.learned[:, LENGTH : 2 * LENGTH],
    "offsets_given": lambda m, x, labels, positions: (
        x + m.embed(torch.arange(LENGTH) + positions[:, :1].amin())
    ),
    "dropout": lambda m, x, *_: F.dropout(x, 0.1),
    "noise": lambda m, x, *_: x + torch.randn_like(x) * torch.rand(LENGTH, 1),
    "conv_of_one": lambda m, x, *_: m.pointwise(x.mT).mT,
    "patches": lambda m, x, *_: F.conv1d(x.mT, m.out.weight[..., None].expand(-1, -1, 2), stride=2),
    "pairs": lambda m, x, *_: x.unflatten(1, (-1, 2)).mean(2),
    "pool": lambda m, x, *_: F.avg_pool1d(x.mT, 3),
    "experts": choose_experts,
    "masked": lambda m, x, labels, *_: x.masked_fill((labels > 3)[..., None], 0.0),
    "by_batch": lambda m, x, *_: x * torch.arange(BATCH)[:, None, None],
    "batch_repeated": lambda m, x, *_: x.repeat_interleave(2, 0),
    "labels_one_hot": lambda m, x, labels, *_: (
        x + F.one_hot(labels, CLASSES).float() @ m.head.weight
    ),
    "loss": loss,
    "loss_in_chunks": loss_in_chunks,
    "loss_of_some": loss_of_some,
    "loss_by_index": loss_by_index,
    "loss_and_balance": loss_and_balance,
    "perplexity": lambda m, x, labels, *_: loss(m, x, labels).exp(),
    "loss_per_sample": lambda m, x, labels, *_: F.cross_entropy(
        m.head(x).transpose(1, 2), labels, reduction="none"
    ).mean(1),
    "distance": lambda m, x, *_: F.mse_loss(x, x.detach() * 2),
    "checkpointed": checkpointed,
    "token_by_token": lambda m, x, *_: torch.stack([m.out(t) for t in x.unbind(1)], 1),
    "own_backward": lambda m, x, *_: Doubled.apply(x),
}


@pytest.mark.parametrize("name", FINE)
def test_what_does_not_mix_is_let_through(name: str, mesh: DeviceMesh) -> None:
    check_piece(FINE[name], mesh)


def test_tokens_one_by_one_before_the_attention(mesh: DeviceMesh) -> None:
    check_piece(FINE["token_by_token"], mesh, is_before=True)


def test_heads_in_the_place_of_tokens(mesh: DeviceMesh) -> None:
    model = Model()

    def run(x: Tensor) -> Tensor:
        q, k, v = model.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return model.out(F.scaled_dot_product_attention(q, k, v).flatten(2))

    report = cp_inductor.explain(run, torch.randn(BATCH, LENGTH, WIDTH), mesh=mesh)
    refusal = report.attentions[-1].refusal
    assert "(batch, heads, tokens, features)" in refusal["expected"]
    assert "transpose(1, 2)" in refusal["remedy"]


def test_the_whole_error(mesh: DeviceMesh) -> None:
    """Refused before anything runs; the graph of another model compiles behind it."""
    model = Model()

    def run(x: Tensor) -> Tensor:
        return model.attend(x.cumsum(1))

    x = torch.randn(BATCH, LENGTH, WIDTH)
    compiled = torch.compile(run, backend="cp_aot_eager", options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.SequenceMixed) as caught:
        compiled(x)
    error = caught.value
    assert "test_check_sequence.py" in error.site
    assert error.expected == "only attention to mix tokens of plain shards"
    assert error.got == "aten.cumsum.default, which mixes along the sequence"
    assert "check_sequence" in error.remedy
    assert counters["cp_inductor"]["sites_refused"] == 1


def test_who_knows_better(mesh: DeviceMesh) -> None:
    model = Model()
    x = torch.randn(BATCH, LENGTH, WIDTH)

    def run(x: Tensor) -> Tensor:
        return model.attend(x.cumsum(1))

    with cp_inductor.config.patch(check_sequence=False):
        report = cp_inductor.explain(run, x, mesh=mesh)
    assert [found.verdict for found in report.attentions] == ["rewritten"]
    report = cp_inductor.explain(run, x, mesh=mesh, options={"check_sequence": False})
    assert [found.verdict for found in report.attentions] == ["rewritten"]


def test_a_region_is_checked_and_bodies_in_it(mesh: DeviceMesh) -> None:
    model = Model()

    def run(x: Tensor, *, is_checkpointed: bool) -> Tensor:
        if is_checkpointed:
            return checkpoint(lambda y: model.attend(y.cumsum(1)), x, use_reentrant=False)
        return model.attend(x.cumsum(1))

    for is_checkpointed in (False, True):
        x = torch.randn(BATCH, 2 * LENGTH, WIDTH)
        with (
            cp_inductor.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
            pytest.raises(cp_inductor.SequenceMixed, match="cumsum"),
        ):
            torch.compile(run, backend="cp_aot_eager")(x, is_checkpointed=is_checkpointed)


def test_two_sequences(mesh: DeviceMesh) -> None:
    """Tokens, and those of a memory of another length that they attend to, both sharded."""
    model = Model()

    def run(x: Tensor, memory: Tensor, *, is_mixed: bool = False) -> Tensor:
        x = model.attend(x)
        memory = model.norm(memory.cumsum(1) if is_mixed else memory)
        q, _, _ = model.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        _, k, v = model.qkv(memory).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x, memory = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, 5, WIDTH)
    assert check(run, mesh, x, memory) == 2
    with pytest.raises(cp_inductor.SequenceMixed, match="cumsum"):
        check(partial(run, is_mixed=True), mesh, x, memory)


def test_streams_that_attend_together(mesh: DeviceMesh) -> None:
    """Text and image, each sharded, in one attention that knows no order."""
    model = Model()

    def run(text: Tensor, image: Tensor) -> Tensor:
        q = model.qkv(torch.cat([text, image], 1)).unflatten(-1, (3, HEADS, -1))
        q, k, v = q.permute(2, 0, 3, 1, 4)
        both = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out_text, out_image = both.split([4, LENGTH], 1)
        return (text + out_text).mean() + (image + out_image).mean()

    text, image = torch.randn(BATCH, 4, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    assert check(run, mesh, text, image) == 1


def test_the_first_rank_cannot_be_told() -> None:
    """Where rank 0 begins, it begins by any means: it is right, and the others refuse."""
    with fake_rank(0, 2):
        first = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        check_piece(POSITIONS["arange_from_0"], first, is_before=True)
        with pytest.raises(cp_inductor.SequenceMixed, match="number 0"):
            check_piece(POSITIONS["arange"], first, is_before=True)


def test_one_rank_has_it_all() -> None:
    with fake_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        check_piece(MIXING["cumsum"], mesh, is_before=True)


# What cannot be known, and what may be meant.


@torch.library.custom_op("test_check_sequence::scan", mutates_args=())
def scan(x: Tensor) -> Tensor:
    return x.cumsum(1)


@scan.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def write_to_end(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    cache = torch.zeros(BATCH, WHOLE, WIDTH)
    cache[:, -x.shape[1] :] = x
    return cache.mean()


def write_to_begin(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    cache = x.new_zeros(2, BATCH, WHOLE, WIDTH)
    cache[1, :, : x.shape[1]].copy_(x)
    return cache.mean()


def clear_some(model: Model, x: Tensor, *_: Tensor) -> Tensor:
    x[:, :2] = 0
    return x


WRITES: dict[str, Piece] = {
    "write_to_end": write_to_end,
    "write_to_begin": write_to_begin,
    "clear_some": clear_some,
}

UNKNOWN: dict[str, tuple[Piece, str]] = {
    "custom_op": (lambda m, x, *_: scan(x), "cannot tell whether test_check_sequence"),
    "order_by_expert": (
        lambda m, x, *_: x[:, m.head(x).argmax(-1)[0].argsort()],
        "cannot tell whether",
    ),
    "by_count": (
        lambda m, x, *_: x / (x[..., 0] > 0).sum(1)[:, None, None],
        "cannot tell whether the count that aten.sum",
    ),
    "one_token": (lambda m, x, *_: m.head(x[:, -1]), "returns a result of one token"),
    "mean_of_tokens": (lambda m, x, *_: x.mean(1), "returns a result of a sum or mean"),
    "cut": (lambda m, x, *_: x[:, 3:6], "returns tokens 3 to 6 of 6"),
    "narrowed": (lambda m, x, *_: x.narrow(1, 0, 3), "returns tokens 0 to 3 of 6"),
    "split": (lambda m, x, *_: x.split(3, 1)[1], "returns tokens 3 to 6 of 6"),
    "chunk": (lambda m, x, *_: x.chunk(2, 1)[0], "returns tokens 0 to 3 of 6"),
    "shifted": (lambda m, x, *_: F.pad(x[:, :-1], (0, 0, 1, 0)), "returns tokens -1 to 5"),
    "padded_and_cut": (lambda m, x, *_: F.pad(x, (0, 0, 1, -1)), "returns tokens -1 to 5"),
    "longer": (lambda m, x, *_: F.pad(x, (0, 0, 0, 2)), "returns tokens 0 to 8 of 6"),
    **{name: (piece, "returns all tokens several times") for name, piece in ATTENDED.items()},
    **{name: (piece, "writes to positions") for name, piece in WRITES.items()},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_said(name: str, mesh: DeviceMesh) -> None:
    piece, text = UNKNOWN[name]
    with pytest.warns(cp_inductor.SequenceWarning, match=text):
        check_piece(piece, mesh)


def test_each_rank_may_write_to_its_own_place(mesh: DeviceMesh) -> None:
    def write(model: Model, x: Tensor, *_: Tensor) -> Tensor:
        whole = x.new_zeros(BATCH, 2 * LENGTH, WIDTH)
        whole[:, LENGTH : 2 * LENGTH] = x
        return whole.mean()

    check_piece(write, mesh)


def test_streams_that_are_returned_by_themselves(mesh: DeviceMesh) -> None:
    model = Model()

    def run(text: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        return model.attend(torch.cat([text, image], 1)).split([4, LENGTH], 1)

    check(run, mesh, torch.randn(BATCH, 4, WIDTH), torch.randn(BATCH, LENGTH, WIDTH))


def test_a_kernel_before_the_attention_is_said(mesh: DeviceMesh) -> None:
    with pytest.warns(cp_inductor.SequenceWarning, match="test_check_sequence"):
        check_piece(UNKNOWN["custom_op"][0], mesh, is_before=True)


def test_a_mesh_for_nothing(first_mesh: DeviceMesh) -> None:
    """Attention by hand: there is no site, so that nothing says what the sequence is."""
    model = Model()
    compiled = torch.compile(
        lambda x: attend_by_hand(model, x),
        backend="cp_aot_eager",
        options={"mesh": first_mesh},
        fullgraph=True,
    )
    with pytest.warns(cp_inductor.SequenceWarning, match="no scaled_dot_product_attention"):
        compiled(torch.randn(BATCH, LENGTH, WIDTH))


def test_a_region_for_nothing(first_mesh: DeviceMesh) -> None:
    model = Model()
    x = torch.randn(BATCH, 2 * LENGTH, WIDTH)
    run = torch.compile(attend_by_hand, backend="cp_aot_eager")
    with (
        pytest.warns(cp_inductor.SequenceWarning, match="without calling scaled_dot_product"),
        cp_inductor.context_parallel(first_mesh, buffers=[x], buffer_seq_dims=[1]),
    ):
        run(model, x)


# In eager


def run_in_region(piece: Piece, mesh: DeviceMesh, *, is_before: bool, has_buffers: bool) -> None:
    """Run a block and a piece in an eager region, as `check_piece` compiles them."""
    torch.manual_seed(0)
    model = Model()
    first = 0 if has_buffers else LENGTH * mesh.get_local_rank()
    positions = torch.arange(first, 2 * LENGTH if has_buffers else first + LENGTH)
    positions = positions.expand(BATCH, -1).clone()
    x = torch.randn(*positions.shape, WIDTH)
    labels = torch.randint(CLASSES, positions.shape)
    buffers = [x, labels, positions] if has_buffers else []
    # A place in the program is followed once.
    forget_judgements()
    with cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        if is_before:
            model.attend(piece(model, x, labels, positions))
        else:
            piece(model, model.attend(x), labels, positions).abs().mean()


def run_all_in_regions(cases: Sequence[tuple[str, str, bool]], has_buffers: bool) -> dict[str, str]:
    """Return what becomes of each case on this rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tables = {"MIXING": MIXING, "GOES_ON": GOES_ON, "POSITIONS": POSITIONS, "FINE": FINE}
    verdicts = {}
    for table, name, is_before in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error", cp_inductor.SequenceWarning)
            try:
                run_in_region(
                    tables[table][name], mesh, is_before=is_before, has_buffers=has_buffers
                )
                verdict = "ran"
            except (cp_inductor.SequenceMixed, cp_inductor.SequenceWarning) as error:
                verdict = type(error).__name__
        verdicts[f"{name}, {is_before}"] = verdict
    return verdicts


BUFFERS = pytest.mark.parametrize("has_buffers", [False, True], ids=["shards", "buffers"])


@BUFFERS
def test_what_mixes_in_eager(has_buffers: bool) -> None:
    cases = [("MIXING", name, is_before) for name in MIXING for is_before in (True, False)]
    cases += [("GOES_ON", name, False) for name in GOES_ON]
    cases += [("POSITIONS", name, True) for name in POSITIONS]
    _, verdicts = run_ranks(2, run_all_in_regions, cases, has_buffers)
    assert {case: v for case, v in verdicts.items() if v != "SequenceMixed"} == {}


@BUFFERS
def test_what_does_not_mix_in_eager(has_buffers: bool) -> None:
    cases = [("FINE", name, False) for name in FINE]
    cases.append(("FINE", "token_by_token", True))
    for verdicts in run_ranks(2, run_all_in_regions, cases, has_buffers):
        assert {case: v for case, v in verdicts.items() if v != "ran"} == {}


def run_without_tokens() -> list[str]:
    """Run what a transformer does with its dims, where one rank has all tokens; return warnings."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x = torch.randn(BATCH, 1, WIDTH)
    model = Model()
    forget_judgements()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", cp_inductor.SequenceWarning)
        with cp_inductor.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            flat = model.norm(x.flatten(0, 1))
            turned = x.mT.reshape(BATCH * HEADS, WIDTH // HEADS, x.shape[1]).mT
            heads = turned.reshape(BATCH, HEADS, x.shape[1], WIDTH // HEADS).transpose(1, 2)
            whole = heads.reshape(BATCH, x.shape[1], WIDTH)
            y = model.attend(flat.view(BATCH, x.shape[1], WIDTH) + whole)
            y.view(BATCH * x.shape[1], WIDTH).sum().backward()
    return [str(one.message) for one in said]


def test_a_rank_without_tokens() -> None:
    assert run_ranks(2, run_without_tokens) == [[], []]


def run_over_labels(is_nested: bool) -> list[str]:
    """Mix labels, which no attention reaches, along the sequence."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, verdicts = Model(), []
    for mix in (lambda x: x.cumsum(1), lambda x: x * 2):
        x, labels = torch.randn(BATCH, 2 * LENGTH, WIDTH), torch.rand(BATCH, 2 * LENGTH)
        outer = cp_inductor.context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1])
        inner = cp_inductor.context_parallel(mesh) if is_nested else nullcontext()
        forget_judgements()
        try:
            with outer, inner:
                model.attend(x)
                (model.embed.weight.sum() * mix(labels)).square().mean().backward()
            verdicts.append("ran")
        except cp_inductor.SequenceMixed:
            verdicts.append("refused")
    return verdicts


@pytest.mark.parametrize("is_nested", [False, True])
def test_labels_are_a_sequence_too(is_nested: bool) -> None:
    for verdicts in run_ranks(2, run_over_labels, is_nested):
        assert verdicts == ["refused", "ran"]


def run_over_another_group() -> list[str]:
    """Mix a sequence that a region in a region attends over: on one rank it is whole."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "other"))
    model, verdicts = Model(), []
    for inner in (mesh["other"], mesh["cp"]):
        x, other = torch.randn(2, BATCH, LENGTH, WIDTH)
        forget_judgements()
        try:
            with cp_inductor.context_parallel(mesh["cp"]):
                model.attend(x)
                mixed = other.cumsum(1)
                with cp_inductor.context_parallel(inner):
                    model.attend(mixed)
            verdicts.append("ran")
        except cp_inductor.SequenceMixed:
            verdicts.append("refused")
    return verdicts


def test_a_region_in_a_region_over_another_group() -> None:
    for verdicts in run_ranks(2, run_over_another_group):
        assert verdicts == ["ran", "refused"]


def run_again_in_regions() -> list[list[str]]:
    """Run one place in the program with pieces in turn; return what was said of each."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    forget_judgements()
    model, verdicts = Model(), []
    ids = torch.arange(LENGTH).expand(BATCH, -1) + LENGTH * mesh.get_local_rank()
    x = model.embed(ids).detach()

    def decide(x: Tensor) -> Tensor:
        # As Hugging Face looks for documents that are packed.
        assert not (ids.diff(dim=1, prepend=ids[:, :1] - 1) != 1).cumsum(1)[:, -1].any()
        return x + model.embed(ids)

    pieces = (
        [lambda x: x.cumsum(1)] * 2 + [lambda x: x] * 2 + [lambda x: x.cumsum(1)] * 2 + [decide]
    )
    for piece in pieces:
        if piece is decide:
            forget_judgements()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with cp_inductor.context_parallel(mesh):
                    model.attend(piece(x))
                verdict = []
            except cp_inductor.SequenceMixed:
                verdict = ["refused"]
        verdicts.append(
            verdict + [str(w.message) for w in caught if w.category is cp_inductor.SequenceWarning]
        )
    return verdicts


def test_a_place_in_eager_is_followed_until_it_is_right_and_when_it_changes() -> None:
    for verdicts in run_ranks(2, run_again_in_regions):
        *places, (decision, *_) = verdicts
        first, second, right, again, (changed,), late = places
        assert first == second == late == ["refused"] and right == again == []
        assert "cumsum ran, but not when this place was checked" in changed
        assert "decides something by this rank's shard alone" in decision


# DTensors know how they are sharded; that they no longer are, they do not say.

LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "cat": lambda x: torch.cat([x, x], 1),
}


@pytest.mark.parametrize("name", LOST)
def test_a_sharding_that_is_lost_is_said(name: str, mesh: DeviceMesh) -> None:
    def run(x: Tensor) -> Tensor:
        q = LOST[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    x = distribute_tensor(torch.randn(BATCH, 2 * LENGTH, WIDTH), mesh, [Shard(1)])
    with pytest.warns(cp_inductor.SequenceWarning, match=r"every rank computes .*because .*Shard"):
        torch.compile(run, backend="cp_aot_eager", fullgraph=True)(x)


def test_a_sharding_that_is_given_up_on_purpose(mesh: DeviceMesh) -> None:
    def run(x: DTensor) -> Tensor:
        whole = x.redistribute(placements=[Replicate()])
        q = whole.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    x = distribute_tensor(torch.randn(BATCH, 2 * LENGTH, WIDTH), mesh, [Shard(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", cp_inductor.SequenceWarning)
        torch.compile(run, backend="cp_aot_eager", fullgraph=True)(x)


# The pieces.


def test_tracks() -> None:
    batch, tokens, width = (fresh(size, GIVEN) for size in (2, 6, 32))
    flat = regroup([batch, tokens, width], (12, 32))
    assert flat is not None
    assert [part.size for part in flat[0]] == [2, 6]
    heads = regroup(flat, (2, 6, 4, 8))
    assert heads is not None
    assert unite(heads[1], tokens) is United.ALIKE
    assert unite(width, fresh(32, COMPUTED)) is United.ALIKE
    assert [part.size for part in expand(width)] == [4, 8], "a split is the track's"
    assert regroup([batch, tokens], (4, 3)) is not None, "tokens two by two, of each of the batch"
    assert unite(batch, tokens[:0]) is United.ALIKE


def test_tracks_without_tokens() -> None:
    batch, tokens, width = fresh(2, GIVEN), fresh(0, GIVEN), fresh(32, COMPUTED)
    flat = regroup([batch, tokens, width], (0, 32))
    assert flat is not None
    assert [part.size for part in flat[0]] == [2, 0]
    heads = regroup(flat, (2, 0, 4, 8))
    assert heads is not None
    assert unite(heads[1], tokens) is United.ALIKE
    assert [part.size for part in heads[2] + heads[3]] == [4, 8]
    turned = regroup([batch, tokens, width], (2, 0))
    assert turned is not None
    assert [part.size for part in turned[1]] == [0, 4, 8]
    keys = fresh(0, GIVEN)
    scores = regroup([batch, heads[2], tokens, keys], (8, 0, 0))
    assert scores is not None
    assert unite(scores[1], tokens) is United.ALIKE
    assert unite(scores[2], keys) is United.ALIKE
    # Nothing tells what of it is in a chunk.
    assert regroup([batch, tokens, width], (3, 0, 32)) is None
    assert regroup([tokens], (0, 2)) is None
    assert divide(tokens[0], 0) is None
    assert unite(tokens, fresh(2, GIVEN)) is United.APART
    assert rescale((*batch, *tokens), 4) != ()


def test_tracks_that_are_shifted() -> None:
    tokens = fresh(6, GIVEN)
    ahead, behind = window(tokens, 1, 5), window(tokens, 0, 5)
    assert ahead is not None
    assert behind is not None
    assert unite(ahead, behind) is United.SHIFTED
    other = fresh(5, COMPUTED)
    assert unite(other, ahead) is United.ALIKE
    assert unite(other, behind) is United.SHIFTED


def test_tracks_that_are_cut_up_differently() -> None:
    one, other = fresh(6, GIVEN), fresh(6, GIVEN)
    assert divide(one[0], 2) is not None
    assert divide(other[0], 3) is not None
    assert unite(one, other) is United.APART


def test_rules_are_of_ops() -> None:
    assert all(isinstance(op, torch._ops.OpOverload) for op in RULES)


def test_an_input_of_the_forward_is_no_name() -> None:
    node = fx.Graph().placeholder("primals_1")
    assert not is_input_of_forward(node)
