"""Whole models over batches that differ: one graph for all of them, and one code for all ranks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing import assert_close

from cp_inductor import (
    InvalidArgument,
    UnsupportedStrategy,
    batch_plans,
    cross_compile,
    explain,
    pad_packed,
    parallelize,
    prepared,
    reset,
)
from cp_inductor.batches.plans import HashedTables, copy_numbers, numbers_of, pin
from cp_inductor.dtensor.packed import capacity_of
from cp_inductor.graph.collectives import list_collectives
from cp_inductor.plan import batch as planning
from tests.support.graphs import format_graph, lowered_graphs, recorded_lowering
from tests.support.packed import (
    difference,
    draw_documents,
    in_documents,
    largest_error,
    make_batch,
    make_model,
    packed_on_meta,
    shards_of,
    train_step,
)
from tests.support.ranks import fake_mesh, on_ranks, run_ranks, world_mesh
from tests.support.reference import assert_within

CASES = [
    # model, ranks, ranks per node, batches, tokens
    ("llama", 4, 2, 4, 157),
    ("mistral", 3, 0, 8, 301),
    ("qwen3", 2, 0, 8, 301),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "world_size", "node_size", "num_batches", "length"), CASES)
def test_models_over_many_batches(
    name: str, world_size: int, node_size: int, num_batches: int, length: int
) -> None:
    for counts in run_ranks(world_size, _train, name, node_size, num_batches, length):
        assert counts["graphs"] == 1
        assert counts["planned_over_nodes"] == (counts["batches_planned"] if node_size else 0)
        assert counts["sites_planned_at_run_time"] == 2
        # Layers share the plan of their batch; Mistral's window is part of its one rule.
        assert 1 < counts["batches_planned"] <= num_batches
        assert counts["reads"] <= READS, counts["reads"] - READS


# Where a step reads tensors on the host, after the first: once per batch its tables, and their
# digest in the first runs. The rest is never on a device.
READS = {
    "cp_inductor.batches.plans._as_numpy",
    "cp_inductor.trust.claims.digest_of",
    # What the host counted in the plan.
    "cp_inductor.graph.exchange_rows.exchange_rows",
    "cp_inductor.graph.exchange_rows.read_part",
    # The numbers of a plan, on their way to the device.
    "cp_inductor.batches.plans.copy_numbers",
    # Tiles of the CPU, which computes with scores.
    "cp_inductor.tiles.masked_tiles._strips",
}
READERS = ("tolist", "item", "numpy", "cpu", "to")
READERS += ("__bool__", "__int__", "__float__", "__index__")


@contextmanager
def host_reads() -> Iterator[set[str]]:
    """Within this context, note ``module.function`` of the library's code that reads a tensor."""
    found: set[str] = set()
    with ExitStack() as patches:
        for name in READERS:
            patches.enter_context(mock.patch.object(Tensor, name, _noting(name, found)))
        yield found


def _noting(name: str, found: set[str]) -> Any:
    read = getattr(Tensor, name)

    @wraps(read)
    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__", "")
        is_cast = name == "to" and not any(isinstance(arg, (str, torch.device)) for arg in args)
        if module.startswith(("cp_inductor", "passes")) and not is_cast:
            found.add(f"{module}.{frame.f_code.co_name}")
        return read(tensor, *args, **kwargs)

    return note


def _train(name: str, node_size: int, num_batches: int, length: int) -> dict[str, Any]:
    mesh, machine = world_mesh(), f"{node_size}xh100:nvlink4 x ib400" if node_size else ""
    model, reference = make_model(name), make_model(name)
    how = {"fullgraph": True, "dynamic": False, "options": {"machine": machine}}
    compiled = torch.compile(model, backend="cp_aot_eager", **how)
    close = partial(assert_within, tolerance=1e-9, least=1e-3)
    over_nodes = mock.Mock(wraps=planning.assign_over_nodes)
    for step in range(num_batches):
        batch = make_batch(step, length)
        shards = shards_of(batch, mesh)
        watched = host_reads() if step else nullcontext(set())
        with watched as reads, mock.patch.object(planning, "assign_over_nodes", over_nodes):
            train_step(compiled, reference, batch, shards, close)
    found = counters["cp_inductor"]
    names = ("sites_planned_at_run_time", "batches_planned")
    counts = {"graphs": counters["stats"]["unique_graphs"], **{n: found[n] for n in names}}
    return {**counts, "reads": reads, "planned_over_nodes": over_nodes.call_count}


# --- Lengths that change ----------------------------------------------------------------------

LENGTHS = (65, 77, 80, 66, 81, 95)


@pytest.mark.long
@on_ranks(2)
def test_batches_of_other_lengths_are_filled_up() -> None:
    mesh = world_mesh()
    model, reference = make_model("llama", 1), make_model("llama", 1)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    for step, length in enumerate(LENGTHS):
        batch = make_batch(step, length)
        shards = shards_of(pad_packed(batch), mesh)
        train_step(compiled, reference, batch, shards, partial(assert_close, rtol=1e-6, atol=1e-9))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == len({capacity_of(length) for length in LENGTHS}) == 2


@pytest.mark.parametrize("length", [1, 64, 65, 80, 81, 127, 128, 129, 4097, 131072])
def test_capacities(length: int) -> None:
    capacity = capacity_of(length)
    assert length <= capacity == capacity_of(capacity)
    assert length <= 64 or capacity - length < capacity / 5


def test_what_is_filled_with_what() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, 1]]),
        "document_ids": torch.tensor([[0, 4, 1], [2, 2, 2]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
        "weights": torch.ones(2, 3),
        "note": "kept",
    }
    filled = pad_packed(batch, 5, pad_token_id=3, values={"weights": 0.0})
    assert filled["input_ids"].tolist() == [[5, 6, 7, 3, 3], [8, 9, 1, 3, 3]]
    assert filled["labels"][:, 3:].tolist() == [[-100, -100]] * 2
    assert filled["document_ids"].tolist() == [[0, 4, 1, 5, 6], [2, 2, 2, 3, 4]]
    assert filled["attention_mask"][:, 3:].tolist() == [[False, False]] * 2
    assert filled["weights"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert filled["note"] == "kept"
    assert pad_packed(batch, 3)["weights"] is batch["weights"]  # nothing is missing


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_ids": None}, "expected one of position_ids"),
        ({"scores": torch.ones(1, 9)}, "got scores; say what fills it up"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "expected documents by numbers"),
        ({"input_ids": torch.ones(9)}, "expected input_ids of shape"),
    ],
)
def test_what_is_not_filled(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        pad_packed({**make_batch(0, 9), **change})
    with pytest.raises(InvalidArgument, match="at most length=8"):
        pad_packed(make_batch(0, 9), 8)


# --- One code for all ranks -------------------------------------------------------------------


def tensors_on(mesh: DeviceMesh, *, requires_grad: bool = False) -> list[Tensor]:
    """Return query, key, value and documents."""
    tokens = [
        distribute_tensor(torch.randn(1, heads, 96, 8), mesh, [Shard(2)]) for heads in (4, 2, 2)
    ]
    documents = distribute_tensor(torch.zeros(1, 96, dtype=torch.long), mesh, [Shard(1)])
    return [*(tensor.requires_grad_(requires_grad) for tensor in tokens), documents]


def code_of(rank: int, world_size: int, target: str) -> dict[str, str]:
    arguments = partial(packed_on_meta, tokens=256, has_whole_documents=True)
    how: dict[str, Any] = {"world_size": world_size, "rank": rank, "target": target}
    with implicit_replication():
        return dict(cross_compile(in_documents, arguments, **how).code)


def test_all_ranks_have_the_same_graphs() -> None:
    texts = []
    for rank in (0, 3):
        with fake_mesh(rank, 4) as mesh, implicit_replication():
            tensors = tensors_on(mesh, requires_grad=True)
            graphs = lowered_graphs(in_documents, *tensors)
        texts.append({kind: format_graph(gm.graph) for kind, gm in graphs.items()})
    assert set(texts[0]) == {"forward", "backward"}
    assert texts[0] == texts[1]


class OfTrees(nn.Module):
    """Two layers under one mask, of what is counted in a batch that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 96), nn.Linear(32, 96)])

    def forward(self, ids: Tensor, leave: Tensor) -> Tensor:
        enter, place = (ids == 3).cumsum(1), torch.arange(ids.shape[1])
        of_query, of_key = enter[:, None, :, None], enter[:, None, None]
        mask = (of_key <= of_query) & (of_query < leave[:, None, None]) & (place <= place[:, None])
        x = self.embed(ids)
        for layer in self.layers:
            heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x.sum()


def test_ranks_that_pad_their_shards_plan_as_often_as_the_others() -> None:
    """The last of three ranks has fewer tokens: AOTAutograd finds fewer of its gathers equal."""
    ids, leave = torch.randint(9, (1, 40)), torch.full((1, 40), 99)
    for tensor in (ids, leave):
        maybe_mark_dynamic(tensor, 1)
    met = []
    for rank in (0, 2):
        with fake_mesh(rank, 3) as mesh, torch.no_grad(), recorded_lowering() as graphs:
            model = parallelize(OfTrees(), mesh)
            torch.compile(model, backend="cp_aot_eager", fullgraph=True)(ids, leave)
        met.append([one.op for one in list_collectives(graphs["inference"])])
    assert met[0].count("plan_batch of int64") == 1
    assert met[0] == met[1]


def text_of(code: dict[str, str]) -> str:
    """Return generated code without the names of files and the comments."""
    lines = [line for text in code.values() for line in text.splitlines()]
    kept = [line for line in lines if not line.strip().startswith("#") and "/tmp" not in line]
    return re.sub(r"\bc[0-9a-z]{51}\b", "", "\n".join(kept))


@pytest.mark.long
def test_code_does_not_grow_with_the_ranks() -> None:
    few = code_of(5, 8, "cpu")
    many = [code_of(rank, 1024, "cpu") for rank in (0, 517)]
    assert set(few) == {"forward", "backward"}
    assert text_of(many[0]) == text_of(many[1])
    for kind, text in few.items():
        assert len(many[0][kind]) < 1.05 * len(text)


# --- Triton -----------------------------------------------------------------------------------


@pytest.mark.long
def test_triton_code_reads_the_plan_as_data() -> None:
    pytest.importorskip("triton")
    code = code_of(1, 4, "cuda:sm_90")
    for kind, num_exchanges in (("forward", 3), ("backward", 4)):
        lines = [line.strip() for line in code[kind].partition("def call(")[2].splitlines()]
        exchange = "torch.ops.cp_inductor.exchange_rows.default("
        starts = [n for n, line in enumerate(lines) if exchange in line]
        waits = [n for n, line in enumerate(lines) if "wait_tensor.default(" in line]
        tiles = [n for n, line in enumerate(lines) if line.startswith("triton_tem_fused_")]
        assert len(starts) == len(waits) == num_exchanges
        # No rank and no number of rows: splits are read from the sizes of the plan.
        assert not any("all_to_all_single" in line for line in lines)
        assert all(re.search(r", \w+, \d+, 4, '0'\)$", lines[n]) for n in starts), lines[starts[0]]
        # What is fetched starts before the first tile, and is waited for behind it.
        assert starts[1] < tiles[0] < waits[0]
        # What goes home starts before the last tile, and is waited for behind it.
        assert starts[-1] < tiles[-1] < waits[-1]
        # Own cells, what was fetched, own cells: lengths that only the data binds.
        assert any(re.search(r"128\*u\d+", line) for line in lines)


# --- Choices ----------------------------------------------------------------------------------


def explained(**options: Any) -> Any:
    with fake_mesh(1, 3) as mesh, implicit_replication():
        report = explain(in_documents, *tensors_on(mesh), options=options)
    (attention,) = report.attentions
    return attention


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "planned once per batch"),
        ({"plan": "runtime", "stages": 2}, "planned once per batch"),
        ({"plan": "static"}, "rows"),
        ({"strategy": "rows"}, "rows"),
    ],
)
def test_when_plans_are_made(options: dict[str, Any], strategy: str) -> None:
    attention = explained(**options)
    assert attention.verdict == "rewritten"
    assert attention.facts["strategy"] == strategy
    assert attention.facts["stages"] == options.get("stages", attention.facts["stages"])
    assert str(attention)


def test_what_cannot_be_planned_at_run_time_is_refused() -> None:
    attention = explained(plan="runtime", strategy="rows")
    assert attention.verdict == "refused" and "strategy='rows'" in attention.refusal["got"]
    with pytest.raises(UnsupportedStrategy, match="one of auto, static, runtime"):
        explained(plan="sometimes")


# --- Layers that are alike ----------------------------------------------------------------------


def three_layers(query: Tensor, key: Tensor, value: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Attend thrice by one rule: the first and the last in the same documents."""
    first = in_documents(query, key, value, one)
    second = in_documents(query.sin(), key, value.cos(), other)
    return first + second + in_documents(query.cos(), key.sin(), value, one)


@pytest.mark.long
@on_ranks(2)
def test_layers_alike_in_other_documents() -> None:
    reset()
    mesh, length = world_mesh(), 301
    torch.manual_seed(4)
    whole = [torch.randn(2, heads, length, 8).double() for heads in (4, 2, 2, 4)]
    documents = [torch.cat([draw_documents(length) for _ in range(2)]) for _ in range(2)]
    compiled = torch.compile(three_layers, backend="cp_aot_eager", fullgraph=True)
    before = counters["cp_inductor"]["batches_planned"]
    how: dict[str, Any] = {"of_tables": [Replicate()]}
    assert difference(three_layers, compiled, whole, documents, mesh, **how) < 1e-12
    planned = counters["cp_inductor"]["batches_planned"] - before
    assert planned == 2, "layers in the same documents share a plan"


# --- Heads on other ranks ----------------------------------------------------------------------


@pytest.mark.long
@on_ranks(4)
def test_beside_tensor_parallelism() -> None:
    """Groups are of the heads that a rank has, which are fewer than the attention has."""
    mesh, length = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), 301
    torch.manual_seed(1)
    whole = [torch.randn(2, n, length, 8).double() for n in (8, 4, 4, 8)]
    documents = torch.cat([draw_documents(length), draw_documents(length) * 3])
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    placements, of_tables = [Shard(2), Shard(1)], [Replicate()] * 2
    how = (mesh, placements, of_tables)
    assert difference(in_documents, compiled, whole, [documents], *how) < 1e-12
    assert batch_plans()[-1].num_groups == 2


# --- Batches that a thread plans while those before them are computed.


@pytest.mark.slow
@on_ranks(2)
def test_a_loader_is_prepared_while_its_batches_are_used() -> None:
    reset()  # other tests were here before, in this process, and their attentions are remembered
    mesh = world_mesh()
    # The graph may break, as it may by default; it does not.
    compiled = torch.compile(make_model("qwen3"), backend="cp_aot_eager", dynamic=False)

    def forward(batch: dict[str, Tensor]) -> None:
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
        with torch.no_grad(), implicit_replication():
            compiled(**sharded, use_cache=False)

    forward(make_batch(0, 97))
    before = counters["cp_inductor"].copy()
    batches = [make_batch(step, 97) for step in (1, 2, 3)]
    seen = []
    for batch in prepared(batches):
        while counters["cp_inductor"]["batches_planned"] == before["batches_planned"]:
            time.sleep(0.001)  # it is planned before it comes
        forward(batch)
        seen.append(batch)
    assert all(one is other for one, other in zip(seen, batches, strict=True))
    planned = counters["cp_inductor"]["batches_planned"] - before["batches_planned"]
    assert planned == 3, "each batch has one plan"
    assert counters["stats"]["unique_graphs"] == 1


def test_what_fails_in_a_loader_fails_where_it_is_used() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield make_batch(0, 8)
        raise LookupError("no more")

    ahead = prepared(batches())
    assert next(ahead)["input_ids"].shape == (1, 8)
    with pytest.raises(LookupError, match="no more"):
        next(ahead)
    assert list(prepared([])) == []


def of_whole_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    whole = documents.full_tensor() if isinstance(documents, DTensor) else documents
    return in_documents(query, key, value, whole)


def of_random_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    return in_documents(query, key, value, documents + torch.randint_like(documents, 1))


@pytest.mark.slow
@on_ranks(2)
def test_what_is_prepared_is_a_function_of_the_batch() -> None:
    mesh, batch = world_mesh(), {"documents": draw_documents(24)}
    reset()  # other tests were here before, in this process
    compiled = torch.compile(of_whole_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    batch = {"documents": draw_documents(24) + 7}
    assert _plans_made_ahead(batch) == 1
    planned = counters["cp_inductor"]["batches_planned"]
    assert largest_error(compiled, mesh, batch["documents"]) < 1e-12
    assert counters["cp_inductor"]["batches_planned"] == planned, "the plan is found"
    for other in (draw_documents(25), draw_documents(24).int()):
        assert _plans_made_ahead({"documents": other}) == 0
    reset()
    compiled = torch.compile(of_random_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    state = torch.get_rng_state()
    assert _plans_made_ahead(batch) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_what_goes_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned once, and what is pinned is what is copied; played on the CPU."""
    tables = HashedTables.of([torch.arange(256)[None] // 50])
    found = numbers_of(tables, "Eq(t0(b,q),t0(b,k))", 1, (256, 256), (2, 2), 1, 2, 0, "")
    pinned: list[Tensor] = []

    def pin_memory(self: Tensor) -> Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    pin(found)
    pin(found)
    assert len(pinned) == 1
    copied = copy_numbers(found, torch.device("cpu"))
    assert torch.equal(copied, torch.from_numpy(found.numbers))
    assert copied.data_ptr() != pinned[0].data_ptr()


def _plans_made_ahead(batch: dict[str, Tensor]) -> int:
    before = counters["cp_inductor"]["plans_prepared"]
    assert list(prepared([batch])) == [batch]
    return counters["cp_inductor"]["plans_prepared"] - before
