"""Plain shards: every program is right, or refused on every rank; none is silently wrong.

The programs are rows, as tests/support/idioms.py explains, of a model behind an attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

import cp_inductor
from cp_inductor.backend.failed_trace import errors_unwrapped
from cp_inductor.passes.pipeline import capture
from cp_inductor.passes.settings import read_settings
from cp_inductor.torch_private.dynamo import as_backend_error
from tests.support.hunt import (
    SEQ_DIMS,
    Program,
    expand,
    judge_on_rank,
    make_batch,
    make_model,
    piece,
)
from tests.support.idioms import rows
from tests.support.ranks import forget_compiles, run_ranks, world_mesh

# What makes hidden states of hidden states, each token by itself.
RIGHT = """
x   x + m.mix(F.gelu(m.norm(x)))   F.rms_norm(x, (WIDTH,))   m.mix(x) * F.silu(m.mix(x))
x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()   x.clamp(-1, 1).where(x > 0, x * 2)
m.mix(x.flatten(0, 1)).view(x.shape)   m.mix(x.reshape(-1, WIDTH)).view(len(x), -1, WIDTH)
m.norm(x.transpose(0, 1)).transpose(0, 1)
m.norm(x.transpose(0, 1).reshape(-1, WIDTH)).view(-1, len(x), WIDTH).mT.mT.transpose(0, 1)
torch.einsum("bse,fe->bsf", x, m.mix.weight)   (m.mix.weight @ x.mT).mT
torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, -1)), \
m.rows[:2, :12, None] * m.rows[0, :12]).flatten(2)
x.cumsum(-1).roll(1, -1).flip(-1).sort(-1)[0]   x.softmax(-1) + x.log_softmax(-1)
q, k, v = m.heads(x); x + rope(q, k, v, b.places)   x + sinusoids(b.places)
torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * \
torch.polar(torch.ones_like(b.weights), b.weights)[..., None]).flatten(-2)
x + m.rows[b.places]   x + m.rows.detach().index_select(0, b.places.flatten()).view_as(x)
y = torch.zeros_like(x); y[..., ::2] = x[..., 1::2]; y[..., 1::2] = -x[..., ::2]; y
y = torch.zeros(x.shape, dtype=x.dtype); y[..., :4] = x[..., 4:8]; y + x
x.clone().mul_(2).add_(m.cls).relu_()   x.masked_fill((b.labels > 9)[..., None], 0.0)
x + F.one_hot(b.labels, VOCAB).double() @ m.head.weight   F.dropout(x, 0.0)
w, i = m.router(x).softmax(-1).topk(2, -1); \
x + (F.one_hot(i, EXPERTS) * w[..., None]).sum(-2) @ m.router.weight
`nn.Conv1d(WIDTH, WIDTH, 1)`(x.mT).mT   m.attend(x.repeat_interleave(2, 0))[::2]
x[:, :, None].expand(-1, -1, 2, -1).mean(2)   Doubled.apply(x)   x + x.detach() * 2
checkpoint(lambda y: F.gelu(m.norm(y)), x, use_reentrant=False)
with torch.no_grad(): y = x.sigmoid(); x + y
with torch.autocast("cpu", enabled=False): y = m.norm(x).double(); x + y
y = m.attend(x.flip(-1), is_causal=False); x + attention(m.heads(x)[0], *m.heads(y)[1:])
with local_attention(): y = attention(*(x.transpose(0, 1)[:, None],) * 3); x + y.transpose(0, 1)
y = x.cumsum(1); x
"""
# Right as well, but Dynamo has no graph for it.
RIGHT_IN_EAGER = """
x * nn.Parameter(x.detach() * 2)
"""
RIGHT_LOSSES = """
F.mse_loss(x, x.detach() * 2, reduction="none").square().mean()   F.mse_loss(x, m.embed(b.labels))
-m.head(x).log_softmax(-1).gather(-1, b.labels[..., None]).mean()   m.head(x.mean(1)).mean()
F.cross_entropy(m.head(x).mT, b.labels)   m.loss(x, b.labels, reduction="none").mean()
F.cross_entropy(m.head(x).mT, b.labels, reduction="none").mean(1).mean(0)
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED))
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED), label_smoothing=0.1)
m.loss(x, b.labels) + 0.1 * m.attend(x).square().mean()
m.loss(x, b.labels) + m.rows.square().mean()
m.loss(x, b.labels, reduction="sum")  # sum
m.loss(x, b.labels, reduction="sum") / (3 * m.rows.shape[0])  # sum
m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED), reduction="sum") / 14  # sum
torch.einsum("bs,bse->be", m.head(x)[..., 0].sigmoid(), x).sum()  # sum
torch.dot(x.flatten(), m.embed(b.labels).flatten())  # sum
(x.flatten(0, 1).T @ m.embed(b.labels).flatten(0, 1)).sum()  # sum
(x * (b.labels > 9)[..., None]).sum()  # sum
"""
# Right in eager code; in a graph, whose tokens are half of those is not known.
DECLARED = """
m.attend(F.conv1d(x.mT, m.mix.weight[..., None].expand(-1, -1, 2), stride=2).mT).mean()
"""
ONES = "w = torch.ones($n, dtype=x.dtype)"
# Attentions that are not over the sequence; tokens that meet others, or are replaced; positions
# that each rank makes; numbers that were one until a part was written to; what is kept for later.
REFUSED = f"""
m.attend(x.reshape(-1, 3, WIDTH)).view(x.shape)
m.attend(x.transpose(0, 1), is_causal=False).transpose(0, 1)
q, k, v = m.heads(x); x + attention(q, k[:, :, : $n // 2], v[:, :, : $n // 2])
q, k, v = m.heads(x); x + attention(q, $rows, v)   m.attend(x.repeat(1, 2, 1))[:, :$n]
q, k, v = m.heads(x); x + attention($rows[:, :, :4], k, v).mean(1, keepdim=True)
m.attend(torch.cat([m.rows[:2].expand(len(x), -1, -1), x], 1))[:, 2:]
q, k, v = m.first(x).unflatten(-1, (3, HEADS, -1)).unbind(2); \
F.scaled_dot_product_attention(q, k, v).flatten(2)
m.attend(torch.cat([x, x * 2], 1))[:, :$n]   x.cumsum(1)   torch.cumsum(input=x, dim=-2)
`nn.Conv1d(WIDTH, WIDTH, 3, padding=1)`(x.mT).mT   x + F.pad(x, (0, 0, 1, 0))[:, :-1]
x + F.pad(x, (0, 0, 1, -1))   y = torch.zeros_like(x); y[:, 1:] = x[:, :-1]; x + y
x + x.roll(1, 1)   x.roll(1)   x.flip(1)   x.sort(1)[0]   x.gather(1, x.argsort(1))
x + (x @ x.mT).softmax(-1) @ x   x + x.sigmoid() @ (x.mT @ x)   x.softmax(1)
x.flatten(0, 1).softmax(0).view(x.shape)   x + (x.mT @ m.rows[:$n, :$n]).mT
x - x.mean(1, keepdim=True)   x / x.abs().amax()   F.normalize(x, dim=1)
`nn.BatchNorm1d(WIDTH)`(x.mT).mT   `nn.GroupNorm(2, WIDTH)`(x.mT).mT
x + (x[:, 1:] - x[:, :-1]).square().mean()   x + x.unfold(1, 2, 1).sum(-1).mean()
x + F.avg_pool1d(x.mT, 3, 1).mean()   torch.fft.fft(x, dim=1).real   x + x[:, :1]   recur(x)
x + F.embedding_bag(x.argmax(-1), m.rows)[:, None]   x[:, torch.arange($n).flip(0)]
x + x[:, ::2].square().mean()   torch.cat([x[:, 3:], x[:, :3]], 1)
x.gather(1, b.places.flip(1)[..., None].expand_as(x))
torch.as_strided(x.contiguous(), x.shape, (WIDTH, WIDTH, 1))   x.mT.reshape(len(x), -1, WIDTH)
Mixing.apply(x)   checkpoint(lambda y: y.cumsum(1), x, use_reentrant=False)
x + x.data.cumsum(1)   x + x.detach().flip(1)
with torch.no_grad(): y = x.mean(1, keepdim=True); x + y
torch.cat([m.rows[:1].expand(len(x), 1, WIDTH), x[:, 1:]], 1)   y = x.clone(); y[:, 0] = m.cls; y
y = x.clone(); y.unflatten(-1, (2, -1)).transpose(1, 2)[:, :, 0].zero_(); y
y = x.detach().clone(); torch._foreach_copy_([y], [x.detach().roll(1, 1)]); x + y
y, pull = torch.func.vjp(lambda w: F.linear(x.detach(), w), m.mix.weight); \
F.linear(x, m.mix.weight - 0.1 * pull(torch.ones_like(y))[0])
x.index_fill(1, torch.tensor([0]), 0.0)   x + m.rows[torch.arange($n)]
x + m.rows[torch.arange($n - 1, -1, -1)]   x + m.rows[torch.arange($n) + 0 * len(x)]
x * torch.tensor([i / 6 for i in range($n)])[:, None]
x + m.rows[torch.ones_like(x[..., 0]).long().cumsum(1) - 1]
x + m.rows[torch.ones($n).nonzero().squeeze(-1)]   x * torch.linspace(0, 1, $n)[:, None]
x + m.rows[:$n]   x * m.rows.detach()[:$n]
x + torch.sin(torch.arange($n)[:, None] * torch.arange(WIDTH))
x + torch.ones($n, $n, dtype=x.dtype).tril() @ x   {ONES}; w[0].zero_(); x * w[:, None]
{ONES}; w[:3].fill_(4); x + w[:, None]   {ONES}; w[::2] = 0.5; x * w[:, None]
{ONES}; w.view(2, -1)[0].mul_(2); x * w[:, None]
x + torch.zeros($n, $n, dtype=x.dtype).fill_diagonal_(1)[0][:, None]
{ONES}; w[2:4].copy_(m.cls[:2].detach()); x * w[:, None]
{ONES}; w[0].zero_(); torch.where(w[:, None] > 0, x, 0.0)
x * F.pad(torch.ones($n - 1), (1, 0))[:, None]
m.seen.add_(x.detach().mean((0, 1))); x   m.seen.add_(x.detach().amax((0, 1))); x
m.seen[:VOCAB].add_(F.one_hot(b.labels, VOCAB).sum((0, 1))); x
"""
REFUSED_LOSSES = """
F.cross_entropy(m.head(x[:, 0]), b.labels[:, 0])   m.head(x[:, -1]).square().mean()
m.loss(x[:, 1:], b.labels[:, 1:])   m.loss(x, F.pad(b.labels, (0, 1), value=IGNORED)[:, 1:])
m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED))
m.loss(x, b.labels, weight=m.rows[:VOCAB, 0].detach().abs())
(m.loss(x, b.labels, reduction="none").view_as(b.labels) * (b.places > 3)).sum() / \
(b.places > 3).sum()
m.loss(x, b.labels, reduction="none")[b.places.flatten() > 3].mean()
c = m.router(x).softmax(-1); m.loss(x, b.labels) + \
(c.mean((0, 1)) * F.one_hot(c.argmax(-1), EXPERTS).double().mean((0, 1))).sum()
m.loss(x, b.labels).exp()   x.mean() * m.embed(b.labels).mean()
F.mse_loss(x, m.embed(b.labels)).sqrt()   x.std()   x.norm()   x.amax(1).mean()
x.flatten().logsumexp(0)   F.cross_entropy(m.head(x.mean(1)), b.labels[:, 0] * 0)
m.norm(x.mean(1)).square().mean()   (x.flatten(0, 1).T @ m.embed(b.labels).flatten(0, 1)).norm()
c = m.head(x).softmax(-1).mean((0, 1)); -(c * c.log()).sum()   x.sum() + m.embed(b.labels).mean()
x.sum() + m.rows.square().sum()   -F.logsigmoid(x.sum(1) - m.embed(b.labels).sum(1)).mean()
m.loss(x + F.embedding(b.labels, m.embed.weight, scale_grad_by_freq=True), b.labels)
"""
# What Dynamo has no graph for.
IN_EAGER = """
x / x.abs().amax().item()
y = x.clone(); y.data = x.detach().flip(1); y   x + m.rows[b.places.max()]
x + torch.from_dlpack(x.detach().mean(1))[:, None]   x * torch.from_numpy(x.detach().numpy() * 1)
f = io.BytesIO(); torch.save(x.detach().mean(1), f); f.seek(0); x + torch.load(f)[:, None]
x * torch.from_numpy(np.linspace(0, 1, $n))[:, None]
x + nn.Parameter(x.detach().clone()).softmax(1)   x * nn.Parameter(x).mean(1, keepdim=True).tanh()
with torch.no_grad(): y = nn.Parameter(x * 2); x * y.amax()
y = torch.nested.as_nested_tensor([*x], layout=torch.jagged); x + y.to_padded_tensor(0.0).softmax(1)
y = torch.nested.as_nested_tensor([*x]); x + torch.nested.to_padded_tensor(y, 0.0).cumsum(1)
"""
LOSSES_IN_EAGER = """
m.loss(x, b.labels, reduction="sum") / (b.places > 3).sum().item()
"""
# Sizes that data decides, which Python and compiled code read as plain numbers.
SIZED = """
m.loss(x, b.labels) * len(b.ids.unique())   m.loss(x, b.labels) * x[b.keep].shape[0]
n = b.keep.nonzero().unbind(); m.loss(x, b.labels) * len(n)
n = b.ids.to_sparse().values(); torch._dynamo.graph_break(); m.loss(x, b.labels) * n.nbytes
"""
SIZED_IN_GRAPHS = "\n".join(["", *SIZED.split("\n")[-2:]])
PER_RANK = """
with per_rank(): y = x + x.roll(1, 1); y   y = x.clone(); with per_rank(): y[:, 0] = m.cls; y
"""
LOSSES_PER_RANK = """
with per_rank(): t = m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED)); t
"""


def programs_of(steps: str, losses: str = "", way: str = "region") -> Iterator[Program]:
    """Yield programs of 12 tokens, each with a row behind an attention and before another one."""
    for is_loss, table in ((False, steps), (True, losses)):
        for row in rows(table) if table else ():
            text, *tags = expand(row, Random(0)).split("  # ")
            how: dict[str, Any] = {"tags": frozenset(tags), "is_whole": way == "mesh"}
            done = ["m.attend(x)"] if is_loss else ["m.attend(x)", text, "m.attend(x)"]
            yield Program(0, way, tuple(done), loss=text if is_loss else Program.loss, **how)


def faults(programs: Iterator[Program], expected: str) -> dict[str, list[str]]:
    """Return the programs whose verdict is not what it should be, on every rank alike."""
    some = [*programs]
    every = run_ranks(2, judge_on_rank, some)
    return {
        str(program): [str(one) for one in said]
        for program, *said in zip(some, *every, strict=True)
        if not all(re.match(expected, str(one)) for one in said)
    }


@pytest.mark.slow
def test_what_computes_each_token_by_itself_is_right() -> None:
    programs = programs_of(RIGHT + RIGHT_IN_EAGER.lstrip(), RIGHT_LOSSES + DECLARED.lstrip())
    assert faults(programs, "RIGHT") == {}


@pytest.mark.slow
def test_what_is_not_known_to_is_refused_on_every_rank() -> None:
    programs = programs_of(REFUSED + IN_EAGER.lstrip(), REFUSED_LOSSES + LOSSES_IN_EAGER.lstrip())
    assert faults(programs, "REFUSED: SequenceMixed") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "table"),
    [("region", SIZED), ("region_aot", SIZED_IN_GRAPHS)],
    ids=["region", "region_aot"],
)
def test_sizes_that_data_decides_are_refused_on_every_rank(way: str, table: str) -> None:
    assert faults(programs_of("", table, way), "REFUSED: SequenceMixed") == {}


@pytest.mark.slow
def test_who_says_per_rank_is_let_through() -> None:
    assert faults(programs_of(PER_RANK, LOSSES_PER_RANK), "WRONG") == {}


# The types are those of eager code, which judges every program in every run. What the graph alone
# tells, `test_graphs` checks: how numbers come out of it is alike.
COMPILED = """
m.mix(x.flatten(0, 1)).view(x.shape)   q, k, v = m.heads(x); x + rope(q, k, v, b.places)
y = torch.zeros(x.shape, dtype=x.dtype); y[..., :4] = x[..., 4:8]; y + x
y = m.attend(x.flip(-1), is_causal=False); x + attention(m.heads(x)[0], *m.heads(y)[1:])
"""
COMPILED_LOSSES = """
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED), label_smoothing=0.1)
m.loss(x, b.labels, reduction="sum")  # sum
"""
# What ranks find out when they run.
AT_RUN_TIME = "\nm.loss(x, b.labels.masked_fill(b.places < 5, IGNORED))\n"


@pytest.mark.slow
def test_compiled_programs() -> None:
    assert faults(programs_of(COMPILED, COMPILED_LOSSES, "mesh"), "RIGHT") == {}
    assert faults(programs_of("", AT_RUN_TIME, "mesh"), "REFUSED: SequenceMixed") == {}


def count_while_parts_are_sent() -> list[str]:
    """Return the verdicts on means whose labels are spread evenly and unevenly.

    At this size the first rank computes a part for the other, and sends it while its own loss is
    being computed.
    """
    mesh = world_mesh()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 32, 32, generator=generator)
    labels = torch.randint(32, (2, 32), generator=generator)
    verdicts = []

    def run(x: Tensor, labels: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())

    for is_even in (True, False):
        labels[:, : 0 if is_even else 10] = -100
        forget_compiles()
        call = torch.compile(
            run, backend="cp_aot_eager", fullgraph=True, dynamic=False, options={"mesh": mesh}
        )
        mine = [t.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone() for t in (x, labels)]
        try:
            loss = call(*mine) / mesh.size()
        except cp_inductor.SequenceMixed:
            verdicts.append("refused")
            continue
        dist.all_reduce(loss)
        verdicts.append("right" if torch.allclose(loss, run(x, labels)) else "wrong")
    return verdicts


@pytest.mark.slow
def test_labels_are_counted_in_the_order_of_exchanges() -> None:
    """An op that waited within made ranks wait for one another."""
    for verdicts in run_ranks(2, count_while_parts_are_sent, deadline_s=120):
        assert verdicts == ["right", "refused"]


class Stopped(cp_inductor.CPError):
    """All that a test wants to know is known."""


def judge_graph(program: Program, mesh: Any) -> str:
    """Return the refusal of a program's graph, or "let through", without running it."""
    batch = make_batch(program, 0)
    given = [*(piece(tensor, mesh) for tensor in batch[:-1]), batch.image]

    def stop(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        length = batch.ids.shape[1]
        settings = read_settings({"mesh": mesh, "seq_dims": SEQ_DIMS, "seq_len": length})
        with errors_unwrapped():
            capture(gm, settings)
        raise as_backend_error(Stopped(site="", expected="", got="", remedy=""))

    torch._dynamo.reset()
    run = torch.compile(make_model(program), backend=stop, fullgraph=True, dynamic=False)
    try:
        run(*given)
    except Stopped:
        return "let through"
    except cp_inductor.CPError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def test_branches_that_differ(mesh: Any) -> None:
    """One branch returns tokens, the other what mixes them. Or each rank takes its own."""
    branches = """
torch.cond(m.rows.sum() > 0, lambda x: x * 2, lambda x: x.cumsum(1), (x,))
torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,))
"""
    for program in programs_of(branches):
        assert judge_graph(program, mesh).startswith("SequenceMixed")


# The batch in the place of the sequence, and half of it, is of another length than the tokens.
REFUSALS = ("SequenceMixed", "UnevenSequence")
GRAPHS: list[tuple[Program, str | tuple[str, ...]]] = [
    *((program, "let through") for program in programs_of(RIGHT, RIGHT_LOSSES)),
    *((program, "let through") for program in programs_of(PER_RANK, LOSSES_PER_RANK)),
    *((program, REFUSALS) for program in programs_of(REFUSED, REFUSED_LOSSES + DECLARED.lstrip())),
]


@pytest.mark.long
def test_graphs(mesh: Any) -> None:
    wrong = {}
    for program, expected in GRAPHS:
        verdict = judge_graph(program, mesh)
        if not verdict.startswith("let through" if program.loss in AT_RUN_TIME else expected):
            wrong[str(program)] = verdict
    assert wrong == {}
