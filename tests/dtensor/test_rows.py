"""Rows of programs over DTensors: losses and all gradients are those of one process in float64.

Rows are read as tests/support/idioms.py says; tests/region/test_hunt.py draws programs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from tests.support.hunt import Program, expand, judge_many
from tests.support.idioms import TABLES, rows

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
# Of two ranks one has 6 tokens, the other 5: DTensor's own gradients are twice these.
ELEMENTS = """
F.mse_loss(x, $target, $how)   F.smooth_l1_loss(x, $target, $how)   F.huber_loss(x, $target, $how)
F.l1_loss(x, $target, $how)   F.soft_margin_loss(x, ($target).sign().detach(), $how)
F.binary_cross_entropy(x.sigmoid(), ($target).sigmoid(), $how)
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
y = x.sin(); z = y[:, 2:30]; u = z[:, 3:9]; v = y[:, 4:6]; torch._foreach_mul_([u, v], 3.0); \
s = [y[:, 0:2], y]; s[0] += 1; w = y * 2; y[:, 6] = 0; weigh(torch.cat([z, v, y, u, w, s[0]], 1))
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
    said = judge_many(programs)
    return {str(p): ranks for p, ranks in said.items() if {one.kind for one in ranks} != {"RIGHT"}}


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
    assert_right(TABLES["on_whole"], "eager", {"steps": BEHIND_A_LAYER, "ranks": ranks})


@pytest.mark.slow
def test_ops_without_a_rule_in_graphs() -> None:
    in_graphs = [row for row in TABLES["on_whole"] if row.endswith("# graph")]
    assert_right(in_graphs, "aot", {"steps": BEHIND_A_LAYER})


@pytest.mark.slow
def test_python_reads_the_number_of_the_whole() -> None:
    hows = of_lengths(*EVEN_AND_ODD, reads=rows(READS), mode="checkpoint")
    for mode in ("no_grad", "inference"):
        hows += of_lengths(*EVEN_AND_ODD, reads=["t.item()"], mode=mode)
    assert_right(rows(NUMBERS + CONDITIONS.lstrip()), "eager", *hows)


@pytest.mark.slow
@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_code_reads_the_number_of_the_whole(is_every: bool) -> None:
    whole = {"lengths": (8,), "reads": ["t.item()", "float(t)"]}
    # At a branch the graph breaks.
    broken = {
        "lengths": (9,),
        "reads": ["t.item()", "(1.0 if t > 0.5 else 2.0)"],
        "is_whole": False,
    }
    numbers = ["(x > 0).sum()", "x.abs().amax()"]
    assert_right(numbers if is_every else numbers[:1], "aot", whole)
    assert_right(numbers if is_every else numbers[1:], "aot", broken)


@pytest.mark.long
def test_compiled_code_reads_what_is_true_of_the_whole() -> None:
    """But no `float` of it, for which torch 2.13 has no graph on one process either."""
    some, every = rows(CONDITIONS)
    step = f"x + x.sin() * {some}.item() + x.cos() * {every}.item()"
    hows = of_lengths(*EVEN_AND_ODD, steps=(step,))
    assert judge([Program(0, "aot", is_whole=True, **how) for how in hows]) == {}


@pytest.mark.long
def test_code_of_inductor_reads_the_number_of_the_whole() -> None:
    how = {"lengths": (9,), "reads": ["t.item()", "float(t)"]}
    assert_right(["(x > 0).sum()", "x.mean()"], "inductor", how)


@pytest.mark.slow
def test_accumulating_along_a_sharded_dim() -> None:
    """It stays sharded, says tests/dtensor/test_on_whole.py."""
    assert_right(TABLES["along"], "eager", *of_lengths(4, 9, 11, ranks=3))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "lengths"), [("eager", EVEN_AND_ODD), ("aot", (8,))])
def test_what_is_reduced_may_be_reduced_again(way: str, lengths: tuple[int, ...]) -> None:
    every = 1 if way == "eager" else 2  # in graphs DTensor decides as in eager code
    assert_right(rows(REDUCED)[::every], way, *of_lengths(*lengths))


@pytest.mark.slow
def test_losses_are_the_same_in_every_mode() -> None:
    hows = of_lengths(*EVEN_AND_ODD, mode="train")
    hows += [*of_lengths(9, mode="no_grad"), *of_lengths(8, mode="inference")]
    assert_right(TABLES["composite"], "eager", *hows)


@pytest.mark.slow
def test_losses_of_elements() -> None:
    means, sums = (rows(ELEMENTS.replace("$how", f"reduction='{how}'")) for how in ("mean", "sum"))
    assert_right([*means, *sums], "eager", {})
    assert_right(means[:1], "aot", {})


@pytest.mark.slow
def test_gradients_are_written_to_as_wholes() -> None:
    writes = TABLES["gradient"]
    programs = [Program(0, "eager", ("m.mix(x)",), write=row, lengths=(9,)) for row in writes]
    assert judge(programs) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "each"),
    [(2, 6), *(pytest.param(*how, marks=pytest.mark.long) for how in ((2, 3), (3, 1)))],
)
def test_writes_to_parts_and_views(ranks: int, each: int) -> None:
    """The long case computes every row; in one graph they cost a minute."""
    assert_right(rows(WRITES)[::-each], "aot", *of_lengths(33, ranks=ranks))


@pytest.mark.long
def test_writes_in_a_checkpoint_and_at_lengths_that_change() -> None:
    step = "y = x.sin(); y[:, 1:] = x[:, :-1]; m.attend(y)"
    program = Program(0, "aot", (step,), mode="checkpoint", lengths=(33,), is_whole=True)
    step = "y = x.sin(); y[:, 3] = 0; y[:, x.shape[1] // 2] = y[:, 0] * 2; y"
    how: dict[str, Any] = {"mode": "lengths", "lengths": (33, 20), "dynamic": "marked"}
    assert judge([program, Program(0, "aot", (step,), is_whole=True, **how)]) == {}


@pytest.mark.long
def test_writes_through_inductor() -> None:
    assert_right(rows(WRITES)[-1:], "inductor", *of_lengths(33))
