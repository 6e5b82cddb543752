"""What users of other libraries reported in public, each beside itself on one process in float64.

A row has a model whose `forward` is its loss, and a batch. Over DTensors loss and gradients are
right, in eager code and through `cp_aot_eager`, where a second run gives the same bits. A region
refuses them, by what is said in the row. Further reports stand elsewhere: images
across a border (`test_on_whole.py`, and Llava), packed gated delta states (`test_recurrences.py`),
short depthwise convolutions (`test_convolve.py`), and queries that Llama 4 scales by their
positions (`test_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_inductor
from tests.support.combinations import AOT, EAGER, compiled, whole
from tests.support.ranks import on_ranks, world_mesh

VOCABULARY, WIDTH, HEADS, PADDING = 23, 16, 2, 3
Batch = dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotate = lambda query, key: (query, key)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.rotate(query, key)
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens, two attentions, and the mean loss, in which tokens may have weights.

    Documents begin where positions do, so that each token of padding is one. The number of padding
    is that of a word, too: `keep` says what is padding.
    """

    def __init__(self, has_documents: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.has_documents = has_documents
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.places = nn.Embedding(64, WIDTH)
        self.first, self.second = Attention(), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        mask, order = None, torch.arange(ids.shape[1])
        if "keep" in more:
            mask = more["keep"][:, None, None] & (order[:, None] >= order)
        if self.has_documents:
            document = (positions == 0).cumsum(1)[:, None]
            mask = (document[..., None] == document[:, :, None]) & (order[:, None] >= order)
        x = self.between(self.first(self.tokens(ids) + self.places(positions), mask))
        logits = self.head(self.second(x, mask)).transpose(1, 2)
        weights = more.get("weights", labels != -100)
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()

    def between(self, x: Tensor) -> Tensor:
        return x


class Routed(Decoder):
    """Experts; losses that balance them, of tokens with labels; and counters in a buffer."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("counts", torch.zeros(3))

    def between(self, x: Tensor) -> Tensor:
        self.logits = self.router(x)
        self.chosen = F.one_hot(self.logits.topk(2, -1).indices, 3).sum(-2).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.counts += self.chosen.sum((0, 1))
        weights = self.logits.softmax(-1) * self.chosen
        for number, expert in enumerate(self.experts):
            x = x + expert(x) * weights[..., number : number + 1]
        return x

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        loss = super().forward(ids, positions, labels)
        keep = (labels != -100)[..., None].to(loss.dtype)
        loads = (self.chosen * keep).sum((0, 1)) / keep.sum()
        chances = (self.logits.softmax(-1) * keep).sum((0, 1)) / keep.sum()
        z = self.logits.logsumexp(-1).square().mean()
        return loss + 0.1 * 3 * (loads * chances).sum() + 0.01 * z


class FlexBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        window: Any = lambda b, h, q, k: (q >= k) & (q - k < 190)  # noqa: E731
        mask = create_block_mask(window, 1, 1, x.shape[1], x.shape[1], "cpu", (256, 128))
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return flex_attention(query, key, value, block_mask=mask).square().mean()


class Rotated(nn.Module):
    """Rotary embeddings of transformers, which may depend on the greatest position."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        torch.manual_seed(0)
        heads = {"num_attention_heads": HEADS, "max_position_embeddings": 16}
        parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
        config = llama.LlamaConfig(hidden_size=WIDTH, rope_parameters=parameters, **heads)
        self.rotary, self.attention = llama.LlamaRotaryEmbedding(config), Attention()
        self.rotate = llama.apply_rotary_pos_emb

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = self.rotary(x, positions)
        self.attention.rotate = lambda query, key: self.rotate(query, key, *angles)
        return self.attention(x).square().mean()


def tokens(length: int, batch: int = 2) -> Batch:
    """Return tokens of which the first have no labels, so that ranks have unequally many."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(VOCABULARY, (2, batch, length), generator=generator)
    labels[0, : length // 2 + 1] = -100
    positions = torch.arange(length).expand(batch, -1).contiguous()
    return {"ids": ids, "positions": positions, "labels": labels}


def packed(*lengths: int, padding: int = 0) -> Batch:
    """Return documents behind each other, and tokens of padding at position 0."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {**tokens(sum(lengths), 1), "positions": positions}
    batch["labels"] = batch["ids"].roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
    fill = {"labels": -100}
    return {key: F.pad(part, (0, padding), value=fill.get(key, 0)) for key, part in batch.items()}


def padded(length: int) -> Batch:
    batch, keep = tokens(length), torch.ones(2, length, dtype=torch.bool)
    keep[1, -4:] = False
    batch["ids"][:, 1::3] = PADDING
    batch["ids"][~keep] = PADDING
    return {**batch, "labels": batch["labels"].masked_fill(~keep, -100), "keep": keep}


def weighted(length: int) -> Batch:
    weights = torch.rand(2, length, generator=torch.Generator().manual_seed(4)).double()
    return {**tokens(length), "weights": weights.masked_fill(weights < 0.3, 0)}


def states(length: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "positions": tokens(length)["positions"]}


@dataclass(frozen=True)
class Report:
    """A model and its batch.

    Attributes:
        region: what a region says.
        alone: the batch of one process, if it is another one.
        is_eager: whether eager code over DTensors computes it.
        is_one_graph: whether Dynamo has one graph for it, on one process as well.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    region: str
    alone: Callable[[], Batch] | None = None
    is_eager: bool = True
    is_one_graph: bool = True


def rope(kind: str, region: str, **more: Any) -> Report:
    """Return a report whose sequence is longer than the 16 original positions, and no shard is."""
    is_one_graph = kind != "dynamic"
    return Report(
        lambda: Rotated(kind, **more), lambda: states(26), region, is_one_graph=is_one_graph
    )


FIRST = {"original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}

REPORTS = {
    # The last document divides neither by the ranks nor by twice as many.
    "padding at position 0": Report(
        lambda: Decoder(has_documents=True),
        lambda: packed(5, 9, 7, padding=5),
        "cumsum.default, which mixes tokens",
        lambda: packed(5, 9, 7),
        is_eager=False,
    ),
    "padding is a word": Report(
        Decoder, lambda: padded(13), "numbers that are the same on every rank", is_eager=False
    ),
    "weights of tokens": Report(Decoder, lambda: weighted(11), "own tokens"),
    "losses of routers": Report(Routed, lambda: tokens(14), "own tokens"),
    "blocks of 256 by 128": Report(
        FlexBlocks, lambda: states(300), "compile the function that calls it", is_eager=False
    ),
    "dynamic": rope("dynamic", "Python to read numbers of the whole sequence"),
    "longrope": rope("longrope", "max.default over each rank's own tokens", **FIRST, **FACTORS),
}

Numbers = dict[str, Tensor]
assert_same = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def shards(batch: Batch, mesh: DeviceMesh) -> Batch:
    return {name: cp_inductor.shard(part, mesh) for name, part in batch.items()}


def take_step(model: nn.Module, run: Any, batch: Batch) -> Numbers:
    """Return the loss, and gradients by their names, whole."""
    model.zero_grad()
    with implicit_replication():
        loss = run(**batch)
        loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": whole(loss.detach()), **{name: whole(p.grad) for name, p in trained.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
@on_ranks(2)
@cp_inductor.flex_gradients_on_cpu()
def test_report(name: str) -> None:
    report, mesh = REPORTS[name], world_mesh()
    alone = report.make().double()
    expected = take_step(alone, alone, (report.alone or report.batch)())
    model = cp_inductor.parallelize(report.make().double(), mesh)
    batch = shards(report.batch(), mesh)
    if report.is_eager:
        assert_same(take_step(model, model, batch), expected)
    run = torch.compile(model, backend=AOT, fullgraph=report.is_one_graph, dynamic=False)
    found = take_step(model, run, batch)
    assert_same(found, expected)
    assert_same(take_step(model, run, batch), found, atol=0)
    model, batch = report.make().double(), report.batch()
    buffers = {"buffers": list(batch.values()), "buffer_seq_dims": [1] * len(batch)}
    region = cp_inductor.context_parallel(mesh, **buffers)
    with pytest.raises(cp_inductor.CPError, match=report.region), region:
        take_step(model, model, batch)


class Adapter(nn.Module):
    """Adds a product of two small weights to a layer, as LoRA does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).double())
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


def make_adapted(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose adapters come after it was parallelized."""
    model: Any = Routed().double()
    model = cp_inductor.parallelize(model, mesh) if mesh else model
    model.first.project = Adapter(model.first.project)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
@on_ranks(2)
def test_adapters_and_counters_of_experts(form: str) -> None:
    """Train, and evaluate behind each step; weights and buffers are those of one process."""
    states = []
    for mesh in (world_mesh(), None):
        model, optimizer = make_adapted(mesh)
        run = compiled(model, form, dynamic=False) if mesh else model
        batch = shards(tokens(11), mesh) if mesh else tokens(11)
        for _ in range(2):
            take_step(model.train(), run, batch)
            optimizer.step()
            with torch.no_grad(), implicit_replication():
                model.eval()
                run(**batch)
        states.append({name: whole(tensor) for name, tensor in model.state_dict().items()})
    assert_same(*states, atol=1e-8)
