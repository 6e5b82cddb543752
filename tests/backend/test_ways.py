"""Ways of compiling that lose exchanges are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import cp_inductor
from tests.support.ranks import fake_mesh


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return attention(self.linear(x))


def test_compile_on_one_rank_is_refused() -> None:
    model = torch.compile(attention, backend="cp_aot_eager", fullgraph=True)
    with fake_mesh(0, 2) as mesh, dist.config.patch(compile_on_one_rank=True):
        x = DTensor.from_local(torch.randn(1, 6, 16), mesh, [Shard(1)])
        with pytest.raises(cp_inductor.CPError, match="unset TORCH_COMPILE_ON_ONE_RANK"):
            model(x)


@pytest.mark.parametrize("backend", ["cp_aot_eager", "cp_inductor"])
def test_aot_compile_is_refused(backend: str) -> None:
    def compiled(model: Any, **kwargs: Any) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, **kwargs)

    x = torch.randn(1, 6, 16)
    with fake_mesh(0, 2) as mesh:
        sharded = DTensor.from_local(x, mesh, [Shard(1)])
        with pytest.raises(cp_inductor.CPError, match="aot_compile"):
            compiled(attention).aot_compile(((sharded,), {}))
        with pytest.raises(cp_inductor.CPError, match="aot_compile"):
            compiled(attention, options={"mesh": mesh}).aot_compile(((x,), {}))
        model = cp_inductor.parallelize(Model(), mesh, seq_dims={"x": 1})
        with pytest.raises(cp_inductor.CPError, match="aot_compile"):
            compiled(model).forward.aot_compile(((x,), {}))


def test_dtensors_in_nested_regions_are_refused() -> None:
    """Torch inlines what is called once."""
    nested = torch.compiler.nested_compile_region(lambda x: x * attention(x))
    model = torch.compile(lambda x: nested(nested(x)), backend="cp_aot_eager", fullgraph=True)
    with fake_mesh(0, 2) as mesh:
        x = DTensor.from_local(torch.randn(1, 6, 16), mesh, [Shard(1)])
        with pytest.raises(cp_inductor.CPError, match="nested_compile_region"):
            model(x)
