"""Large logits are computed for some tokens at a time, by Inductor's chunker, and exactly so."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import metrics
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.rehearsal.rank import Job
from tests.rehearsal.rehearse import rehearse
from tests.support.packed import in_documents
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import full
from tests.support.wrapper import allocations

DIM, VOCABULARY = 16, 192
# What makes torch's chunker take logits of a test.
SMALL = {
    "auto_chunker.enable": True,
    "auto_chunker.output_size_threshold": 1024,
    "auto_chunker.amplify_ratio_threshold": 1,
    "auto_chunker.num_chunk": 3,
}


class Model(nn.Module):
    """Packed documents, labels that are shifted, and a head that is tied or not."""

    def __init__(self, *, is_tied: bool, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(vocabulary, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.head = nn.Linear(DIM, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        query, key, value = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        if documents is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            out = in_documents(query, key, value, documents)
        x = x + out.transpose(1, 2).flatten(2)
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids, labels = torch.randint(VOCABULARY, (2, 1, length), generator=generator)
    # Some labels are left out, among them all of some chunks of the first rank.
    labels[:, : length // 4] = -100
    labels[:, -7::2] = -100
    documents = torch.tensor([0] * 29 + [1] * 41 + [2] * (length - 70))[None]
    return ids, labels, documents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "is_tied", "dtype"),
    [(3, True, torch.float32), pytest.param(2, False, torch.bfloat16, marks=pytest.mark.long)],
)
@on_ranks("ranks")
def test_packed_and_shifted_over_uneven_shards(
    ranks: int, is_tied: bool, dtype: torch.dtype
) -> None:
    mesh, cases, model = world_mesh(), batch(95), Model(is_tied=is_tied)
    expected = model(*cases)
    (2.5 * expected).backward()  # the chunker takes the gradient of the loss for 1, and scales
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    model = cp_inductor.parallelize(model.to(dtype), mesh)
    # Packed documents are planned once per batch, whose sizes only data says.
    compiled = torch.compile(
        model, backend="cp_inductor", fullgraph=True, dynamic=False, options=SMALL
    )
    before = metrics.num_auto_chunking
    with implicit_replication():
        loss = compiled(*(distribute_tensor(t, mesh, [Shard(1)]) for t in cases))
        (2.5 * loss).backward()
    assert metrics.num_auto_chunking == before + 1
    # bfloat16 rounds by 2^-9, in the layers before the loss and where three chunks are summed.
    of_loss, of_gradient = (2e-6, 5e-6) if dtype == torch.float32 else (2**-8, 2**-5)
    torch.testing.assert_close(full(loss).float(), expected.detach(), rtol=of_loss, atol=0)
    for name, one in model.named_parameters():
        grad = full(one.grad)
        bound = of_gradient * wanted[name].abs().max().item()
        assert (grad - wanted[name]).abs().max().item() <= bound, name
        assert grad.abs().max() > 0


@pytest.mark.slow
def test_gpu_programs_are_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model, options = Model(is_tied=True), {**SMALL}
    job = Job(model, batch(96)[:2], placement=Shard(1), options=options, folder=str(tmp_path))
    report = rehearse(job)
    code = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert code.count("chunking_subgraph") >= 3
    assert report.is_fine, str(report)
    assert "loss" in report.differences and "gradient of embedding.weight" in report.differences


def largest_bytes(code: str) -> int:
    """Return the size of the largest buffer that generated code allocates."""
    found = allocations(code)
    return max(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in found)


def generated(options: dict[str, Any], loss: type[nn.Module] = Model) -> str:
    """Generate the forward of a rank with 16384 tokens and logits of 2 GiB."""
    model = loss(is_tied=False, vocabulary=32768)

    def tokens(mesh: DeviceMesh) -> tuple[Any, ...]:
        ids = torch.empty(1, 32768, dtype=torch.int64, device="meta")
        return tuple(distribute_tensor(ids, mesh, [Shard(1)]) for _ in range(2))

    with implicit_replication():
        code = cp_inductor.cross_compile(
            model, tokens, world_size=2, rank=1, target="cpu", options=options
        ).code
    return code["forward"]


LOGITS = 16384 * 32768 * 4


def test_by_default_large_logits_are_never_whole() -> None:
    assert largest_bytes(generated({})) <= LOGITS / 8


class PerPosition(Model):
    """Its loss has the classes in the middle, which the chunker does not follow."""

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_logits_that_stay_whole_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cp_inductor"):
        assert largest_bytes(generated({}, PerPosition)) >= LOGITS
    (said,) = [one.getMessage() for one in caplog.records if "stay whole" in one.getMessage()]
    assert "(2.0 GiB)" in said and "Missing propagation rule" in said


def test_a_chunker_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.fx_passes import auto_chunker

    def fail(*args: Any) -> None:
        raise AssertionError("of its own")

    monkeypatch.setattr(auto_chunker, "propagate", fail)
    with caplog.at_level(logging.WARNING, logger="cp_inductor"):
        assert largest_bytes(generated({})) >= LOGITS
    assert any("chunker says of its own" in one.getMessage() for one in caplog.records)
