"""Ways of compiling that lose exchanges are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import cp_inductor
from tests.support.graphs import AttentionBlock, attend_causal
from tests.support.ranks import fake_mesh


def heads(mesh: DeviceMesh) -> list[DTensor]:
    return [DTensor.from_local(torch.randn(1, 2, 6, 8), mesh, [Shard(2)]) for _ in range(3)]


def test_compile_on_one_rank_is_refused() -> None:
    model = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)
    with fake_mesh(0, 2) as mesh, dist.config.patch(compile_on_one_rank=True):
        tensors = heads(mesh)
        with pytest.raises(cp_inductor.CPError, match="unset TORCH_COMPILE_ON_ONE_RANK"):
            model(*tensors)


@pytest.mark.parametrize("backend", ["cp_aot_eager", "cp_inductor"])
def test_aot_compile_is_refused(backend: str) -> None:
    def compiled(model: Any, **kwargs: Any) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, **kwargs)

    refused = partial(pytest.raises, cp_inductor.CPError, match="aot_compile")
    with fake_mesh(0, 2) as mesh:
        tensors = heads(mesh)
        with refused():
            compiled(attend_causal).aot_compile((tuple(tensors), {}))
        shards = tuple(tensor.to_local() for tensor in tensors)
        with refused():
            compiled(attend_causal, options={"mesh": mesh}).aot_compile((shards, {}))
        model = cp_inductor.parallelize(AttentionBlock(), mesh, seq_dims={"x": 1})
        with refused():
            compiled(model).forward.aot_compile(((torch.randn(1, 6, 32),), {}))


def test_dtensors_in_nested_regions_are_refused() -> None:
    """Torch inlines what is called once."""
    nested = torch.compiler.nested_compile_region(lambda x: x * attend_causal(x, x, x).sum())
    model = torch.compile(lambda x: nested(nested(x)), backend="cp_aot_eager", fullgraph=True)
    with fake_mesh(0, 2) as mesh:
        x, *_ = heads(mesh)
        with pytest.raises(cp_inductor.CPError, match="nested_compile_region"):
            model(x)
