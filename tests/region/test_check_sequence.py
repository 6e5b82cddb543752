"""What is said of graphs and regions over plain shards; `test_plain_shards` has the programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import cp_inductor
from cp_inductor.torch_private.inductor import is_input_of_forward
from tests.support.combinations import warnings_of
from tests.support.graphs import AttentionBlock
from tests.support.ranks import forget_compiles

BATCH, LENGTH, WIDTH, HEADS = 2, 6, 32, 2


attend = AttentionBlock(WIDTH, HEADS, has_norm=True)


def mix_and_attend(x: Tensor) -> Tensor:
    return attend(x.cumsum(1))


def test_heads_in_the_place_of_tokens(mesh: DeviceMesh) -> None:
    def run(x: Tensor) -> Tensor:
        q, k, v = attend.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return attend.out(F.scaled_dot_product_attention(q, k, v).flatten(2))

    report = cp_inductor.explain(run, torch.randn(BATCH, LENGTH, WIDTH), mesh=mesh)
    refusal = report.attentions[-1].refusal
    assert "transpose(1, 2)" in refusal["remedy"]


def test_a_region_that_begins_with_heads(mesh: DeviceMesh) -> None:
    """Where the tokens of its buffers are is known in there."""
    x, heads = torch.randn(2 * LENGTH, BATCH, WIDTH), nn.MultiheadAttention(WIDTH, HEADS)
    into = (heads.in_proj_weight, heads.in_proj_bias, None, None, False, 0.0)
    out = (heads.out_proj.weight, heads.out_proj.bias)
    with cp_inductor.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        given = (x, x, x, WIDTH, HEADS, *into, *out)
        F.multi_head_attention_forward(*given, need_weights=False)


def test_the_whole_error(mesh: DeviceMesh) -> None:
    """Refused before anything runs; the graph of another model compiles behind it."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    compiled = compile_here(mix_and_attend, options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.SequenceMixed) as caught:
        compiled(x)
    error = caught.value
    assert "test_check_sequence.py" in error.site
    assert error.expected == "what computes each token by itself, attention, and sums over tokens"
    assert error.got == "aten.cumsum.default, which mixes tokens"
    assert "cp_inductor.per_rank()" in error.remedy
    assert counters["cp_inductor"]["sites_refused"] == 1


def test_who_knows_better(mesh: DeviceMesh) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with cp_inductor.config.patch(check_sequence=False):
        report = cp_inductor.explain(mix_and_attend, x, mesh=mesh)
    assert [found.verdict for found in report.attentions] == ["rewritten"]
    how = {"check_sequence": False}
    report = cp_inductor.explain(mix_and_attend, x, mesh=mesh, options=how)
    assert [found.verdict for found in report.attentions] == ["rewritten"]


@contextmanager
def tokens_in_region(mesh: DeviceMesh, length: int, refusal: str | None) -> Iterator[Tensor]:
    """Enter a region of so many tokens, which is left by a refusal that says so, if any."""
    x = torch.randn(BATCH, length, WIDTH)
    refused = pytest.raises(cp_inductor.SequenceMixed, match=refusal) if refusal else nullcontext()
    with refused, cp_inductor.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        yield x


def documents_of(positions: Tensor) -> Tensor:
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def write_number(positions: Tensor) -> Tensor:
    numbers = positions + 1
    numbers[:, 0] = 0
    return numbers[:, 0]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda p: bool((documents_of(p)[:, -1] == 0).all()), False),  # of a shard, it is True
        (lambda p: bool(torch.equal(documents_of(p)[:, -1], p[:, 0])), None),
        (lambda p: documents_of(p).max().item(), 1),
        (lambda p: p[0, 0].item(), 0),
        (lambda p: p[0, LENGTH - 1].item(), None),  # is that the last token?
        (lambda p: p[0].tolist(), None),
        (lambda p: write_number(p).max().item(), None),
        (lambda p: torch.randint_like(p, 9).max().item(), None),
        (lambda p: (p * 0.5).max().item(), None),
    ],
)
def test_what_python_asks_of_whole_numbers(
    mesh: DeviceMesh, ask: Callable[[Tensor], object], expected: object
) -> None:
    """The second document begins where this rank's tokens do."""
    positions = torch.cat([torch.arange(LENGTH), torch.arange(7, 7 + LENGTH)])[None]
    for _ in range(2):  # also as a call that is known
        with cp_inductor.context_parallel(mesh, buffers=[positions], buffer_seq_dims=[1]):
            if expected is None:
                with pytest.raises(cp_inductor.SequenceMixed):
                    ask(positions)
            else:
                assert ask(positions) == expected


# Graphs without attention.


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


def shift(x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, WIDTH, 3), padding=1).transpose(1, 2)


def add_up(x: Tensor) -> Tensor:
    return x + x.cumsum(1)


MIXING = [ByHand(), shift, add_up]


@pytest.mark.parametrize("mix", MIXING)
def test_a_graph_without_attention_over_a_mesh(
    mesh: DeviceMesh, mix: Callable[[Tensor], Tensor]
) -> None:
    run = compile_here(mix, options={"mesh": mesh}, fullgraph=True)
    with pytest.raises(cp_inductor.SequenceMixed):
        run(torch.randn(BATCH, LENGTH, WIDTH))


def test_inputs_of_which_nothing_says_where_their_tokens_are(mesh: DeviceMesh) -> None:
    """Without an attention: heads may be tokens, and a matrix may have them in dim 0."""

    def run(one: Tensor, other: Tensor | None = None) -> Tensor:
        return one.cumsum(0) if other is None else one * other

    shards = torch.randn(BATCH, LENGTH, WIDTH)
    unclear = {
        "4 dims": (torch.randn(BATCH, HEADS, LENGTH, WIDTH),),
        "a matrix": (torch.randn(LENGTH, WIDTH),),
        "a vector": (shards, torch.randn(WIDTH)),
    }
    for given in unclear.values():
        forget_compiles()
        compiled = compile_here(run, options={"mesh": mesh}, fullgraph=True)
        with pytest.raises(cp_inductor.SequenceMixed, match="seq_dims"):
            compiled(*given)
    forget_compiles()
    named = compile_here(run, options={"mesh": mesh, "seq_dims": {"other": None}}, fullgraph=True)
    named(shards, torch.randn(WIDTH))
    forget_compiles()
    compiled = compile_here(run, options={"mesh": mesh}, fullgraph=True)
    for clear in (torch.randn(LENGTH, WIDTH), torch.tensor(2.0)):
        compiled(shards, clear)


def test_a_module_that_is_told_to_attend_and_does_it_by_hand(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByHand())
    parallelize_module(model, mesh, {"1": cp_inductor.ContextParallel()})
    with pytest.raises(cp_inductor.SequenceMixed):
        compile_here(model, fullgraph=True)(torch.randn(BATCH, LENGTH, WIDTH))


def compile_here(run: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    return torch.compile(run, backend="cp_aot_eager", **options)  # type: ignore[no-any-return]


# A graph in a region is called with what eager code and other graphs have made, and returns it to
# them. `f` computes each token by itself, `g` does not.

project = nn.Linear(WIDTH, WIDTH)
f = compile_here(lambda x: project(x).relu())
g = compile_here(add_up)


def per_rank(mix: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with cp_inductor.per_rank():
        return mix(x)


def break_between(x: Tensor) -> Tensor:
    x = project(x)
    torch._dynamo.graph_break()
    return add_up(x)


PIECES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "graph": (f, True),
    "graph, eager": (lambda x: project(f(x)), True),
    "graph, mixed in eager": (lambda x: add_up(f(x)), False),
    "mixed in eager, graph": (lambda x: f(add_up(x)), False),
    "mixed in a graph": (lambda x: g(project(x)), False),
    "mixed in a graph, graph": (lambda x: f(g(project(x))), False),
    "mixed behind a break": (compile_here(break_between), False),
    "tokens, mixed tokens": (lambda x: f(x) + f(add_up(x)), False),
    "tokens, what is per rank": (lambda x: f(x) + f(per_rank(add_up, x)), True),
    "mixed per rank": (lambda x: f(per_rank(g, x)), True),
    "mixed and not used": (lambda x: [g(x), f(x)][1], True),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo hides it, but not from pytest
@pytest.mark.parametrize("name", PIECES)
def test_graphs_between_eager_code(mesh: DeviceMesh, name: str) -> None:
    run, is_right = PIECES[name]
    for length in (2 * LENGTH, 2 * LENGTH + 4):  # the second graph has a symbol for the length
        with tokens_in_region(mesh, length, None if is_right else "cumsum") as x:
            run(x).sum().backward()


@pytest.mark.parametrize("run", [add_up, g])
def test_a_mixed_result_without_a_gradient(
    mesh: DeviceMesh, run: Callable[[Tensor], Tensor]
) -> None:
    with torch.no_grad(), tokens_in_region(mesh, 2 * LENGTH, "cumsum") as x:
        logits = run(x)
    assert logits.isfinite().all()  # whoever reads them has been told


def test_what_torch_divides_by_a_number_of_tokens(mesh: DeviceMesh) -> None:
    def of_logs(x: Tensor) -> Tensor:
        scores = x.flatten(0, 1).log_softmax(-1)
        return F.kl_div(scores, scores.exp(), reduction="batchmean")

    def of_probabilities(x: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1))

    for run in (of_logs, of_probabilities, compile_here(of_logs), compile_here(of_probabilities)):
        for length in (12, 13):
            refusal = r"reduction='(batch)?mean'" if length % 2 else None
            with tokens_in_region(mesh, length, refusal) as x:
                run(x)


def test_lengths_of_one_graph(mesh: DeviceMesh) -> None:
    """A mean is right for lengths that divide; the graph that has one serves others as well."""
    run = compile_here(lambda x: project(x).mean(), dynamic=True)
    for length in (12, 14, 13):
        with tokens_in_region(mesh, length, "unequally long" if length % 2 else None) as x:
            run(x).backward()


@pytest.mark.parametrize(
    ("length", "run"),
    [
        (LENGTH, lambda x: x[..., : LENGTH + 1, :]),
        (LENGTH, lambda x: x[:, -LENGTH - 1 :]),
        (LENGTH, lambda x: x.split(LENGTH + 1, 1)[0]),
        (1, lambda x: x[:, ::2]),
    ],
)
@pytest.mark.parametrize("prepare", [lambda run: run, compile_here])
def test_a_part_that_is_longer_than_a_shard(
    mesh: DeviceMesh, length: int, run: Callable[[Tensor], Tensor], prepare: Callable[[Any], Any]
) -> None:
    """It is all of a shard, and a part of the sequence."""
    with tokens_in_region(mesh, 2 * length, r"slice|split|part of") as x:
        prepare(lambda x: run(project(x)).square().sum())(x).backward()


def test_a_dim_that_is_named(mesh: DeviceMesh) -> None:
    def run(x: Tensor) -> Tensor:
        return attend(x.transpose(0, 1))

    x = torch.randn(LENGTH, BATCH, WIDTH)
    refused = cp_inductor.explain(run, x, mesh=mesh).attentions[-1].refusal
    assert "seq_dims" in refused["remedy"]
    report = cp_inductor.explain(run, x, mesh=mesh, options={"seq_dims": {"args[0]": 0}})
    assert [found.verdict for found in report.attentions] == ["rewritten"]
    report = cp_inductor.explain(run, x, mesh=mesh, options={"seq_dims": {"args[0]": 3}})
    assert report.attentions[-1].refusal["got"] == "3"
    for wrong in ([1], {"x": "1"}, {0: 1}, {"x": True}):
        with pytest.raises(cp_inductor.InvalidArgument, match="dims of tokens, or None"):
            cp_inductor.explain(run, x, mesh=mesh, options={"seq_dims": wrong})


def test_a_name_that_no_input_has(mesh: DeviceMesh) -> None:
    def run(x: Tensor, unused: Tensor) -> Tensor:
        return x * 2

    x = torch.randn(BATCH, LENGTH, WIDTH)
    named = {"mesh": mesh, "seq_dims": {"x": 1, "unused": None}}
    compile_here(run, options=named, fullgraph=True)(x, x)
    forget_compiles()
    named["seq_dims"] = {"X": 1}
    with pytest.raises(cp_inductor.InvalidArgument, match=r"unused, x, got 'X'"):
        compile_here(run, options=named, fullgraph=True)(x, x)


def test_a_sum_that_is_returned_is_said(mesh: DeviceMesh) -> None:
    def run(x: Tensor) -> Tensor:
        return attend(x).mean(1)

    with pytest.warns(cp_inductor.SequenceWarning, match="returns a mean over each rank's own"):
        cp_inductor.explain(run, torch.randn(BATCH, LENGTH, WIDTH), mesh=mesh)


# DTensors know how they are sharded; that they no longer are, they do not say.


@pytest.mark.parametrize(
    "lose", [lambda x: x.roll(1, 1), lambda x: x.flip(1), lambda x: torch.cat([x, x], 1)]
)
def test_a_sharding_that_is_lost_is_said(
    lose: Callable[[Tensor], Tensor], mesh: DeviceMesh
) -> None:
    def run(x: Tensor) -> Tensor:
        q = lose(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
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
    assert warnings_of(partial(compile_here(run, fullgraph=True), x)) == []


# The pieces.


def test_an_input_of_the_forward_is_no_name() -> None:
    node = fx.Graph().placeholder("primals_1")
    assert not is_input_of_forward(node)
