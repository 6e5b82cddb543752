"""Rows of programs over DTensors: losses and all gradients are those of one process in float64.

Rows are read as tests/support/idioms.py says; tests/region/test_hunt.py draws programs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from tests.support.hunt import Program, expand, judge_on_rank
from tests.support.idioms import rows
from tests.support.ranks import run_ranks

# Ops without a sharding rule, or with a wrong one. Those with a tag are computed in graphs, too.
ON_WHOLE = """
weigh(F.one_hot(b.ids, VOCAB) * x[..., :1])   weigh(F.one_hot(b.ids) * x[..., :1])
weigh(F.logsigmoid(x))  # graph   weigh(F.prelu(x.mT, m.cls).mT)   weigh(F.hardtanh(x, -0.3, 0.4))
F.binary_cross_entropy_with_logits(x[..., 0], b.keep.to(x.dtype))  # graph
F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), m.cls.detach().abs(), \
pos_weight=m.cls.detach().abs())  # graph
weigh(x.masked_scatter(b.keep[..., None].expand_as(x), m.rows))  # graph
weigh(x.masked_scatter(b.keep[..., None], x * 2))   weigh(x.argmax(1))
y = x * 2; y.data = x.detach().roll(1, 1); weigh(x * y)
weigh(F.adaptive_avg_pool1d(x.mT, 1)[..., 0])
weigh(F.conv1d(x.flatten(0, 1)[:, None], m.cls[None, None, :3], padding=1).view_as(x).sum(1))
weigh(x[torch.arange(len(x)), (torch.arange($n) * (b.ids != 3)).argmax(-1)])  # graph
i = (b.ids == b.ids.amax(1, keepdim=True)).int().argmax(-1); \
weigh(x.gather(1, i[:, None, None].expand(-1, 1, WIDTH)))  # graph
weigh(x[b.keep])   y = x * 1; y[b.keep] = 0.0; weigh(y)   weigh(x.masked_select(b.keep[..., None]))
weigh(b.keep.nonzero())   weigh(b.ids.unique())
weigh(torch.bincount(b.ids.flatten(), minlength=40))
weigh(x.index_add(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh((x * 1).index_add_(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh(torch.zeros_like(x).index_add_(1, torch.tensor([0, 2, 3, 6, 5, 1, 1, *range(7, $n)]), \
x))  # graph
weigh((x * 1).index_copy_(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh((x * 1).scatter_(1, b.ids[..., None] % $n, 0.5))
weigh(torch.zeros_like(x).scatter_reduce(1, (b.ids % $n)[..., None].expand_as(x), x, \
"amax"))  # graph
weigh(torch.searchsorted(torch.arange(7).to(x.dtype), x))   weigh(x.repeat_interleave(2, 1))
weigh(x.repeat_interleave(b.ids[0] % 3, 1))   weigh(F.pad(x, (0, 0, 1, -1)) * x)
weigh(x.flatten(1) @ m.rows.flatten()[: $n * WIDTH, None].expand(-1, 3))  # graph
weigh(x.unbind(1)[5])   weigh(x.unfold(1, 3, 2))   weigh(x.movedim(1, 0).sin())
weigh(F.linear(F.batch_norm(x.mT, None, None, training=True).mT, m.mix.weight[:3]))  # graph
weigh(F.linear(F.max_pool1d(x.mT, 3, 2).mT, m.mix.weight[:3]))   weigh(torch.cdist(x, x + 1))
weigh(F.pixel_shuffle(x[:, None].repeat(1, 4, 1, 1), 2))  # graph   weigh(x.quantile(0.3, 1))
F.ctc_loss(x.log_softmax(-1).transpose(0, 1), b.labels[:, :2] % 22 + 1, ($n,) * len(x), (2,) * \
len(x))
weigh((x * 1).unsqueeze_(1).transpose_(1, 2))   weigh((x * 1).tril_())   weigh(b.ids << 1)
w, i = x[..., 0].topk(3, 1); i = i[..., None].expand(-1, -1, WIDTH); \
weigh(x.scatter_add(1, i, x.gather(1, i).tanh() * w[..., None]))
y, i = x * 1, x[..., 0] > 0; y[i] = y[i].tanh(); weigh(y)
t = x.flatten(0, 1); e = t.detach()[:, :3].argmax(-1); y = torch.zeros_like(t); \
for k in range(3): y.index_add_(0, torch.where(e == k)[0], t[torch.where(e == k)[0]] * (k + 1.0)); \
weigh(y)
weigh(F.layer_norm(x.mT, ($n,)).square().sum(0))   y = torch.polar(x, x * 2); \
weigh(y.real) + weigh(y.angle())  # graph
weigh(F.embedding(b.ids, m.head.weight)) + weigh(F.embedding(b.ids, m.head.weight, \
scale_grad_by_freq=True)) + weigh(F.embedding(b.labels, m.head.weight))
F.cross_entropy(m.head(x).flip(1).flatten(0, 1), b.labels.flatten())  # graph
"""
# One number of which each rank would hold a part, and how Python reads it.
NUMBERS = """
x.sum()   x.mean()   x.abs().amax()   x.min()   x.norm()   x.norm(p=1)   (x > 0).sum()
(x * 0.01 + 1).prod()   x[0, 5, 1]   x[0, :, 0].argmax()
torch.dot(x.flatten(), x.flatten())   torch.einsum("bsd,bsd->", x, x)   (x[0].T @ x[0])[0, 0]
x[0, :, 0].logsumexp(0)   x.std()   torch._foreach_norm([x, x * 2])[1]
"""
CONDITIONS = """
(x > 2).any()   (x > -9).all()
"""
READS = """
t.item()   int(t)   float(t)   bool(t)   (1.0 if t > 0.5 else 2.0)
sum(1 for _ in range(min(int(t), 4)))   torch.tensor(t.item()).item()   float(f"{t.item():.6f}")
t.tolist()   t.detach().numpy().item()   sum(x[0].tolist()[-1]) / 8   np.asarray(x.detach()).sum()
"""
# What meets sums, concatenations, writes and losses once it is reduced.
REDUCED = """
y = x.where(torch.arange($n)[:, None] < $n - 1, torch.nan); weigh(y.amax(1).isnan() * 1.0) + \
weigh(y.min().isnan() * 1.0)
weigh(x.round().argmax()) + weigh((x > 0).long().argmin())
x.norm(dim=1).sum(-1).square().mean()   torch.cat([x.norm(dim=1), x.mean(1)], -1).square().sum()
(x.masked_fill(x > 1, -9).amax(1) + x.mean(1)).square().sum()   x.tanh().prod(1).sum().exp()
F.normalize(x.mean(1), dim=-1)[0].pow(3).sum()   (x - x.amax()).square().sum()
F.cosine_similarity(x.mean(1)[:1], x.mean(1)[1:], dim=-1).mean()
k = (x[..., :1] > -0.5).double(); t = k.sum(1); t.clamp_(min=1); t = (x * k).sum(1) / t; \
F.cross_entropy(t @ t.T, torch.arange(2))
F.glu(x.mean(1)).square().sum()   F.glu(x[0].T @ x[0]).square().sum()   x.var(1).sqrt().sum()
(x[0].T @ x[0])[:4].masked_fill(x[0, :4] > 0, 2.0).square().sum()
x.sum([], keepdim=True).square().sum()
"""
# What accumulates along the sequence, also of equal elements and of what is no number; it stays
# sharded, says tests/dtensor/test_on_whole.py.
ALONG = """
weigh(x.cumsum(1))   weigh(x.logcumsumexp(1))   weigh(x.cumprod(1))   weigh(b.ids.cumsum(-1))
weigh(b.keep.cumsum(-1))   weigh(b.ids.cumsum(0, dtype=torch.int32))
y, i = x.cummax(1); weigh(y) + weigh(i)   y, i = x.round().cummin(1); weigh(y) + weigh(i)
y = x.where(x < 1, torch.nan); weigh(y.cumsum(1).nan_to_num())
y = x.where(x < 1, torch.nan); y, i = y.cummax(1); weigh(y.nan_to_num()) + weigh(i)
"""
# Losses that torch makes of other ops, which DTensor would take as they are under inference_mode.
LOSSES = """
F.cross_entropy(m.head(x).mT, b.answers)   F.nll_loss(m.head(x).log_softmax(-1).mT, b.answers)
F.cross_entropy(m.head(x).mT, b.answers, weight=m.rows[:VOCAB, 0].detach().abs())
m.loss(x, b.answers, label_smoothing=0.1)   F.cross_entropy(x.mT, x.softmax(-1).mT)
m.loss(x, b.answers, reduction="sum") / (b.answers != IGNORED).sum().item()
F.l1_loss(x, x * 2 + 1)   F.triplet_margin_loss(x, x * 2, x + 1)
F.margin_ranking_loss(x[..., 0], x[..., 1], x[..., 2].sign())
F.poisson_nll_loss(x, x.detach().abs())   torch.cov(x.flatten(0, 1).T).square().sum()
F.cosine_embedding_loss(x.flatten(0, 1), x.flatten(0, 1) * 2 + 1, x.detach()[..., \
0].flatten().sign())
F.ctc_loss(x.log_softmax(-1).transpose(0, 1), torch.tensor([[1, 2], [2, 3]]), ($n,) * 2, (2, 2))
"""
# Of two ranks one has 6 tokens, the other 5: DTensor's own gradients are twice these.
ELEMENTS = """
F.mse_loss(x, $target, $how)   F.smooth_l1_loss(x, $target, $how)   F.huber_loss(x, $target, $how)
F.l1_loss(x, $target, $how)   F.soft_margin_loss(x, ($target).sign().detach(), $how)
F.binary_cross_entropy(x.sigmoid(), ($target).sigmoid(), $how)
"""
# Writes to a gradient as a backward leaves it.
GRADIENTS = """
p.grad.fill_(0.25)   p.grad.add_(1.0)   p.grad.round_(decimals=9).sign_()   p.grad[0] = 0.5
p.grad.clamp_(-1e-3, 1e-3)   torch.nn.utils.clip_grad_value_([p], 1e-3, foreach=True)
p.grad.mul_((p.detach() > 0).to(p.dtype))   p.grad.t().add_(1.0)   p.grad.copy_(p.grad.abs())
p.grad.data.clamp_(-1e-3, 1e-3)   torch.manual_seed(3); p.grad.normal_()
torch.optim.AdamW([p], fused=True).step()
"""
# Writes in place to parts and views of tokens, in graphs.
WRITES = """
y = x.sin(); y[:, 0] = m.cls; weigh(y.exp())   m.rows[(b.ids != 3).long().cumsum(1)].sum()
y = x.sin(); y.narrow(1, 3, 20).zero_(); y[:, -4:].copy_(y[:, 20:24] * 3); \
y.select(1, 7).add_(m.cls); y[:, 3:20].masked_fill_(y[:, 3:20] > 0, 0.5); y[:, 3:20].cumsum_(1); \
weigh(y)
y = x.sin(); z = y[:, 4:6]; with torch.no_grad(): y[:, 3:9].mul_(2); with torch.no_grad(): y[:, \
0] = 0; with torch.no_grad(): y.add_(1); y.detach()[:, 3:9].mul_(2); y.data[:, 3].mul_(2); \
weigh(y * y.sin() * z.sum())
y = x.sin(); y[:, [1, 20, 30]] = 0; y[:, torch.tensor([3, 17])] = m.cls; \
y[:, (torch.arange($n) % 3) == 0] = 0; y[y > 0.5] = 0; weigh(y)
y = x.sin(); for i in range(0, $n, 16): y[:, i] = y[:, i - 1] * 2; \
torch._foreach_mul_([y[:, 2:5], y[:, 9]], 2.0); weigh(y)
i = (x > 0).long(); i[:, 1:] = i[:, :-1].clone(); i[:, 0] = 7; weigh(x * i)
y = x.roll(1, 1); y[:, 0] = 0; z = x.cumsum(1).roll(2, 1); z[:, :3].mul_(2); weigh(x + y + z)
y = x.sin(); y.transpose(1, 2)[..., 4].zero_(); y.flatten(0, 1)[5:40].mul_(2); \
y.view(*y.shape[:2], 4, -1)[:, 5:, 1].zero_(); y.diagonal(dim1=1, dim2=2).zero_(); weigh(y)
y = x.sin(); y[..., 2] = 1; y[:, ::3] = 0; y[:, -2] = 1; y[:, 5:5] = 1; y[:, 40:] = 2; weigh(y)
y = x.sin(); z = y[:, 2:30]; u = z[:, 3:9]; v = y[:, 4:6]; u.mul_(3); s = [y[:, 0:2], y]; \
s[0] += 1; w = y * 2; y[:, 6] = 0; weigh(torch.cat([z, v, y, u, w, s[0]], 1))
"""


def sum_of(some: Sequence[str]) -> str:
    """Return one row that adds up the numbers of some, each with a weight of its own."""
    lines = []
    for number, row in enumerate(some):
        *statements, result = expand(row, Random(0)).partition("  # ")[0].split("; ")
        lines += [*statements, f"r{number} = {result}"]
    names = ", ".join(f"r{number}" for number in range(len(some)))
    return "; ".join([*lines, f"sum((1 + i / 8) * r for i, r in enumerate([{names}]))"])


def times_read(numbers: Sequence[str], reads: Sequence[str]) -> str:
    """Return a row that multiplies by what Python reads of numbers."""
    read = " + ".join(f"{i} * float({text})" for i, text in enumerate(reads, 1))
    lines = [f"t = {number}; r += {i} * ({read})" for i, number in enumerate(numbers, 1)]
    return "; ".join(["r = 0.0", *lines, "x * r"])


def make(some: Sequence[str], way: str, reads: Sequence[str] = (), **how: Any) -> Program:
    steps = {"steps": (times_read(some, reads),)} if reads else {"steps": (), "loss": sum_of(some)}
    return Program(0, way, **{"lengths": (11,), "is_whole": True, **steps, **how})


def judge(programs: Sequence[Program]) -> dict[str, Any]:
    """Return what was said of those that are not right on all ranks."""
    seconds = 120 + 10 * len(programs)
    every = run_ranks(programs[0].ranks, judge_on_rank, programs, deadline_s=seconds)
    verdicts = zip(programs, zip(*every, strict=True), strict=True)
    return {str(p): said for p, said in verdicts if {one.kind for one in said} != {"RIGHT"}}


def assert_right(some: Sequence[str], way: str, *hows: dict[str, Any]) -> None:
    """Judge rows together in each way to run them; and if these are not right, each alone."""
    if wrong := judge([make(some, way, **how) for how in hows]):
        assert judge([make([row], way, **how) for how in hows for row in some]) == {}
        assert wrong == {}


def of_lengths(*lengths: int, **how: Any) -> list[dict[str, Any]]:
    return [{"lengths": (length,), **how} for length in lengths]


BEHIND_A_LAYER = ("m.mix(x)",)  # whose output is a view of what torch places as _StridedShard
EVEN_AND_ODD = (8, 9)  # DTensor keeps partials of even shards alone


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ops_without_a_rule(ranks: int) -> None:
    assert_right(rows(ON_WHOLE), "eager", {"steps": BEHIND_A_LAYER, "ranks": ranks})


@pytest.mark.slow
def test_ops_without_a_rule_in_graphs() -> None:
    in_graphs = [row for row in rows(ON_WHOLE) if row.endswith("# graph")]
    assert_right(in_graphs, "aot", {"steps": BEHIND_A_LAYER})


@pytest.mark.slow
def test_python_reads_the_number_of_the_whole() -> None:
    hows = of_lengths(*EVEN_AND_ODD, reads=rows(READS), mode="checkpoint")
    for mode in ("no_grad", "inference"):
        hows += of_lengths(*EVEN_AND_ODD, reads=["t.item()"], mode=mode)
    assert_right(rows(NUMBERS + CONDITIONS.lstrip()), "eager", *hows)


@pytest.mark.slow
def test_compiled_code_reads_the_number_of_the_whole() -> None:
    whole = {"lengths": (8,), "reads": ["t.item()", "float(t)"]}
    # At a branch the graph breaks.
    broken = {
        "lengths": (9,),
        "reads": ["t.item()", "(1.0 if t > 0.5 else 2.0)"],
        "is_whole": False,
    }
    assert_right(["(x > 0).sum()", "x.abs().amax()"], "aot", whole, broken)


@pytest.mark.long
def test_compiled_code_reads_what_is_true_of_the_whole() -> None:
    """But no `float` of it, for which torch 2.13 has no graph on one process either."""
    steps = [(f"x + x.sin() * {row}.item()",) for row in rows(CONDITIONS)]
    hows = [{"steps": step, **how} for step in steps for how in of_lengths(*EVEN_AND_ODD)]
    assert judge([Program(0, "aot", is_whole=True, **how) for how in hows]) == {}


@pytest.mark.long
def test_code_of_inductor_reads_the_number_of_the_whole() -> None:
    hows = of_lengths(*EVEN_AND_ODD, reads=["t.item()", "float(t)"])
    assert_right(["(x > 0).sum()", "x.mean()"], "inductor", *hows)


@pytest.mark.slow
def test_accumulating_along_a_sharded_dim() -> None:
    assert_right(rows(ALONG), "eager", *of_lengths(4, 9, 11, ranks=3))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "lengths"), [("eager", EVEN_AND_ODD), ("aot", (8,))])
def test_what_is_reduced_may_be_reduced_again(way: str, lengths: tuple[int, ...]) -> None:
    assert_right(rows(REDUCED), way, *of_lengths(*lengths))


@pytest.mark.slow
def test_losses_are_the_same_in_every_mode() -> None:
    hows = of_lengths(*EVEN_AND_ODD, mode="train")
    hows += [*of_lengths(9, mode="no_grad"), *of_lengths(8, mode="inference")]
    assert_right(rows(LOSSES), "eager", *hows)


@pytest.mark.slow
def test_losses_of_elements() -> None:
    means, sums = (rows(ELEMENTS.replace("$how", f"reduction='{how}'")) for how in ("mean", "sum"))
    assert_right([*means, *sums], "eager", {})
    assert_right(means[:1], "aot", {})


@pytest.mark.slow
def test_gradients_are_written_to_as_wholes() -> None:
    programs = [
        Program(0, "eager", ("m.mix(x)",), write=row, lengths=(9,)) for row in rows(GRADIENTS)
    ]
    assert judge(programs) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "each"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.long)])
def test_writes_to_parts_and_views(ranks: int, each: int) -> None:
    """The long case computes every row; in one graph they cost a minute."""
    assert_right(rows(WRITES)[::-each], "aot", *of_lengths(33, ranks=ranks))
    step = "y = x.sin(); y[:, 1:] = x[:, :-1]; m.attend(y)"
    how: dict[str, Any] = {"is_whole": True, "ranks": ranks}
    assert judge([Program(0, "aot", (step,), mode="checkpoint", lengths=(33,), **how)]) == {}


@pytest.mark.long
def test_writes_at_lengths_that_change() -> None:
    step = "y = x.sin(); y[:, 3] = 0; y[:, x.shape[1] // 2] = y[:, 0] * 2; y"
    how: dict[str, Any] = {"mode": "lengths", "lengths": (33, 20), "dynamic": "marked"}
    assert judge([Program(0, "aot", (step,), is_whole=True, **how)]) == {}


@pytest.mark.long
def test_writes_through_inductor() -> None:
    assert_right(rows(WRITES)[-3:], "inductor", *of_lengths(33))
