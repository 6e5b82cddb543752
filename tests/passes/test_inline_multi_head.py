"""nn.MultiheadAttention over DTensors is taken apart, so that its masks are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.combinations import assert_beside
from tests.support.ranks import on_ranks, world_mesh

BATCH, LENGTH, DIM, WINDOW = 3, 14, 16, 5


class Encoder(nn.Module):
    """A layer of torch's under a sliding window, for which padding does not exist."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(DIM, 4, 24, 0.0, batch_first=True)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        distance = at[:, None] - at
        is_far = (distance < 0) | (distance >= WINDOW)
        return self.layer(x, src_mask=is_far, src_key_padding_mask=is_padding)


@pytest.mark.slow
@on_ranks(2)
def test_masks_over_dtensors() -> None:
    mesh = world_mesh()
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    is_padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, 9, 6])[:, None]
    whole = Encoder().double()
    expected = whole(x, is_padding)
    expected.square().sum().backward()
    inputs = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in (x, is_padding)]
    for backend in (None, "cp_aot_eager"):
        model = cp_inductor.parallelize(Encoder().double(), mesh)
        run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        with implicit_replication():
            out = run(*inputs)
        out.square().sum().backward()
        assert_beside(model, whole, (out, expected), tolerance=1e-12, least=1.0)
    with implicit_replication():
        (report,) = cp_inductor.explain(model, *inputs).attentions
    assert report.facts["mask"].startswith("causal, window 5"), report
