"""Whole models over batches that differ: one graph for all of them, and one code for all ranks."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor import (
    UnsupportedStrategy,
    batch_plans,
    cross_compile,
    explain,
    prepare,
    reset,
)
from tests.ranks import fake_rank, run_ranks

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attn_implementation": "sdpa",
}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 40}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
}


def make_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model, config, extra = MODELS[name]
    torch.manual_seed(0)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **extra))
    return built.double()


def make_batch(step: int, length: int) -> dict[str, Tensor]:
    """Return packed documents, whose lengths are others in every step."""
    draw = random.Random(step)
    positions: list[int] = []
    while len(positions) < length:
        positions += range(min(draw.choice((1, 7, 50, 150)), length - len(positions)))
    tokens = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(step))
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.tensor([positions]),
    }


CASES = [
    # model, ranks, batches, tokens
    pytest.param("llama", 2, 4, 157),
    *(
        pytest.param(name, world_size, 20, 301, marks=pytest.mark.long)
        for name in MODELS
        for world_size in (2, 3)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size", "num_batches", "length"), CASES)
def test_models_over_many_batches(
    name: str, world_size: int, num_batches: int, length: int
) -> None:
    for counts in run_ranks(world_size, _train, name, num_batches, length):
        assert counts["graphs"] == 1
        assert counts["sites_planned_at_run_time"] == 2
        # Layers share the plan of their batch; Mistral's window is part of its one rule.
        assert 1 < counts["batches_planned"] <= num_batches


def _train(name: str, num_batches: int, length: int) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, reference = make_model(name), make_model(name)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    for step in range(num_batches):
        batch = make_batch(step, length)
        expected = reference(**batch, use_cache=False)
        expected.loss.backward()
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
        with implicit_replication():
            result = compiled(**sharded, use_cache=False)
            result.loss.backward()
        loss = result.loss.full_tensor() if isinstance(result.loss, DTensor) else result.loss
        assert abs(loss.item() - expected.loss.item()) <= 1e-6 * expected.loss.item(), step
        for (place, p), (_, q) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            scale = max(q.grad.abs().max().item(), 1e-3)
            assert (grad - q.grad).abs().max().item() <= 1e-9 * scale, (step, place)
        model.zero_grad()
        reference.zero_grad()
    found = counters["cp_inductor"]
    names = ("sites_planned_at_run_time", "batches_planned")
    return {"graphs": counters["stats"]["unique_graphs"], **{n: found[n] for n in names}}


# --- Ahead of time ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_that_was_prepared_is_not_planned_again() -> None:
    for planned in run_ranks(2, _prepare):
        # Plans made: ahead of each step, and in it. Before the first, nothing is known to plan for.
        assert planned == [(0, 1), (1, 0), (1, 0)]


def _prepare() -> list[tuple[int, int]]:
    reset()  # other tests were here before, in this process, and their attentions are remembered
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = make_model("qwen3")
    # The graph may break, as it may by default; it does not.
    compiled = torch.compile(model, backend="cp_aot_eager", dynamic=False)
    made = []
    for step in range(3):
        batch = make_batch(step, 97)
        before = counters["cp_inductor"]["batches_planned"]
        assert prepare(batch) is batch
        ahead = counters["cp_inductor"]["batches_planned"]
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
        with torch.no_grad(), implicit_replication():
            compiled(**sharded, use_cache=False)
        made.append((ahead - before, counters["cp_inductor"]["batches_planned"] - ahead))
    assert counters["stats"]["unique_graphs"] == 1
    assert [plan.world_size for plan in batch_plans()][-3:] == [2, 2, 2]
    return made


# --- One code for all ranks -------------------------------------------------------------------


def in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    mask = (place[:, None] >= place) & (documents[:, None, :, None] == documents[:, None, None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def code_of(
    rank: int, world_size: int, target: str, *, requires_grad: bool = True, **options: Any
) -> dict[str, str]:
    def arguments(mesh: Any) -> list[Tensor]:
        length = 256 * world_size
        like = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": requires_grad}
        tokens = [
            distribute_tensor(torch.empty(1, heads, length, 64, **like), mesh, [Shard(2)])
            for heads in (4, 2, 2)
        ]
        documents = torch.empty(1, length, dtype=torch.int64, device="meta")
        return [*tokens, distribute_tensor(documents, mesh, [Replicate()])]

    with implicit_replication():
        compiled = cross_compile(
            in_documents,
            arguments,
            world_size=world_size,
            rank=rank,
            target=target,
            options=options,
        )
    return dict(compiled.code)


def text_of(code: dict[str, str]) -> str:
    """Return generated code without the names of files and the comments."""
    lines = [line for text in code.values() for line in text.splitlines()]
    kept = [line for line in lines if not line.strip().startswith("#") and "/tmp" not in line]
    return re.sub(r"\bc[0-9a-z]{51}\b", "", "\n".join(kept))


@pytest.mark.parametrize(
    "requires_grad",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_all_ranks_have_the_same_code(requires_grad: bool) -> None:
    codes = [code_of(rank, 4, "cpu", requires_grad=requires_grad) for rank in (0, 3)]
    assert set(codes[0]) == ({"forward", "backward"} if requires_grad else {"inference"})
    assert text_of(codes[0]) == text_of(codes[1])


@pytest.mark.long
def test_code_does_not_grow_with_the_ranks() -> None:
    few = code_of(5, 8, "cpu")
    many = [code_of(rank, 1024, "cpu") for rank in (0, 517)]
    assert text_of(many[0]) == text_of(many[1])
    for kind, text in few.items():
        assert len(many[0][kind]) < 1.05 * len(text)


ARTIFACT = """
import sys, torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.test_batches import in_documents

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
if rank:
    torch.compiler.load_cache_artifacts(open(path, "rb").read())
q, k, v = (
    DTensor.from_local(torch.randn(1, n, 64, 8), mesh, [Shard(2)], run_check=False).requires_grad_()
    for n in (4, 2, 2)
)
documents = DTensor.from_local(torch.arange(256)[None], mesh, [Replicate()], run_check=False)
compiled = torch.compile(in_documents, backend="cp_inductor", fullgraph=True, dynamic=False)
with implicit_replication():
    compiled(q, k, v, documents).sum().backward()
found = counters["inductor"]
print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"])
if not rank:
    open(path, "wb").write(torch.compiler.save_cache_artifacts()[0])
"""


@pytest.mark.long
def test_what_one_rank_compiled_serves_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    said = []
    for rank in (0, 3):
        # A cache of its own: what it has, it has of rank 0.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"cache_{rank}"))
        command = [sys.executable, "-c", ARTIFACT, str(rank), str(tmp_path / "artifacts")]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1])
    assert said == ["hits 0 misses 2", "hits 2 misses 0"]


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


def verdict(**options: Any) -> tuple[str, Any]:
    with fake_rank(1, 3), implicit_replication():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        tokens = [
            distribute_tensor(torch.randn(1, heads, 96, 8), mesh, [Shard(2)]) for heads in (4, 2, 2)
        ]
        documents = distribute_tensor(torch.zeros(1, 96, dtype=torch.long), mesh, [Shard(1)])
        report = explain(in_documents, *tokens, documents, options=options)
    (attention,) = report.attentions
    return attention.verdict, attention


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "planned once per batch"),
        ({"plan": "runtime", "stages": 2}, "planned once per batch"),
        ({"plan": "static"}, None),
        ({"strategy": "rows"}, "rows"),
    ],
)
def test_when_plans_are_made(options: dict[str, Any], strategy: str | None) -> None:
    word, attention = verdict(**options)
    assert word == "rewritten"
    if strategy is None:
        assert attention.facts["strategy"] != "planned once per batch"
    else:
        assert attention.facts["strategy"] == strategy
    assert attention.facts["stages"] == options.get("stages", attention.facts["stages"])
    assert str(attention)


def test_what_cannot_be_planned_at_run_time_is_refused() -> None:
    word, attention = verdict(plan="runtime", strategy="rows")
    assert word == "refused" and "strategy='rows'" in attention.refusal["got"]
    with pytest.raises(UnsupportedStrategy, match="plan: one of"):
        verdict(plan="sometimes")
