"""Plain shards: every program is right, or refused on every rank; none is silently wrong.

The programs are rows of tests/support/idioms.py, of a model behind an attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import fx

import cp_inductor
from cp_inductor.backend.failed_trace import errors_unwrapped
from cp_inductor.passes.pipeline import capture
from cp_inductor.passes.settings import read_settings
from cp_inductor.torch_private.dynamo import as_backend_error
from tests.support.hunt import SEQ_DIMS, Program, expand, judge_many, make_batch, make_model, piece
from tests.support.idioms import TABLES, rows

# Right as well, but Dynamo has no graph for it.
RIGHT_IN_EAGER = rows("""
x * nn.Parameter(x.detach() * 2)
""")
# Right in eager code; in a graph, whose tokens are half of those is not known.
DECLARED = rows("""
m.attend(F.conv1d(x.mT, m.mix.weight[..., None].expand(-1, -1, 2), stride=2).mT).mean()
""")
# What Dynamo has no graph for.
IN_EAGER = rows("""
x / x.abs().amax().item()   x + torch.addmm(x[0], m.rows[: x.shape[1]], m.mix.weight)
y = x.clone(); y.data = x.detach().flip(1); y   x + m.rows[b.places.max()]
x + torch.from_dlpack(x.detach().mean(1))[:, None]   x * torch.from_numpy(x.detach().numpy() * 1)
f = io.BytesIO(); torch.save(x.detach().mean(1), f); f.seek(0); x + torch.load(f)[:, None]
x * torch.from_numpy(np.linspace(0, 1, $n))[:, None]
x + nn.Parameter(x.detach().clone()).softmax(1)   x * nn.Parameter(x).mean(1, keepdim=True).tanh()
with torch.no_grad(): y = nn.Parameter(x * 2); x * y.amax()
y = torch.nested.as_nested_tensor([*x], layout=torch.jagged); x + y.to_padded_tensor(0.0).softmax(1)
y = torch.nested.as_nested_tensor([*x]); x + torch.nested.to_padded_tensor(y, 0.0).cumsum(1)
""")
LOSSES_IN_EAGER = rows("""
m.loss(x, b.labels, reduction="sum") / (b.places > 3).sum().item()
F.mse_loss(x, x.mean(1, True).expand_as(x))   x.mean() + x.detach().mean().copy_(x.detach().sum())
x.sum() + (x.sum() / 0.1).long()  # sum   x.sum() + x.sum().div(0.1, rounding_mode="floor")  # sum
""")
# Sizes that data decides, which Python and compiled code read as plain numbers.
SIZED = rows("""
m.loss(x, b.labels) * len(b.ids.unique())   m.loss(x, b.labels) * x[b.keep].shape[0]
n = b.keep.nonzero().unbind(); m.loss(x, b.labels) * len(n)
n = b.ids.to_sparse().values(); torch._dynamo.graph_break(); m.loss(x, b.labels) * n.nbytes
""")
PER_RANK = rows("""
with per_rank(): y = x + x.roll(1, 1); y   y = x.clone(); with per_rank(): y[:, 0] = m.cls; y
""")
LOSSES_PER_RANK = rows("""
with per_rank(): t = m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED)); t
""")


def programs_of(
    steps: Sequence[str], losses: Sequence[str] = (), way: str = "region"
) -> Iterator[Program]:
    """Yield programs of 12 tokens, each with a row behind an attention and before another one."""
    for is_loss, table in ((False, steps), (True, losses)):
        for row in table:
            text, *tags = expand(row, Random(0)).split("  # ")
            how: dict[str, Any] = {"tags": frozenset(tags), "is_whole": way == "mesh"}
            done = ["m.attend(x)"] if is_loss else ["m.attend(x)", text, "m.attend(x)"]
            yield Program(0, way, tuple(done), loss=text if is_loss else Program.loss, **how)


def faults(programs: Iterable[Program], expected: str) -> dict[str, list[str]]:
    """Return the programs whose verdict is not what it should be, on every rank alike."""
    return {
        str(program): [str(one) for one in said]
        for program, said in judge_many([*programs]).items()
        if not all(re.match(expected, str(one)) for one in said)
    }


@pytest.mark.slow
def test_what_computes_each_token_by_itself_is_right() -> None:
    steps, losses = TABLES["tokenwise"] + RIGHT_IN_EAGER, TABLES["means"] + DECLARED
    assert faults(programs_of(steps, losses), "RIGHT") == {}


@pytest.mark.slow
def test_what_is_not_known_to_is_refused_on_every_rank() -> None:
    steps, losses = TABLES["mixing"] + IN_EAGER, TABLES["mixed"] + LOSSES_IN_EAGER
    assert faults(programs_of(steps, losses), "REFUSED: SequenceMixed") == {}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "first"), [("region", 0), ("region_aot", -1)])
def test_sizes_that_data_decides_are_refused_on_every_rank(way: str, first: int) -> None:
    assert faults(programs_of([], SIZED[first:], way), "REFUSED: SequenceMixed") == {}


@pytest.mark.slow
def test_who_says_per_rank_is_let_through() -> None:
    assert faults(programs_of(PER_RANK, LOSSES_PER_RANK), "WRONG") == {}


# The types are those of eager code, which judges every program in every run. What the graph alone
# tells, `test_graphs` checks: how numbers come out of it is alike.
COMPILED = rows("""
m.mix(x.flatten(0, 1)).view(x.shape)   q, k, v = m.heads(x); x + rope(q, k, v, b.places)
y = torch.zeros(x.shape, dtype=x.dtype); y[..., :4] = x[..., 4:8]; y + x
y = m.attend(x.flip(-1), is_causal=False); x + attention(m.heads(x)[0], *m.heads(y)[1:])
""")
COMPILED_LOSSES = rows("""
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED), label_smoothing=0.1)
m.loss(x, b.labels, reduction="sum")  # sum
""")
# What ranks find out when they run.
AT_RUN_TIME = ["m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED))"]


@pytest.mark.slow
def test_compiled_programs() -> None:
    assert faults(programs_of(COMPILED, COMPILED_LOSSES, "mesh"), "RIGHT") == {}
    assert faults(programs_of([], AT_RUN_TIME, "mesh"), "REFUSED: SequenceMixed") == {}


@pytest.mark.slow
def test_labels_are_counted_in_the_order_of_exchanges() -> None:
    """Means whose labels are spread evenly and unevenly; what waited within made ranks hang.

    At this size the first rank computes a part for the other, and sends it while its own loss is
    being computed.
    """
    even = Program(0, "mesh", ("m.attend(x)",), lengths=(32,), is_whole=True)
    assert faults([even], "RIGHT") == {}
    assert faults([replace(even, loss=AT_RUN_TIME[0])], "REFUSED: SequenceMixed") == {}


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
    branches = rows("""
torch.cond(m.rows.sum() > 0, lambda x: x * 2, lambda x: x.cumsum(1), (x,))
torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,))
""")
    for program in programs_of(branches):
        assert judge_graph(program, mesh).startswith("SequenceMixed")


# The batch in the place of the sequence, and half of it, is of another length than the tokens.
# Every second row of what mixes tokens: eager code judges all, by the same types.
REFUSALS = ("SequenceMixed", "UnevenSequence")
MIXING, MIXED = TABLES["mixing"][::2], TABLES["mixed"][::2]
GRAPHS: list[tuple[Program, str | tuple[str, ...]]] = [
    *((program, "let through") for program in programs_of(TABLES["tokenwise"], TABLES["means"])),
    *((program, "let through") for program in programs_of(PER_RANK, LOSSES_PER_RANK)),
    *((program, REFUSALS) for program in programs_of(MIXING, MIXED + DECLARED)),
]


@pytest.mark.long
def test_graphs(mesh: Any) -> None:
    wrong = {}
    for program, expected in GRAPHS:
        expected = "let through" if program.loss in AT_RUN_TIME else expected
        if not (verdict := judge_graph(program, mesh)).startswith(expected):
            wrong[str(program)] = verdict
    assert wrong == {}
